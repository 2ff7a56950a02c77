"""The loss of a run: a sum of objectives with their parameters, and what modifies it.

T: terms, which are pairs, answers of lists or labelled answers (batch/terms.py); P: pairs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from isopref.batch.terms import TERMS
from isopref.errors import ConfigError
from isopref.objectives import registry
from isopref.objectives.coupled import Whole
from isopref.objectives.declare import Anchor, Objective, Reading
from isopref.types import Anchors, Kind, Logps, Microbatch, Needs, PairLogps, Readout


@dataclass(frozen=True)
class Summand:
    """An objective with its parameters filled in, and its weight in the sum."""

    objective: Objective
    params: Mapping[str, Any]
    weight: float = 1.0

    @property
    def needs_gaps(self) -> bool:
        declared = self.objective.needs_gaps
        return bool(self.params[declared]) if isinstance(declared, str) else declared

    def __call__(self, policy: Any, ref: Any, whole: Whole | None, anchors: Anchors | None) -> Tensor:
        batch: dict[str, Any] = {"whole": whole} if self.objective.coupled else {}
        if self.objective.anchor is not None:
            batch["anchor"] = self.anchor(anchors)
        return self.weight * self.objective(policy, ref, **batch, **self.params)

    def anchor(self, anchors: Anchors | None) -> Tensor:
        """What gains are measured against; zero for an objective without an anchor."""
        found = getattr(anchors, self.objective.anchor or "", None)
        return torch.zeros(()) if found is None else found


@dataclass(frozen=True)
class Loss:
    """A sum of objectives of one kind: (policy, reference) -> T.

    Some need to know more about the global batch: those that couple pairs need `whole`, those of labels `anchors`.
    """

    summands: tuple[Summand, ...]
    nll_weight: float = 0.0  # of an added term: the negative log-likelihood of chosen answers, per token
    ld_alpha: float = 1.0  # weight of tokens beyond the length of the pair's shorter answer (LD-DPO)
    wpo: bool = False  # whether to weight pairs by how likely their answers are under the policy (WPO)
    balance_weight: float = 0.0  # of an added term: the load balance of a mixture of experts

    def __call__(
        self, policy: Logps, ref: Logps, *, whole: Whole | None = None, anchors: Anchors | None = None
    ) -> Tensor:
        first, *others = (summand(policy, ref, whole, anchors) for summand in self.summands)
        loss_T = sum(others, first)
        weight = policy.weight if isinstance(policy, PairLogps) else None
        return loss_T if weight is None else weight * loss_T

    @property
    def kind(self) -> Kind:
        """What its terms are, the same for all its objectives."""
        return self.summands[0].objective.kind

    @property
    def readout(self) -> Reading:
        """What it takes for each answer: a log-probability, or a reward. The same for all its objectives."""
        return self.summands[0].objective.readout

    @property
    def needs(self) -> Needs:
        """What it needs from a microbatch besides log-probabilities."""
        return Needs(
            heads=self.ld_alpha != 1,
            confidence=self.wpo,
            routing=self.balance_weight > 0,
            gaps=any(one.needs_gaps for one in self.summands),
        )

    @property
    def needs_reference(self) -> bool:
        """Whether a reference is scored. If not, its log-probabilities are zeros."""
        return any(one.objective.needs_reference for one in self.summands)

    @property
    def coupled(self) -> bool:
        """Whether the loss of a pair depends on the other pairs of its global batch."""
        return any(one.objective.coupled for one in self.summands)

    @property
    def anchors(self) -> set[Anchor]:
        """The numbers of the global batch that its objectives measure gains against."""
        return {one.objective.anchor for one in self.summands if one.objective.anchor is not None}

    @property
    def needs_mismatched(self) -> bool:
        """Whether prompts are also scored with the answers of other examples."""
        return "kl" in self.anchors

    @property
    def scores_twice(self) -> bool:
        """Whether a step first scores all its examples without gradients."""
        return self.coupled or "midpoint" in self.anchors or self.balance_weight > 0

    @property
    def first_pass(self) -> bool:
        """Whether a step first scores anything without gradients: its examples or mismatched pairs."""
        return self.scores_twice or self.needs_mismatched

    def view(self, readout: Readout, microbatch: Microbatch) -> Logps:
        """A microbatch as this loss takes it."""
        logps: Logps = TERMS[self.kind].view(readout, microbatch, self.needs)
        return self.taken(logps) if isinstance(logps, PairLogps) else logps

    def taken(self, logps: PairLogps) -> PairLogps:
        """Log-probabilities as this loss takes them, of policy or reference: with `ld_alpha`, discounted.

        The discount applies to tokens beyond the length of the pair's shorter answer (LD-DPO, Liu et al. 2024).
        """
        if self.ld_alpha == 1:
            return logps
        assert logps.heads is not None, "heads were not requested"
        whole = torch.stack([logps.chosen, logps.rejected])
        chosen, rejected = logps.heads + self.ld_alpha * (whole - logps.heads)
        return replace(logps, chosen=chosen, rejected=rejected, whole_chosen=logps.chosen)

    def threshold(self, anchors: Anchors | None) -> Tensor:
        """For a loss of labels, what the gain of a good answer should exceed, according to the first objective."""
        return self.summands[0].anchor(anchors)

    def gains(self, policy: PairLogps, ref: PairLogps) -> tuple[Tensor, Tensor]:
        """The implicit rewards divided by beta, up to a constant, as the first objective defines them: P, P."""
        first = self.summands[0]
        return first.objective.gains(policy, ref, **first.params)

    def rewards(self, policy: PairLogps, ref: PairLogps) -> tuple[Tensor, Tensor]:
        """The implicit rewards: P, P. An answer that is as likely as under the reference has reward 0."""
        first = self.summands[0]
        beta = first.params.get("beta", 1.0)
        chosen, rejected = self.gains(policy, ref)
        if first.objective.needs_reference:
            at_chosen, at_rejected = self.gains(ref, ref)
            chosen, rejected = chosen - at_chosen, rejected - at_rejected
        return beta * chosen, beta * rejected


def pair_loss(
    loss: registry.LossSpec,
    *,
    nll_weight: float = 0.0,
    ld_alpha: float = 1.0,
    wpo: bool = False,
    balance_weight: float = 0.0,
    **params: Any,
) -> Loss:
    """The objective named `loss`, or a weighted sum of several: {"sigmoid": 1.0, "hinge": 0.5}.

    Parameters go to the objectives that take them; those left out have the objective's defaults. Raises ConfigError for
    values out of bounds and for parameters that no objective takes.
    `nll_weight` adds the negative log-likelihood of chosen answers, per token over the global batch, with that weight.
    `ld_alpha` is LD-DPO's discount (score the reference with the same value), `wpo` weights pairs as WPO does.
    `balance_weight` adds the balance loss of a mixture of experts with that weight.
    """
    if not isinstance(wpo, bool):
        raise ConfigError(f"pair_loss: wpo must be True or False; found {wpo!r}.")
    for what in registry.wpo_problems(loss) if wpo else ():
        raise ConfigError(f"pair_loss: wpo: {what}")
    for what in registry.kind_problems(loss, ld_alpha=ld_alpha):
        raise ConfigError(f"pair_loss: {what}")
    for what in registry.reward_problems(loss, nll_weight=nll_weight, ld_alpha=ld_alpha, wpo=wpo):
        raise ConfigError(f"pair_loss: {what}")
    added = {"nll_weight": nll_weight, "ld_alpha": ld_alpha, "balance_weight": balance_weight}
    for name, value in added.items():
        registry.checked(name, value, registry.MODIFIERS[name])
    filled = registry.resolve(loss, **params)
    weights = registry.weights(loss)
    summands = (Summand(registry.OBJECTIVES[name], filled[name], weight) for name, weight in weights.items())
    return Loss(tuple(summands), nll_weight, ld_alpha, wpo, balance_weight)


def log_likelihood(policy: PairLogps) -> Tensor:
    """log pi(chosen), without LD-DPO's discount: P."""
    return policy.chosen if policy.whole_chosen is None else policy.whole_chosen
