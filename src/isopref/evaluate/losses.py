"""The loss of held-out examples, term by term, with the weights of the objective.

T: terms, which are comparisons or lists.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from isopref.examples import Lengths
from isopref.normalize import Weighting, coefficients, comparison_weights, list_weights
from isopref.objectives.coupled import Whole
from isopref.objectives.loss import Loss
from isopref.score import TableLogps
from isopref.types import FloatArray, IntArray, ListLogps, PairLogps

LISTS_AT_ONCE = 256  # of a table, when their losses are computed


@dataclass(frozen=True)
class Losses:
    """The loss of each of T terms."""

    value: FloatArray  # T
    weight: FloatArray  # T
    example: IntArray  # T: which example it is of

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
    """One term for each comparison. Where a loss couples the pairs of a batch, all held-out pairs are one."""
    weights = comparison_weights(lengths, weighting, own_N, gaps)
    whole = Whole.first(torch.from_numpy(coefficients(weights)))
    return Losses(loss(*pairs, whole=whole).numpy(), weights, lengths.of_comparison)


def losses_of_lists(
    policy: TableLogps,
    ref: TableLogps,
    lengths: Lengths,
    scores: FloatArray,
    own_N: FloatArray,
    loss: Loss,
    weighting: Weighting,
) -> Losses:
    """One term for each list. `scores` are those of the answers."""
    found = np.zeros(len(lengths))
    for start in range(0, len(lengths), LISTS_AT_ONCE):
        some = lengths.answers_of(np.arange(start, min(start + LISTS_AT_ONCE, len(lengths))))
        of = torch.from_numpy(lengths.answer[some]), torch.from_numpy(lengths.of_answer[some] - start)
        both = (
            ListLogps(torch.from_numpy(x.answers[some]), *of, torch.from_numpy(scores[some])) for x in (policy, ref)
        )
        np.add.at(found, lengths.of_answer[some], loss(*both).numpy())
    return Losses(found, list_weights(lengths, weighting, own_N), np.arange(len(lengths)))
