"""Objectives of one pair at a time, compared with a reference. Imports no torch; declare.py says how.

A formula is pure: (policy, reference, parameters) -> one value per pair, without a mean. It stays finite, with finite
gradients, for log-ratios of +-1e4. P: pairs.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from isopref.objectives.declare import BETA, LABEL_SMOOTHING, Param, objective
from isopref.objectives.parts import gains, logsigmoid, margin, mean_gains, mean_margin, slopes, smoothed

if TYPE_CHECKING:
    from torch import Tensor

    from isopref.types import PairLogps

DISCOPOP_TAU = 0.05

DIVERGENCE = Param(
    "reverse_kl",
    "The divergence that keeps the model close to the reference; a number is the alpha of the alpha-divergence.",
    {"gt": 0, "lt": 1},
    words=("reverse_kl", "forward_kl", "jensen_shannon"),
)


@objective(
    params={"beta": BETA, "label_smoothing": LABEL_SMOOTHING, "divergence": DIVERGENCE},
    equation="-(1-e) ls(b m) - e ls(-b m), where m = G_c - G_r, or f'(exp G_c) - f'(exp G_r) with another divergence",
    use="The DPO loss, and a good default. `label_smoothing` is for labels that may be wrong (conservative DPO). "
    "`divergence` keeps the policy close to the reference; forward_kl and jensen_shannon preserve more diversity",
    paper="DPO, Rafailov et al. 2023 (2305.18290), eq. 7; cDPO, Mitchell 2023, eq. 3; f-DPO, Wang et al. 2023 "
    "(2309.16240)",
    gains=slopes,
)
def sigmoid(
    policy: PairLogps, ref: PairLogps, *, beta: float, label_smoothing: float, divergence: str | float
) -> Tensor:
    chosen, rejected = slopes(policy, ref, divergence=divergence)
    return smoothed(beta * (chosen - rejected), label_smoothing)


@objective(
    params={"beta": BETA, "alpha": Param(1.0, "How much the margin must grow with the gap between scores.", {"gt": 0})},
    equation="-ls(b m - a log d), where d is the score of c minus the score of r, and a is alpha",
    use="For scored answers: the larger the gap between two scores, the larger the target margin; 0 at a gap of 1",
    paper="ODPO, Amini et al. 2024 (2402.10571), with f = log as its authors run it",
    needs_gaps=True,
)
def odpo(policy: PairLogps, ref: PairLogps, *, beta: float, alpha: float) -> Tensor:
    assert policy.gap is not None, "needs_gaps is declared"
    return -logsigmoid(beta * margin(policy, ref) - alpha * policy.gap.log())


@objective(
    params={"beta": BETA.at(5.0), "label_smoothing": LABEL_SMOOTHING},
    equation="-(1-e) ls(b (g_c - g_r)) - e ls(-b (g_c - g_r))",
    use="DPO on per-token means, so that length is not rewarded. Needs a larger beta",
    paper="Tulu 3, Lambert et al. 2024 (2411.15124)",
    gains=mean_gains,
)
def dpo_norm(policy: PairLogps, ref: PairLogps, *, beta: float, label_smoothing: float) -> Tensor:
    return smoothed(beta * mean_margin(policy, ref), label_smoothing)


@objective(
    params={"beta": BETA, "label_smoothing": LABEL_SMOOTHING.at(0.1)},
    equation="[-(1-e) ls(b m) + e ls(-b m)] / (1 - 2e)",
    use="For a known share of flipped labels: an unbiased estimate of the loss on clean labels. Unbounded below",
    paper="rDPO, Chowdhury et al. 2024 (2403.00409)",
)
def robust(policy: PairLogps, ref: PairLogps, *, beta: float, label_smoothing: float) -> Tensor:
    logit = beta * margin(policy, ref)
    clean, swapped = -logsigmoid(logit), -logsigmoid(-logit)
    return ((1 - label_smoothing) * clean - label_smoothing * swapped) / (1 - 2 * label_smoothing)


@objective(
    params={"beta": BETA},
    equation="max(0, 1 - b m)",
    use="Pairs with a margin of at least 1/beta no longer contribute",
    paper="SLiC-HF, Zhao et al. 2023 (2305.10425); with a reference RSO, Liu et al. 2023 (2309.06657)",
)
def hinge(policy: PairLogps, ref: PairLogps, *, beta: float) -> Tensor:
    return (1 - beta * margin(policy, ref)).relu()


@objective(
    params={"beta": BETA},
    equation="(g_c - g_r - 1/(2b))^2",
    use="Regresses the margin to a target, so it does not diverge on deterministic labels. Per token, as its authors "
    "run it",
    paper="IPO, Azar et al. 2023 (2310.12036), eq. 17",
    gains=mean_gains,
)
def ipo(policy: PairLogps, ref: PairLogps, *, beta: float) -> Tensor:
    return (mean_margin(policy, ref) - 1 / (2 * beta)).square()  # the paper's tau is beta


@objective(
    params={"beta": BETA},
    equation="(m - 1/(2b))^2",
    use="IPO exactly as in the equation, over sums: long answers count more",
    paper="IPO, Azar et al. 2023 (2310.12036), eq. 17",
)
def ipo_sum(policy: PairLogps, ref: PairLogps, *, beta: float) -> Tensor:
    return (margin(policy, ref) - 1 / (2 * beta)).square()


@objective(
    params={"beta": BETA, "label_smoothing": LABEL_SMOOTHING.at(1e-3, gt=0, lt=0.5)},
    equation="s(b m) [ls(b m) - log(1-e)] + s(-b m) [ls(-b m) - log e]",
    use="Reverse KL to the labels, smoothed by e > 0: mode-seeking",
    paper="EXO, Ji et al. 2024 (2402.00856), eq. 16",
)
def exo_pair(policy: PairLogps, ref: PairLogps, *, beta: float, label_smoothing: float) -> Tensor:
    logit = beta * margin(policy, ref)
    chosen = logit.sigmoid() * (logsigmoid(logit) - math.log1p(-label_smoothing))
    rejected = (-logit).sigmoid() * (logsigmoid(-logit) - math.log(label_smoothing))
    return chosen + rejected


@objective(
    params={"beta": BETA.at(0.01)},
    equation="-ls(b G_c) - ls(-b G_c)/2 - ls(-b G_r)/2",
    use="Keeps the likelihood of chosen answers from falling",
    paper="NCA, Chen et al. 2024 (2402.05369)",
)
def nca_pair(policy: PairLogps, ref: PairLogps, *, beta: float) -> Tensor:
    chosen, rejected = (beta * gain for gain in gains(policy, ref))  # the paper's preferences are 1 and 0
    return -logsigmoid(chosen) - 0.5 * logsigmoid(-chosen) - 0.5 * logsigmoid(-rejected)


@objective(
    params={"beta": BETA.at(0.001)},
    equation="(G_c - 1/(2b))^2 + (G_r + 1/(2b))^2",
    use="Self-play with hard labels: each answer has its own target",
    paper="SPPO, Wu et al. 2024 (2405.00675), eq. 4.7 with preferences of 1 and 0",
)
def sppo_hard(policy: PairLogps, ref: PairLogps, *, beta: float) -> Tensor:
    chosen, rejected = gains(policy, ref)  # the paper's eta is 1 / beta
    return (chosen - 1 / (2 * beta)).square() + (rejected + 1 / (2 * beta)).square()


@objective(
    params={"beta": BETA},
    equation="1 - s(b G_c) + s(b G_r)",
    use="For chosen answers that are better than the model's own: raises them and lowers rejected ones",
    paper="APO, D'Oosterlinck et al. 2024 (2408.06266), eq. 7",
)
def apo_zero(policy: PairLogps, ref: PairLogps, *, beta: float) -> Tensor:
    chosen, rejected = gains(policy, ref)
    return (-beta * chosen).sigmoid() + (beta * rejected).sigmoid()


@objective(
    params={"beta": BETA},
    equation="s(b G_c) + 1 - s(b m)",
    use="For chosen answers that are worse than the model's own: lowers both, rejected ones more",
    paper="APO, D'Oosterlinck et al. 2024 (2408.06266), eq. 8",
)
def apo_down(policy: PairLogps, ref: PairLogps, *, beta: float) -> Tensor:
    chosen, rejected = gains(policy, ref)
    return (beta * chosen).sigmoid() + (-beta * (chosen - rejected)).sigmoid()


@objective(
    params={"beta": BETA.at(0.05)},
    equation="-(1 - s(b m/t)) ls(b m) + s(b m/t) exp(-b m), where t = 0.05",
    use="A blend of the logistic and exponential losses, found by automated search",
    paper="DiscoPOP, Lu et al. 2024 (2406.08414), eq. 5",
)
def discopop(policy: PairLogps, ref: PairLogps, *, beta: float) -> Tensor:
    logit = beta * margin(policy, ref)
    logistic = -logsigmoid(logit) * (-logit / DISCOPOP_TAU).sigmoid()
    # e^-x * sigmoid(x / tau) as one exponential: with tau < 1 it is at most 1, where e^-x alone overflows.
    exponential = (logsigmoid(logit / DISCOPOP_TAU) - logit).exp()
    return logistic + exponential
