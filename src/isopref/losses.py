"""Objectives: (policy, reference, parameters) -> one value per pair. Pure: no mean, no config.

Each function has the name under which objectives.py lists it, with its parameters and their defaults. All stay finite,
with finite gradients, for log-ratios of +-1e4. No pair knows another, but for the coupled ones, which are given the
whole global batch and see it as a `Whole`. P: pairs.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from isopref import objectives
from isopref.errors import ConfigError
from isopref.types import Needs, PairLogps

EXP_LIMIT = 30.0  # beyond, e^x goes on as its tangent
DISCOPOP_TAU = 0.05


@dataclass(frozen=True)
class Whole:
    """What a coupled loss has to know of a global batch, beside the log-probabilities of its P pairs."""

    share: Tensor  # P: what each pair counts for; they sum to one
    past: Tensor  # 2: over earlier batches, sums of (pairs * mean gain of an answer in nats) and of pairs

    @classmethod
    def first(cls, share: Tensor) -> "Whole":
        """A batch with none before it."""
        return cls(share, share.new_zeros(2))

    def with_this(self, policy: PairLogps, ref: PairLogps) -> Tensor:
        """The past of the next batch."""
        chosen, rejected = gains(policy, ref)
        gain = (0.5 * (chosen + rejected) * self.share).sum()
        return self.past + len(self.share) * torch.stack([gain, torch.ones_like(gain)])


@dataclass(frozen=True)
class Term:
    """An objective with its parameters filled in, and its weight in the sum."""

    formula: Callable[..., Tensor]
    params: Mapping[str, Any]
    about: objectives.Objective
    weight: float = 1.0

    def __call__(self, policy: PairLogps, ref: PairLogps, whole: Whole | None) -> Tensor:
        batch = {"whole": whole} if self.about.coupled else {}
        return self.weight * self.formula(policy, ref, **batch, **self.params)


@dataclass(frozen=True)
class PairLoss:
    """A sum of objectives: (policy, reference) -> P. A coupled one is given the whole global batch at once."""

    terms: tuple[Term, ...]
    nll_weight: float = 0.0  # of the term that is added: the negative log-likelihood of chosen answers, per token
    ld_alpha: float = 1.0  # what a token beyond the length of the pair's shorter answer counts for
    wpo: bool = False  # whether a pair counts by how likely its answers are under the policy
    balance_weight: float = 0.0  # of the term that is added for a mixture of experts: their balance

    def __call__(self, policy: PairLogps, ref: PairLogps, *, whole: Whole | None = None) -> Tensor:
        first, *others = (term(policy, ref, whole) for term in self.terms)
        loss_P = sum(others, first)
        return loss_P if policy.weight is None else policy.weight * loss_P

    @property
    def needs(self) -> Needs:
        """What it has to know of a microbatch besides log-probabilities."""
        return Needs(heads=self.ld_alpha != 1, confidence=self.wpo, routing=self.balance_weight > 0)

    @property
    def needs_reference(self) -> bool:
        """Without: nothing is scored for one, and what stands for it is zero."""
        return any(term.about.needs_reference for term in self.terms)

    @property
    def coupled(self) -> bool:
        """Whether the loss of a pair depends on the other pairs of its global batch."""
        return any(term.about.coupled for term in self.terms)

    @property
    def first_pass(self) -> bool:
        """Whether a step begins with a pass without gradient over the global batch."""
        return self.coupled or self.balance_weight > 0

    @property
    def beta(self) -> float:
        """Scale of the implicit rewards. Where there are several objectives, rewards are those of the first."""
        return float(self.terms[0].params["beta"])

    def gains(self, policy: PairLogps, ref: PairLogps) -> tuple[Tensor, Tensor]:
        """The implicit rewards over beta, in nats or nats per token: P, P."""
        about = self.terms[0].about
        if not about.needs_reference:
            ref = replace(ref, chosen=torch.zeros_like(ref.chosen), rejected=torch.zeros_like(ref.rejected))
        return mean_gains(policy, ref) if about.per_token else gains(policy, ref)


def pair_loss(
    loss: objectives.Loss,
    *,
    nll_weight: float = 0.0,
    ld_alpha: float = 1.0,
    wpo: bool = False,
    balance_weight: float = 0.0,
    **params: Any,
) -> PairLoss:
    """The objective of that name, or the sum of several with their weights: {"sigmoid": 1.0, "hinge": 0.5}.

    Parameters go to the objectives that take them; each has its defaults for those left out. Raises ConfigError for
    values out of bounds (objectives.LIMITS) and for parameters that none of them takes.
    `nll_weight` adds that much of the negative log-likelihood of chosen answers, per token over the global batch.
    `ld_alpha` is LD-DPO's (the reference's log-probabilities must have the same), `wpo` weighs pairs as WPO does.
    `balance_weight` adds that much of the balance loss of a mixture of experts.
    """
    if not isinstance(wpo, bool):
        raise ConfigError(f"pair_loss: wpo must be True or False; found {wpo!r}.")
    for what in objectives.wpo_problems(loss) if wpo else ():
        raise ConfigError(f"pair_loss: wpo: {what}")
    added = {"nll_weight": nll_weight, "ld_alpha": ld_alpha, "balance_weight": balance_weight}
    for name, value in added.items():
        objectives.checked(name, value)
    filled, weights = objectives.resolve(loss, **params), objectives.weights(loss)
    terms = (
        Term(FORMULAS[name], filled[name], objectives.OBJECTIVES[name], weight) for name, weight in weights.items()
    )
    return PairLoss(tuple(terms), nll_weight, ld_alpha, wpo, balance_weight)


def log_likelihood(policy: PairLogps) -> Tensor:
    """log pi(chosen), all its tokens alike: P."""
    return policy.chosen if policy.whole_chosen is None else policy.whole_chosen


def gains(policy: PairLogps, ref: PairLogps) -> tuple[Tensor, Tensor]:
    """log(policy / reference) of chosen and rejected, in nats: P, P."""
    return policy.chosen - ref.chosen, policy.rejected - ref.rejected


def mean_gains(policy: PairLogps, ref: PairLogps) -> tuple[Tensor, Tensor]:
    """The same for each token of the answer, on the mean: P, P."""
    chosen, rejected = gains(policy, ref)
    return chosen / policy.num_chosen, rejected / policy.num_rejected


def margin(policy: PairLogps, ref: PairLogps) -> Tensor:
    """How much more the policy prefers chosen over rejected than the reference does, in nats. Returns P."""
    chosen, rejected = gains(policy, ref)
    return chosen - rejected


def mean_margin(policy: PairLogps, ref: PairLogps) -> Tensor:
    """The same between means over tokens. Returns P."""
    chosen, rejected = mean_gains(policy, ref)
    return chosen - rejected


# --- with a reference ------------------------------------------------------------------------------


def sigmoid(
    policy: PairLogps, ref: PairLogps, *, beta: float, label_smoothing: float, divergence: str | float
) -> Tensor:
    """DPO (Rafailov et al. 2023, eq. 7); conservative DPO with label smoothing (Mitchell 2023, eq. 3).

    With another divergence f-DPO (Wang et al. 2023): f'(policy / reference) in place of its logarithm.
    Returns P.
    """
    chosen, rejected = (_slope(gain, divergence) for gain in gains(policy, ref))
    return _smoothed(beta * (chosen - rejected), label_smoothing)


def dpo_norm(policy: PairLogps, ref: PairLogps, *, beta: float, label_smoothing: float) -> Tensor:
    """Length-normalised DPO (Tulu 3, Lambert et al. 2024). Returns P."""
    return _smoothed(beta * mean_margin(policy, ref), label_smoothing)


def robust(policy: PairLogps, ref: PairLogps, *, beta: float, label_smoothing: float) -> Tensor:
    """rDPO (Chowdhury et al. 2024): unbiased if that share of the labels is swapped. Returns P."""
    logit = beta * margin(policy, ref)
    clean, swapped = -logsigmoid(logit), -logsigmoid(-logit)
    return ((1 - label_smoothing) * clean - label_smoothing * swapped) / (1 - 2 * label_smoothing)


def hinge(policy: PairLogps, ref: PairLogps, *, beta: float) -> Tensor:
    """Hinge on the reward margin (SLiC-HF, Zhao et al. 2023; RSO, Liu et al. 2023). Returns P."""
    return torch.relu(1 - beta * margin(policy, ref))


def ipo(policy: PairLogps, ref: PairLogps, *, beta: float) -> Tensor:
    """IPO (Azar et al. 2023, eq. 17; its tau is beta), on means over tokens. Returns P."""
    return (mean_margin(policy, ref) - 1 / (2 * beta)).square()


def ipo_sum(policy: PairLogps, ref: PairLogps, *, beta: float) -> Tensor:
    """IPO (Azar et al. 2023, eq. 17; its tau is beta), on sums over tokens. Returns P."""
    return (margin(policy, ref) - 1 / (2 * beta)).square()


def exo_pair(policy: PairLogps, ref: PairLogps, *, beta: float, label_smoothing: float) -> Tensor:
    """EXO (Ji et al. 2024, eq. 16) for two answers: KL from the policy's to the smoothed labels. Returns P."""
    logit = beta * margin(policy, ref)
    chosen = torch.sigmoid(logit) * (logsigmoid(logit) - math.log1p(-label_smoothing))
    rejected = torch.sigmoid(-logit) * (logsigmoid(-logit) - math.log(label_smoothing))
    return chosen + rejected


