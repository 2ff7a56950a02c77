"""Which answers of a list are compared, given their scores."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

Compare = Literal["all", "best_worst", "best_rest", "adjacent"]


def comparisons(scores: Sequence[float], compare: Compare, min_gap: float) -> tuple[tuple[int, int], ...]:
    """(better, worse) answers with different scores that are at least `min_gap` apart.

    all: every two answers. best_worst: the best and the worst one. best_rest: the best one with every other. adjacent:
    each one with the next in the order of scores. Among answers with equal scores, the first one is ranked higher.
    """
    order = sorted(range(len(scores)), key=lambda answer: -scores[answer])  # stable
    chosen = {
        "all": [(a, b) for n, a in enumerate(order) for b in order[n + 1 :]],
        "best_worst": [(order[0], order[-1])],
        "best_rest": [(order[0], other) for other in order[1:]],
        "adjacent": list(pairwise(order)),
    }[compare]
    return tuple((a, b) for a, b in chosen if scores[a] > scores[b] and scores[a] - scores[b] >= min_gap)
