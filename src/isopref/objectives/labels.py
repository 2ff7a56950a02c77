"""Objectives of one labelled answer at a time, compared with a reference. Imports no torch; declare.py says how.

An answer is good or bad by itself, whatever the other answers to its prompt. A formula may ask for an anchor: the
number of nats that gains are measured against. It is computed from the whole global batch before the pass with
gradients, and no gradient flows through it (engine/first_pass.py). A: labelled answers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from isopref.objectives.declare import BETA, Param, objective
from isopref.objectives.parts import label_margins, logsigmoid

if TYPE_CHECKING:
    from torch import Tensor

    from isopref.types import LabelLogps


def midpoint(past_22: Tensor) -> Tensor:
    """Halfway between the mean gains of good and bad answers; if only one kind has been seen, its mean.

    `past` has a row for good and one for bad answers: the weighted sum of their gains, and the sum of their weights.
    """
    sums, counts = past_22.unbind(dim=1)
    seen = counts > 0
    means = sums / counts.where(seen, 1)
    return means.sum() / seen.sum()


@objective(
    params={
        "beta": BETA,
        "desirable_weight": Param(1.0, "Weight of the loss of good answers.", {"gt": 0}),
        "undesirable_weight": Param(1.0, "Weight of the loss of bad answers.", {"gt": 0}),
    },
    equation="w_d (1 - s(b (G - z))) of a good answer, w_u (1 - s(b (z - G))) of a bad one, where z = max(0, mean G of "
    "mismatched pairs in the batch)",
    use="For answers with a thumbs up or down, even if unbalanced, and for pairs with noisy labels",
    paper="KTO, Ethayarajh et al. 2024 (2402.01306), eq. 8",
    kind="labels",
    anchor="kl",
)
def kto(
    policy: LabelLogps,
    ref: LabelLogps,
    *,
    anchor: Tensor,
    beta: float,
    desirable_weight: float,
    undesirable_weight: float,
) -> Tensor:
    good = policy.good.to(policy.logp.dtype)
    factor = desirable_weight * good + undesirable_weight * (1 - good)
    return factor * (-beta * label_margins(policy, ref, anchor)).sigmoid()  # 1 - s(x) = s(-x)


@objective(
    params={"beta": BETA},
    equation="-ls(b G - d) of a good answer, -ls(d - b G) of a bad one, where d is halfway between the mean rewards "
    "b G of good and of bad answers so far, this batch included",
    use="Trains a classifier of good and bad answers whose threshold follows the rewards",
    paper="BCO, Jung et al. 2024 (2404.04656)",
    kind="labels",
    anchor="midpoint",
)
def bco(policy: LabelLogps, ref: LabelLogps, *, anchor: Tensor, beta: float) -> Tensor:
    return -logsigmoid(beta * label_margins(policy, ref, anchor))