def nca_pair(policy: PairLogps, ref: PairLogps, *, beta: float) -> Tensor:
    """NCA (Chen et al. 2024) for two answers, the chosen one with all the preference. Returns P."""
    chosen, rejected = (beta * gain for gain in gains(policy, ref))
    return -logsigmoid(chosen) - 0.5 * logsigmoid(-chosen) - 0.5 * logsigmoid(-rejected)


def sppo_hard(policy: PairLogps, ref: PairLogps, *, beta: float) -> Tensor:
    """SPPO (Wu et al. 2024, eq. 4.7; its eta is 1 / beta) with preferences of 1 and 0. Returns P."""
    chosen, rejected = gains(policy, ref)
    return (chosen - 1 / (2 * beta)).square() + (rejected + 1 / (2 * beta)).square()


def apo_zero(policy: PairLogps, ref: PairLogps, *, beta: float) -> Tensor:
    """APO-zero (D'Oosterlinck et al. 2024, eq. 7). Returns P."""
    chosen, rejected = gains(policy, ref)
    return torch.sigmoid(-beta * chosen) + torch.sigmoid(beta * rejected)


def apo_down(policy: PairLogps, ref: PairLogps, *, beta: float) -> Tensor:
    """APO-down (D'Oosterlinck et al. 2024, eq. 8). Returns P."""
    chosen, rejected = gains(policy, ref)
    return torch.sigmoid(beta * chosen) + torch.sigmoid(-beta * (chosen - rejected))


