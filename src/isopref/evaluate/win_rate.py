"""How often one model's answers beat another's, with intervals, raw and length-controlled.

N: prompts, R: resamples.
"""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from isopref.evaluate.intervals import RESAMPLES, SEED, Figure, figure, share, wilson
from isopref.types import FloatArray

STEPS = 25  # maximum iterations of Newton's method, which needs a handful
CLOSE = 1e-9  # in coefficients
RIDGE = 1e-2  # on both coefficients: keeps them finite if one model wins everything


@dataclass(frozen=True)
class WinRate:
    """The share of prompts on which a model wins; ties count half.

    `length_controlled` is the share to expect if both answers had the same length (Dubois et al. 2024): the intercept
    of a logistic regression on the difference in length, squashed by tanh in units of its standard deviation.
    """

    prompts: int
    wins: int
    ties: int
    losses: int
    win_rate: Figure
    length_controlled: Figure

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def win_rate(won_N: FloatArray, tokens_N: FloatArray, other_tokens_N: FloatArray) -> WinRate:
    """`won` is 1, 0.5 or 0 for each prompt; the tokens are counts for the model's answer and the other model's."""
    wins, losses = int((won_N > 0.5).sum()), int((won_N < 0.5).sum())
    longer_N = tokens_N - other_tokens_N
    spread = float(longer_N.std())
    feature_N = np.tanh(longer_N / spread) if spread > 0 else np.zeros_like(longer_N)
    rng = np.random.default_rng(SEED)
    size = len(won_N)
    drawn = rng.multinomial(size, np.full(size, 1 / size), size=RESAMPLES)
    counts_RN = np.concatenate([np.ones((1, size)), drawn])
    level_R = 1 / (1 + np.exp(-_intercepts(won_N, feature_N, counts_RN)))
    return WinRate(size, wins, size - wins - losses, losses, share(won_N), _widened(figure(level_R), size))


def _widened(level: Figure, size: int) -> Figure:
    """Make the interval at least Wilson's: if a model wins everything, all resamples are alike and it has no width."""
    least = wilson(level.value, size)
    return Figure(level.value, min(level.low, least.low), max(level.high, least.high))


def _intercepts(won_N: FloatArray, feature_N: FloatArray, counts_RN: FloatArray) -> FloatArray:
    """Intercepts of logistic regressions of `won` on the feature, one per set of counts, by Newton's method."""
    a_R, b_R = np.zeros(len(counts_RN)), np.zeros(len(counts_RN))
    for _ in range(STEPS):
        p_RN = 1 / (1 + np.exp(-(a_R[:, None] + b_R[:, None] * feature_N)))
        residual_RN, weight_RN = counts_RN * (won_N - p_RN), counts_RN * p_RN * (1 - p_RN)
        grad_a, grad_b = residual_RN.sum(1) - RIDGE * a_R, (residual_RN * feature_N).sum(1) - RIDGE * b_R
        aa = weight_RN.sum(1) + RIDGE
        ab = (weight_RN * feature_N).sum(1)
        bb = (weight_RN * feature_N**2).sum(1) + RIDGE
        det = aa * bb - ab**2
        step_a, step_b = (bb * grad_a - ab * grad_b) / det, (aa * grad_b - ab * grad_a) / det
        a_R, b_R = np.clip(a_R + step_a, -15, 15), np.clip(b_R + step_b, -15, 15)
        if max(np.abs(step_a).max(), np.abs(step_b).max()) < CLOSE:
            break
    return a_R
