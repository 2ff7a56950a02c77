"""Objectives of one pair at a time, without a reference. Imports no torch; declare.py says how. P: pairs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isopref.objectives.declare import BETA, Param, objective
from isopref.objectives.parts import log_odds, logps, logsigmoid, mean_logps

if TYPE_CHECKING:
    from torch import Tensor

    from isopref.types import PairLogps

GAMMA = Param(1.0, "Target reward margin.", {"ge": 0})


@objective(
    params={"beta": BETA.at(2.0), "gamma": GAMMA},
    equation="-ls(b (p_c - p_r) - gamma)",
    use="Needs no reference, so nothing is scored in advance. The reward is the mean log-probability, gamma the margin",
    paper="SimPO, Meng et al. 2024 (2405.14734), eq. 6",
    gains=mean_logps,
    needs_reference=False,
)
def simpo(policy: PairLogps, ref: PairLogps, *, beta: float, gamma: float) -> Tensor:
    chosen, rejected = mean_logps(policy, ref)
    return -logsigmoid(beta * (chosen - rejected) - gamma)


@objective(
    params={"beta": BETA},
    equation="-p_c - b ls(o_c - o_r), where o = log(exp p / (1 - exp p))",
    use="Fine-tunes a base model and learns preferences in one stage. beta is the paper's lambda",
    paper="ORPO, Hong et al. 2024 (2403.07691), eqs. 4, 6 and 7",
    gains=mean_logps,
    needs_reference=False,
)
def orpo(policy: PairLogps, ref: PairLogps, *, beta: float) -> Tensor:
    chosen, rejected = mean_logps(policy, ref)
    return -chosen - beta * logsigmoid(log_odds(chosen) - log_odds(rejected))


@objective(
    params={"beta": BETA},
    equation="-ls(b (P_c - P_r)) - p_c",
    use="DPO with a uniform reference, regularised by the likelihood of chosen answers",
    paper="CPO, Xu et al. 2024 (2401.08417), eq. 3 and its likelihood term",
    gains=logps,
    needs_reference=False,
)
def cpo(policy: PairLogps, ref: PairLogps, *, beta: float) -> Tensor:
    chosen, _ = mean_logps(policy, ref)
    return -logsigmoid(beta * (policy.chosen - policy.rejected)) - chosen