def discopop(policy: PairLogps, ref: PairLogps, *, beta: float) -> Tensor:
    """DiscoPOP's log-ratio modulated loss (Lu et al. 2024, eq. 5; tau = 0.05). Returns P."""
    logit = beta * margin(policy, ref)
    logistic = -logsigmoid(logit) * torch.sigmoid(-logit / DISCOPOP_TAU)
    # e^-x * sigmoid(x / tau) as one exponential: with tau < 1 it is at most 1, where e^-x alone overflows.
    exponential = torch.exp(logsigmoid(logit / DISCOPOP_TAU) - logit)
    return logistic + exponential


# --- with a reference, over a whole batch ----------------------------------------------------------


def bco_pair(policy: PairLogps, ref: PairLogps, *, whole: Whole, beta: float) -> Tensor:
    """BCO (Jung et al. 2024): a classifier shifted by the mean reward of all batches up to this one. Returns P."""
    chosen, rejected = gains(policy, ref)
    total, num_pairs = whole.with_this(policy, ref).detach()
    shift = total / num_pairs
    return -logsigmoid(beta * (chosen - shift)) - logsigmoid(-beta * (rejected - shift))


def aot(policy: PairLogps, ref: PairLogps, *, whole: Whole, beta: float, label_smoothing: float) -> Tensor:
    """AOT, paired (Melnyk et al. 2024): quantiles of the policy's margins against the reference's. Returns P."""
    ours, theirs = policy.chosen - policy.rejected, ref.chosen - ref.rejected
    return _transported(ours, theirs, whole.share, lambda gap: _smoothed(beta * gap, label_smoothing))


def aot_unpaired(policy: PairLogps, ref: PairLogps, *, whole: Whole, beta: float, label_smoothing: float) -> Tensor:
    """AOT, unpaired (Melnyk et al. 2024): quantiles of chosen gains against those of rejected ones. Returns P."""
    chosen, rejected = gains(policy, ref)
    return _transported(chosen, rejected, whole.share, lambda gap: _smoothed(beta * gap, label_smoothing))


