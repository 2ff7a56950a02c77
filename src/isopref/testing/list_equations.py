"""A second implementation of the objectives of ranked lists, straight from their papers: one list at a time, as loops.

It shares nothing with isopref.objectives, and overflows for large arguments.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from isopref.testing.answer import Answer, sigma

Ranked = Sequence[tuple[Answer, float]]


def below(ranked: Ranked, k: int) -> list[Answer]:
    """The answers of a list with a lower score than answer k."""
    return [y for y, score in ranked if score < ranked[k][1]]


def plackett_luce(ranked: Ranked, *, beta: float) -> Tensor:
    """-log prod_k e^(r_k) / (e^(r_k) + sum of e^(r_j) over all j below k) (Rafailov et al. 2023, eq. 20)."""
    product = torch.ones((), dtype=torch.float64)
    for k, (y, _) in enumerate(ranked):
        others = sum((torch.exp(beta * z.log_ratio) for z in below(ranked, k)), torch.zeros(()))
        product = product * torch.exp(beta * y.log_ratio) / (torch.exp(beta * y.log_ratio) + others)
    return -torch.log(product)


def softmax(ranked: Ranked, *, beta: float) -> Tensor:
    """-log sigma(-log sum_j e^(r_j - r_best)) (Chen et al. 2024, S-DPO), summed over the best answers."""
    best = max(score for _, score in ranked)
    total = torch.zeros((), dtype=torch.float64)
    for k, (y, score) in enumerate(ranked):
        if score == best and below(ranked, k):
            gaps = [torch.exp(beta * (z.log_ratio - y.log_ratio)) for z in below(ranked, k)]
            total = total - torch.log(sigma(-torch.log(sum(gaps, torch.zeros(())))))
    return total


def plackett_luce_reward(ranked: Ranked) -> Tensor:
    """-sum_k log (e^(r_k) / (e^(r_k) + sum of e^(r_j) over all j below k)), r being the reward itself."""
    total = torch.zeros((), dtype=torch.float64)
    for k, (y, _) in enumerate(ranked):
        field = [torch.exp(y.policy), *(torch.exp(z.policy) for z in below(ranked, k))]
        total = total - torch.log(field[0] / sum(field, torch.zeros(())))
    return total


def lipo(ranked: Ranked, *, beta: float, rank_temperature: float) -> Tensor:
    """sum over i above j of D_ij log(1 + e^-(r_i - r_j)) (Liu et al. 2024, LiPO-lambda).

    D_ij = |gain_i - gain_j| |1/log(1 + rank_i) - 1/log(1 + rank_j)|: the mean over the two orders of i and j, weighted
    by their probabilities, with the ranks expected for each order.
    """
    scores = [score for _, score in ranked]
    rewards = [float(beta * y.log_ratio.detach()) for y, _ in ranked]

    def gain(score: float) -> float:
        return float(2 ** ((score - min(scores)) / (max(scores) - min(scores))) - 1)

    def is_above(k: int, i: int) -> float:
        return 1 / (1 + math.exp(-(rewards[k] - rewards[i]) / rank_temperature))

    def discounts(i: int, j: int) -> float:
        """The difference between the discounts of i and j if i is above j."""
        others = [k for k in range(len(ranked)) if k not in (i, j)]
        first, second = 1 + sum(is_above(k, i) for k in others), 2 + sum(is_above(k, j) for k in others)
        return abs(1 / math.log(1 + first) - 1 / math.log(1 + second))

    total = torch.zeros((), dtype=torch.float64)
    for i, (y, score) in enumerate(ranked):
        for j, (z, lower) in enumerate(ranked):
            if score > lower:
                apart = is_above(i, j) * discounts(i, j) + is_above(j, i) * discounts(j, i)
                loss = torch.log(1 + torch.exp(-beta * (y.log_ratio - z.log_ratio)))
                total = total + (gain(score) - gain(lower)) * apart * loss
    return total


LIST_EQUATIONS: dict[str, Callable[..., Tensor]] = {
    equation.__name__: equation for equation in (plackett_luce, softmax, lipo, plackett_luce_reward)
}


def lists_loss(case: str, lists: Sequence[Ranked], weights: Sequence[float]) -> Tensor:
    """The loss of a global batch of lists with these weights."""
    name, params = LIST_CASES[case]
    losses = [LIST_EQUATIONS[name](ranked, **params) for ranked in lists]
    return sum((w * loss for w, loss in zip(weights, losses, strict=True)), torch.zeros(())) / sum(weights)


# As in equations.CASES.
LIST_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plackett_luce": ("plackett_luce", {"beta": 0.3}),
    "softmax": ("softmax", {"beta": 0.3}),
    "lipo": ("lipo", {"beta": 0.3, "rank_temperature": 0.2}),
    "plackett_luce_reward": ("plackett_luce_reward", {}),
}
