"""The loss of held-out examples, per term, with the weights that the objective gives the terms.

T: terms, which are comparisons, lists or labelled answers.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from isopref.examples import Lengths
from isopref.normalize import Weighting, coefficients, comparison_weights, label_weights, list_weights
from isopref.objectives.coupled import Whole
from isopref.objectives.labels import midpoint
from isopref.objectives.loss import Loss
from isopref.score import TableLogps
from isopref.types import Anchors, FloatArray, IntArray, LabelLogps, ListLogps, PairLogps

LISTS_AT_ONCE = 256  # lists whose losses are computed at a time


@dataclass(frozen=True)
class Losses:
    """The loss of each of T terms."""

    value: FloatArray  # T
    weight: FloatArray  # T
    example: IntArray  # T: the example it belongs to

    def select(self, some_T: NDArray[np.bool_]) -> "Losses":
        return Losses(*(part[some_T] for part in vars(self).values()))


def losses_of_pairs(
    pairs: tuple[PairLogps, PairLogps],
    lengths: Lengths,
    gaps: FloatArray | None,
    own_N: FloatArray,
    loss: Loss,
    weighting: Weighting,
) -> Losses:
    """One term for each comparison. For a loss that couples the pairs of a batch, all held-out pairs are one batch."""
    weights = comparison_weights(lengths, weighting, own_N, gaps)
    whole = Whole.first(torch.from_numpy(coefficients(weights)))
    return Losses(loss(*pairs, whole=whole).numpy(), weights, lengths.of_comparison)


def losses_of_labels(
    policy: TableLogps,
    ref: TableLogps,
    lengths: Lengths,
    scores: FloatArray,
    own_N: FloatArray,
    loss: Loss,
    weighting: Weighting,
) -> Losses:
    """One term for each labelled answer. The anchors are those of all held-out answers as one batch."""
    weights = label_weights(lengths, weighting, own_N)
    share, good = torch.from_numpy(coefficients(weights)), torch.from_numpy(scores > 0)
    known = torch.from_numpy(lengths.trained.astype(np.int64)), good
    both = [LabelLogps(torch.from_numpy(side.answers), *known) for side in (policy, ref)]
    gain = both[0].logp - both[1].logp
    sides = torch.stack([share * good, share * ~good])
    kl = None
    if policy.mismatched is not None and ref.mismatched is not None:
        mean = float((coefficients(own_N) * (policy.mismatched - ref.mismatched)).sum())
        kl = torch.tensor(max(0.0, mean), dtype=torch.float64)
    anchors = Anchors(kl=kl, midpoint=midpoint(torch.stack([sides @ gain, sides.sum(dim=1)], dim=1)))
    return Losses(loss(*both, anchors=anchors).numpy(), weights, lengths.of_answer)


def losses_of_lists(
    policy: TableLogps,
    ref: TableLogps,
    lengths: Lengths,
    scores: FloatArray,
    own_N: FloatArray,
    loss: Loss,
    weighting: Weighting,
) -> Losses:
    """One term for each list. `scores` has one score per answer."""
    found = np.zeros(len(lengths))
    for start in range(0, len(lengths), LISTS_AT_ONCE):
        some = lengths.answers_of(np.arange(start, min(start + LISTS_AT_ONCE, len(lengths))))
        of = torch.from_numpy(lengths.trained[some]), torch.from_numpy(lengths.of_answer[some] - start)
        both = (
            ListLogps(torch.from_numpy(x.answers[some]), *of, torch.from_numpy(scores[some])) for x in (policy, ref)
        )
        np.add.at(found, lengths.of_answer[some], loss(*both).numpy())
    return Losses(found, list_weights(lengths, weighting, own_N), np.arange(len(lengths)))
