"""What formulas have in common: gains and margins, and functions that tensors have no method for.

Torch is imported inside the functions that need it, so that declarations can be read without it (declare.py).
All functions stay finite, with finite gradients, for log-ratios of +-1e4. P: pairs, A: answers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from isopref.types import LabelLogps, ListLogps, PairLogps

EXP_LIMIT = 30.0  # above, e^x is continued by its tangent


# --- gains: what an objective compares. Each function ignores the parameters that it does not need. ---------------


def gains(policy: PairLogps, ref: PairLogps, **_params: Any) -> tuple[Tensor, Tensor]:
    """log(policy / reference) of chosen and rejected, in nats: P, P."""
    return policy.chosen - ref.chosen, policy.rejected - ref.rejected


def mean_gains(policy: PairLogps, ref: PairLogps, **_params: Any) -> tuple[Tensor, Tensor]:
    """`gains` per trained token: P, P."""
    chosen, rejected = gains(policy, ref)
    return chosen / policy.num_chosen, rejected / policy.num_rejected


def slopes(policy: PairLogps, ref: PairLogps, *, divergence: str | float, **_params: Any) -> tuple[Tensor, Tensor]:
    """f'(policy / reference) of chosen and rejected, up to a constant: P, P."""
    chosen, rejected = gains(policy, ref)
    return slope(chosen, divergence), slope(rejected, divergence)


def logps(policy: PairLogps, _ref: PairLogps, **_params: Any) -> tuple[Tensor, Tensor]:
    """Log-probability of chosen and rejected, without a reference: P, P."""
    return policy.chosen, policy.rejected


def mean_logps(policy: PairLogps, _ref: PairLogps, **_params: Any) -> tuple[Tensor, Tensor]:
    """`logps` per trained token: P, P."""
    return policy.chosen / policy.num_chosen, policy.rejected / policy.num_rejected


def own_rewards(policy: PairLogps, _ref: PairLogps, **_params: Any) -> tuple[Tensor, Tensor]:
    """A reward model's rewards of chosen and rejected: P, P."""
    return policy.chosen, policy.rejected


def list_gains(policy: ListLogps, ref: ListLogps) -> Tensor:
    """log(policy / reference) of every answer of some lists, in nats: A."""
    return policy.logp - ref.logp


def label_margins(policy: LabelLogps, ref: LabelLogps, anchor: Tensor) -> Tensor:
    """By how much each answer gained more than the anchor if it is good, and less if it is bad, in nats. Returns A."""
    return (2 * policy.good.to(policy.logp.dtype) - 1) * (policy.logp - ref.logp - anchor)


def margin(policy: PairLogps, ref: PairLogps) -> Tensor:
    """How much more the policy prefers chosen over rejected than the reference does, in nats. Returns P."""
    chosen, rejected = gains(policy, ref)
    return chosen - rejected


def mean_margin(policy: PairLogps, ref: PairLogps) -> Tensor:
    """The margin between gains per trained token, in nats. Returns P."""
    chosen, rejected = mean_gains(policy, ref)
    return chosen - rejected


# --- functions -----------------------------------------------------------------------------------


def logsigmoid(x: Tensor) -> Tensor:
    """log(1 / (1 + e^-x))."""
    from torch.nn import functional

    return functional.logsigmoid(x)


def smoothed(logit_P: Tensor, label_smoothing: float) -> Tensor:
    """Cross-entropy of the preference for chosen, assuming that this share of the labels is swapped. Returns P."""
    return -(1 - label_smoothing) * logsigmoid(logit_P) - label_smoothing * logsigmoid(-logit_P)


def slope(gain_P: Tensor, divergence: str | float) -> Tensor:
    """f'(u) at u = e^gain, up to a constant (Wang et al. 2023, table 1). A number is the alpha of its divergence."""
    match divergence:
        case "reverse_kl":
            return gain_P
        case "forward_kl":
            return -exp(-gain_P)
        case "jensen_shannon":
            return logsigmoid(gain_P)
    assert isinstance(divergence, float), divergence
    return -exp(-divergence * gain_P) / divergence


def exp(x: Tensor) -> Tensor:
    """e^x, above EXP_LIMIT continued by its tangent."""
    return x.clamp(max=EXP_LIMIT).exp() * (1 + (x - EXP_LIMIT).relu())


def log_odds(logp_P: Tensor) -> Tensor:
    """log(p / (1 - p)). For p = 1, log p is taken to be -eps of its dtype, so that the result is finite."""
    import torch

    logp = logp_P.clamp(max=-torch.finfo(logp_P.dtype).eps)
    return logp - torch.log(-torch.expm1(logp))


def beaten(lists: ListLogps) -> Tensor:
    """Which answers each one is better than: those of its list with a lower score. Returns A, A of booleans."""
    return (lists.list[:, None] == lists.list) & (lists.score[:, None] > lists.score)


def surprise(reward_A: Tensor, below_AA: Tensor) -> Tensor:
    """-log of each answer's share of exp(reward) among itself and the answers below it. Returns A."""
    import torch

    field = below_AA | torch.eye(len(reward_A), dtype=torch.bool, device=reward_A.device)
    return reward_A.expand_as(field).where(field, -torch.inf).logsumexp(dim=1) - reward_A


def relative_scores(lists: ListLogps) -> Tensor:
    """The scores of each list from 0 for its worst answer to 1 for its best; 0 where all are equal. Returns A."""
    low, high = (
        lists.score.new_zeros(len(lists.score)).scatter_reduce(0, lists.list, lists.score, how, include_self=False)
        for how in ("amin", "amax")
    )
    spread = (high - low)[lists.list]
    return (lists.score - low[lists.list]) / spread.where(spread > 0, 1.0)


def discount_gap(reward_A: Tensor, lists: ListLogps, temperature: float) -> Tensor:
    """How far the discounts 1 / log(1 + rank) of two answers of a list are apart, by their rewards. Returns A, A.

    Ranks are soft: of two answers, one ranks higher with a probability of sigmoid(difference / temperature). The result
    is the mean over both outcomes, each with the expected ranks. Soft ranks keep the loss independent of the layout:
    before the first step, all rewards are equal up to rounding, and rounding would decide the order of integer ranks.
    """
    import torch

    others = (lists.list[:, None] == lists.list) & ~torch.eye(len(reward_A), dtype=torch.bool, device=reward_A.device)
    above = ((reward_A - reward_A[:, None]) / temperature).sigmoid() * others  # how likely the second is to be higher
    rank = 1 + above.sum(dim=1)
    upper, lower = rank[:, None] - above, rank + 1 - above.T  # ranks of first and second if the first is higher
    gap = (1 / upper.log1p() - 1 / lower.log1p()).abs()
    return above.T * gap + above * gap.T


def transported(x_P: Tensor, y_P: Tensor, share_P: Tensor, cost: Callable[[Tensor], Tensor]) -> Tensor:
    """Mean of cost(x - y) for each x, when the x are transported to the y in order: quantile to quantile.

    Both have the masses `share`. With equal masses, this sorts x and y and matches them one to one; otherwise an x may
    be matched with parts of several y. Returns P; its mean weighted by `share` is the cost of the whole transport.
    """
    import torch

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
