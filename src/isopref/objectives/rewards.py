"""Objectives of reward models: one scalar for each answer, no reference. Imports no torch; declare.py says how.

Instead of log-probabilities, `policy` holds the reward r that the model gives each answer. P: pairs, A: answers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from isopref.objectives.declare import Param, objective
from isopref.objectives.parts import beaten, logsigmoid, own_rewards, surprise

if TYPE_CHECKING:
    from torch import Tensor

    from isopref.types import ListLogps, PairLogps


@objective(
    params={
        "margin": Param(
            0.0,
            "Target difference between the two rewards, per point of difference between the answers' scores in the "
            "data. 0: no scores needed.",
            {"ge": 0},
        ),
        "center": Param(0.0, "Weight of (r_c + r_r)^2, which keeps the rewards of a pair centered on zero.", {"ge": 0}),
    },
    equation="-ls(r_c - r_r - margin gap) + center (r_c + r_r)^2",
    use="Trains a reward model on pairs: the chosen answer should get the higher reward",
    paper="InstructGPT, Ouyang et al. 2022 (2203.02155), eq. 1; margin: Llama 2, Touvron et al. 2023 (2307.09288); "
    "center: Eisenstein et al. 2023 (2312.09244)",
    gains=own_rewards,
    needs_reference=False,
    needs_gaps="margin",
    readout="reward",
)
def bradley_terry(policy: PairLogps, _ref: PairLogps, *, margin: float, center: float) -> Tensor:
    chosen, rejected = policy.chosen, policy.rejected
    apart = chosen - rejected
    if margin:
        assert policy.gap is not None, "needs_gaps is declared"
        apart = apart - margin * policy.gap
    return -logsigmoid(apart) + center * (chosen + rejected) ** 2


@objective(
    params={},
    equation="-log prod_k exp(r_k) / sum_j exp(r_j), where j is k and every answer below it",
    use="Trains a reward model on ranked lists: rewards should rank the answers as the scores do",
    paper="Plackett-Luce on rewards, Zhu et al. 2023 (2301.11270)",
    gains=own_rewards,
    needs_reference=False,
    kind="lists",
    readout="reward",
)
def plackett_luce_reward(policy: ListLogps, _ref: ListLogps) -> Tensor:
    return surprise(policy.logp, beaten(policy))