# --- without a reference ---------------------------------------------------------------------------


def simpo(policy: PairLogps, _ref: PairLogps, *, beta: float, gamma: float) -> Tensor:
    """SimPO (Meng et al. 2024, eq. 6). Returns P."""
    chosen, rejected = _mean_logps(policy)
    return -logsigmoid(beta * (chosen - rejected) - gamma)


def orpo(policy: PairLogps, _ref: PairLogps, *, beta: float) -> Tensor:
    """ORPO (Hong et al. 2024, eqs. 4, 6 and 7; its lambda is beta): likelihood and odds ratio. Returns P."""
    chosen, rejected = _mean_logps(policy)
    return -chosen - beta * logsigmoid(_log_odds(chosen) - _log_odds(rejected))


def cpo(policy: PairLogps, _ref: PairLogps, *, beta: float) -> Tensor:
    """CPO (Xu et al. 2024, eq. 3), and the likelihood of chosen as a mean over its tokens. Returns P."""
    chosen, _ = _mean_logps(policy)
    return -logsigmoid(beta * (policy.chosen - policy.rejected)) - chosen


# --- parts of them ---------------------------------------------------------------------------------


def _mean_logps(policy: PairLogps) -> tuple[Tensor, Tensor]:
    """Log-probability for each token of the answer, on the mean: P, P."""
    return policy.chosen / policy.num_chosen, policy.rejected / policy.num_rejected


def _smoothed(logit_P: Tensor, label_smoothing: float) -> Tensor:
    return -(1 - label_smoothing) * logsigmoid(logit_P) - label_smoothing * logsigmoid(-logit_P)


def _transported(x_P: Tensor, y_P: Tensor, share_P: Tensor, cost: Callable[[Tensor], Tensor]) -> Tensor:
    """Mean of cost(x - y) for each x, where the mass of the x goes to that of the y in order: quantile to quantile.

    Both have the masses `share`. With equal ones this sorts the two and pairs them off; else a value may meet parts of
    several. Returns P; its mean by `share` is the cost of the whole transport.
    """
    x_order, y_order = x_P.argsort(stable=True), y_P.argsort(stable=True)
    x_ends, y_ends = share_P[x_order].cumsum(0), share_P[y_order].cumsum(0)
    ends = torch.cat([x_ends, y_ends]).sort().values  # between two of these, one x meets one y
    mass = ends.diff(prepend=ends.new_zeros(1))
    middle = ends - 0.5 * mass
    x_at, y_at = (
        order[torch.searchsorted(of, middle).clamp(max=len(order) - 1)]
        for order, of in ((x_order, x_ends), (y_order, y_ends))
    )
    return torch.zeros_like(x_P).index_add(0, x_at, mass * cost(x_P[x_at] - y_P[y_at])) / share_P


def _slope(gain_P: Tensor, divergence: str | float) -> Tensor:
    """f'(u) at u = e^gain, up to a constant (Wang et al. 2023, table 1). A number is the alpha of its divergence."""
    match divergence:
        case "reverse_kl":
            return gain_P
        case "forward_kl":
            return -_exp(-gain_P)
        case "jensen_shannon":
            return logsigmoid(gain_P)
    assert isinstance(divergence, float), divergence
    return -_exp(-divergence * gain_P) / divergence


def _exp(x: Tensor) -> Tensor:
    """e^x, above EXP_LIMIT continued by its tangent."""
    return torch.exp(x.clamp(max=EXP_LIMIT)) * (1 + torch.relu(x - EXP_LIMIT))


def _log_odds(logp_P: Tensor) -> Tensor:
    """log(p / (1 - p)). A certain answer (p = 1) is taken to be as certain as its number type can tell."""
    logp = logp_P.clamp(max=-torch.finfo(logp_P.dtype).eps)
    return logp - torch.log(-torch.expm1(logp))


FORMULAS: dict[str, Callable[..., Tensor]] = {
    formula.__name__: formula
    for formula in (
        *(sigmoid, dpo_norm, robust, hinge, ipo, ipo_sum, exo_pair, nca_pair, sppo_hard, apo_zero, apo_down, discopop),
        *(bco_pair, aot, aot_unpaired, simpo, orpo, cpo),
    )
}
