"""Objectives of a whole global batch, compared with a reference. Imports no torch; declare.py says how.

The loss of a pair depends on the other pairs of the batch. A formula is therefore given all pairs at once, with a
`Whole` for everything else it needs, and still returns one value per pair. P: pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from isopref.objectives.declare import BETA, LABEL_SMOOTHING, objective
from isopref.objectives.parts import gains, logsigmoid, smoothed, transported

if TYPE_CHECKING:
    from torch import Tensor

    from isopref.types import PairLogps


@dataclass(frozen=True)
class Whole:
    """What a coupled loss needs to know about a global batch, besides the log-probabilities of its P pairs."""

    share: Tensor  # P: coefficient of each pair; they sum to 1
    past: Tensor  # 2: over earlier batches, sums of (pairs * mean gain of an answer in nats) and of pairs

    @classmethod
    def first(cls, share: Tensor) -> Whole:
        """The `Whole` of a first batch, which has no past."""
        return cls(share, share.new_zeros(2))

    def with_this(self, policy: PairLogps, ref: PairLogps) -> Tensor:
        """`past` with this batch added: the past of the next one."""
        import torch

        chosen, rejected = gains(policy, ref)
        gain = (0.5 * (chosen + rejected) * self.share).sum()
        return self.past + len(self.share) * torch.stack([gain, torch.ones_like(gain)])


@objective(
    params={"beta": BETA},
    equation="-ls(b G_c - d) - ls(d - b G_r), where d is the mean of all rewards b G so far, this batch included",
    use="Trains a classifier of good and bad answers whose threshold follows the rewards",
    paper="BCO, Jung et al. 2024 (2404.04656)",
    coupled=True,
)
def bco_pair(policy: PairLogps, ref: PairLogps, *, whole: Whole, beta: float) -> Tensor:
    chosen, rejected = gains(policy, ref)
    total, num_pairs = whole.with_this(policy, ref).detach()
    shift = total / num_pairs
    return -logsigmoid(beta * (chosen - shift)) - logsigmoid(-beta * (rejected - shift))


@objective(
    params={"beta": BETA, "label_smoothing": LABEL_SMOOTHING},
    equation="-(1-e) ls(b q) - e ls(-b q), where q = sorted(P_c - P_r) - sorted(R_c - R_r)",
    use="Pushes the policy's margins above the reference's as distributions over the batch, not pair by pair",
    paper="AOT, Melnyk et al. 2024 (2406.05882), paired",
    coupled=True,
)
def aot(policy: PairLogps, ref: PairLogps, *, whole: Whole, beta: float, label_smoothing: float) -> Tensor:
    ours, theirs = policy.chosen - policy.rejected, ref.chosen - ref.rejected
    return transported(ours, theirs, whole.share, lambda gap: smoothed(beta * gap, label_smoothing))


@objective(
    params={"beta": BETA, "label_smoothing": LABEL_SMOOTHING},
    equation="-(1-e) ls(b q) - e ls(-b q), where q = sorted(G_c) - sorted(G_r)",
    use="Pushes the gains of chosen answers above those of rejected ones as distributions, whatever their prompts",
    paper="AOT, Melnyk et al. 2024 (2406.05882), unpaired",
    coupled=True,
)
def aot_unpaired(policy: PairLogps, ref: PairLogps, *, whole: Whole, beta: float, label_smoothing: float) -> Tensor:
    chosen, rejected = gains(policy, ref)
    return transported(chosen, rejected, whole.share, lambda gap: smoothed(beta * gap, label_smoothing))
