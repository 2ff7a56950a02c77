"""Metrics of ranked lists: whether the rewards of a policy rank the answers of a prompt as their scores do.

A list counts if its answers have at least two different scores. If rewards are equal, a metric is its mean over all
orders of the answers that share them. N: lists, A: answers of all lists.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from isopref.evaluate.intervals import Figure, figure, means, share
from isopref.examples import Lengths
from isopref.types import FloatArray, IntArray


@dataclass(frozen=True)
class Lists:
    """The values that the metrics average, per list."""

    top1: FloatArray  # N
    tau: FloatArray  # N
    ndcg: FloatArray  # N
    example: IntArray  # N: which example it is

    def select(self, some_N: NDArray[np.bool_]) -> "Lists":
        return Lists(*(part[some_N] for part in vars(self).values()))

    def figures(self) -> dict[str, Figure]:
        """The metrics by their names in Evaluation; empty if there are no lists."""
        if not len(self.example):
            return {}
        found = means(np.stack([self.tau, self.ndcg], axis=1), np.ones(len(self.example)))
        return {"top1_accuracy": share(self.top1), "kendall_tau": figure(found[:, 0]), "ndcg": figure(found[:, 1])}


def lists_of(reward_A: FloatArray, score_A: FloatArray, lengths: Lengths) -> Lists:
    """The lists of a table, by the rewards and the scores of its answers."""
    found = []
    for example in range(len(lengths)):
        answers = lengths.answers_of(np.array([example]))
        reward, score = reward_A[answers], score_A[answers]
        if np.isfinite(score).all() and np.ptp(score) > 0:
            found.append((top1(reward, score), kendall_tau(reward, score), ndcg(reward, score), example))
    columns = np.array(found, np.float64).reshape(-1, 4).T
    return Lists(columns[0], columns[1], columns[2], columns[3].astype(np.int64))


def top1(reward: FloatArray, score: FloatArray) -> float:
    """Whether the answer with the largest reward has the best score; a share if several have that reward."""
    return float((score[reward == reward.max()] == score.max()).mean())


def kendall_tau(reward: FloatArray, score: FloatArray) -> float:
    """Pairs ranked as the scores rank them minus pairs ranked the other way, over all pairs with different scores.

    This is Kendall's tau if all scores differ. A pair with equal rewards is half right and half wrong, and adds 0.
    """
    right = np.sign(score[:, None] - score) * np.sign(reward[:, None] - reward)
    return float(right.sum() / (score[:, None] != score).sum())


def ndcg(reward: FloatArray, score: FloatArray) -> float:
    """Discounted cumulative gain divided by that of the best order (Järvelin and Kekäläinen 2002).

    The discount is 1 / log2(1 + rank); the gain of an answer is its score minus the lowest score of the list.
    """
    gain = score - score.min()
    discount = 1 / np.log2(2.0 + np.arange(len(gain)))
    place = np.argsort(np.argsort(-reward, kind="stable"), kind="stable")  # from 0
    mean = np.array([discount[place[reward == one]].mean() for one in reward])  # over all orders of equal rewards
    return float((gain * mean).sum() / (np.sort(gain)[::-1] * discount).sum())
