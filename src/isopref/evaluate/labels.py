"""Metrics of labelled answers: whether good answers get higher rewards than bad ones, and how calibrated rewards are.

A: labelled answers.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isopref.evaluate.intervals import Figure, Z, figure, figure_of_size, means, share
from isopref.types import FloatArray, IntArray

NUM_BINS = 5


@dataclass(frozen=True)
class Bin:
    """The answers whose predicted probability of being good is within these bounds."""

    low: float
    high: float
    answers: int
    promised: float  # mean of sigmoid(reward)
    good: Figure  # share of good answers


@dataclass(frozen=True)
class Labels:
    """The inputs of the metrics, per answer."""

    reward: FloatArray  # A
    good: NDArray[np.bool_]  # A
    nll: FloatArray  # A: of a token, times its weight in the objective
    liked: FloatArray  # A: weight of the NLL, 0 for bad answers
    example: IntArray  # A: the example it belongs to

    def select(self, some_A: NDArray[np.bool_]) -> "Labels":
        return Labels(*(part[some_A] for part in vars(self).values()))

    def figures(self) -> dict[str, Any]:
        """The metrics by their names in Evaluation; None if a metric needs good or bad answers and there are none."""
        return {
            "answers": len(self.good),
            "auc": auc(self.reward, self.good, self.example),
            "reward_good": self._mean_reward(self.good),
            "reward_bad": self._mean_reward(~self.good),
            "calibration_error": calibration_error(self.reward, self.good, self.example),
            "calibration": tuple(bins(self.reward, self.good, self.example)),
        }

    def _mean_reward(self, some_A: NDArray[np.bool_]) -> Figure | None:
        if not some_A.any():
            return None
        return figure(means(self.reward[:, None], some_A.astype(np.float64), self.example)[:, 0])


def auc(reward_A: FloatArray, good_A: NDArray[np.bool_], example_A: IntArray) -> Figure | None:
    """Share of (good, bad) pairs of answers in which the good one has the higher reward; a tie counts half.

    The interval is DeLong's for clusters (Obuchowski 1997), since answers to one prompt are not independent.
    """
    good, bad = np.sort(reward_A[good_A]), np.sort(reward_A[~good_A])
    if not len(good) or not len(bad):
        return None

    def below(values: FloatArray, among: FloatArray) -> FloatArray:
        sides = (np.searchsorted(among, values, side) for side in ("left", "right"))
        shares: FloatArray = sum(sides, np.zeros(len(values))) / (2 * len(among))
        return shares

    beats_A = np.where(good_A, below(reward_A, bad), 1 - below(reward_A, good))
    value = float(beats_A[good_A].mean())
    influence_A = (beats_A - value) / np.where(good_A, len(good), len(bad))
    spread = Z * float(np.sqrt((np.bincount(example_A, influence_A) ** 2).sum()))
    return Figure(value, max(0.0, value - spread), min(1.0, value + spread))


def calibration_error(reward_A: FloatArray, good_A: NDArray[np.bool_], example_A: IntArray) -> Figure:
    """Expected calibration error: how far sigmoid(reward) is from the share of good answers, averaged over bins."""
    promised_A, bin_A = _binned(reward_A)
    off_A = promised_A - good_A
    in_bins = (bin_A[:, None] == np.arange(NUM_BINS)) * off_A[:, None]
    return figure_of_size(np.abs(means(in_bins, np.ones(len(off_A)), example_A)).sum(axis=1))


def bins(reward_A: FloatArray, good_A: NDArray[np.bool_], example_A: IntArray) -> list[Bin]:
    """The bins that have answers."""
    promised_A, bin_A = _binned(reward_A)
    found = []
    for number in np.unique(bin_A).tolist():
        there = bin_A == number
        _, example = np.unique(example_A[there], return_inverse=True)
        good = share(good_A[there].astype(np.float64), example)
        bounds = number / NUM_BINS, (number + 1) / NUM_BINS
        found.append(Bin(*bounds, int(there.sum()), float(promised_A[there].mean()), good))
    return found


def _binned(reward_A: FloatArray) -> tuple[FloatArray, IntArray]:
    """sigmoid(reward), and which of NUM_BINS bins of equal width it is in."""
    promised: FloatArray = 0.5 * (1 + np.tanh(0.5 * reward_A))
    return promised, np.minimum((promised * NUM_BINS).astype(np.int64), NUM_BINS - 1)
