"""Objectives of a ranked list at a time, compared with a reference. Imports no torch; declare.py says how.

A list is the answers of one prompt, each with a score. The loss of a list is a sum over its answers, and a formula
returns what each answer adds to it. An answer is compared with those of its list that have a lower score, so a tie says
nothing. A: answers of all lists.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from isopref.objectives.declare import BETA, Param, objective
from isopref.objectives.parts import beaten, discount_gap, list_gains, logsigmoid, relative_scores, surprise

if TYPE_CHECKING:
    from torch import Tensor

    from isopref.types import ListLogps


@objective(
    params={"beta": BETA},
    equation="-log prod_k exp(b G_k) / sum_j exp(b G_j), where j is k and every answer below it",
    use="For ranked lists: trains the model to rank the answers as the scores do",
    paper="DPO, Rafailov et al. 2023 (2305.18290), eq. 20 in its appendix: Plackett-Luce",
    kind="lists",
)
def plackett_luce(policy: ListLogps, ref: ListLogps, *, beta: float) -> Tensor:
    return surprise(beta * list_gains(policy, ref), beaten(policy))


@objective(
    params={"beta": BETA},
    equation="-log exp(b G_1) / sum_j exp(b G_j), where 1 is the best answer and j is it and every answer below it",
    use="For lists where only the best answer is known to be good: it is compared with all others at once",
    paper="S-DPO, Chen et al. 2024 (2406.09215): softmax over one chosen and several rejected ones. With one best "
    "answer also MPO, Gupta et al. 2024 (2412.04628), without its weights",
    kind="lists",
)
def softmax(policy: ListLogps, ref: ListLogps, *, beta: float) -> Tensor:
    below = beaten(policy)
    is_best = ~below.any(dim=0)
    return surprise(beta * list_gains(policy, ref), below) * is_best


RANK_TEMPERATURE = Param(
    0.1,
    "How soft the ranks that weight the pairs are, in units of reward; close to 0, ranks are integers.",
    {"ge": 0.01},
)


@objective(
    params={"beta": BETA, "rank_temperature": RANK_TEMPERATURE},
    equation="-sum_ij w_ij ls(b G_i - b G_j), where j is below i and w_ij is the change in DCG if they swap ranks",
    use="For lists where the order at the top matters most",
    paper="LiPO-lambda, Liu et al. 2024 (2402.01878), with soft ranks",
    kind="lists",
)
def lipo(policy: ListLogps, ref: ListLogps, *, beta: float, rank_temperature: float) -> Tensor:
    reward = beta * list_gains(policy, ref)
    value = (2 ** relative_scores(policy)).to(reward.dtype)
    swapped = (value[:, None] - value) * discount_gap(reward.detach(), policy, rank_temperature)
    return -(swapped.where(beaten(policy), 0.0) * logsigmoid(reward[:, None] - reward)).sum(dim=1)
