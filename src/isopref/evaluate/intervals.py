"""A figure with its 95% interval.

A share of the pairs has Wilson's interval, which keeps its width where all of them were won. Every other figure is a
function of a few means over pairs, so its interval comes from the same function on the means of resampled pairs.

N: pairs, R: resamples, K: means.
"""

import math
from dataclasses import dataclass

import numpy as np

from isopref.normalize import resampled_means
from isopref.types import FloatArray

RESAMPLES, SEED = 1000, 0
INTERVAL = (2.5, 97.5)  # percent of the resamples
Z = 1.959963984540054  # as many standard deviations to each side hold 95% of a normal distribution
BLOCK = 2**22  # pairs drawn at a time


@dataclass(frozen=True)
class Figure:
    """A figure with its 95% interval: Wilson's of a share, else that of 95 in 100 resamples of the pairs."""

    value: float
    low: float
    high: float


def means(values_NK: FloatArray, weights_N: FloatArray) -> FloatArray:
    """Means over the pairs, then over resamples of them, N drawn from N: 1 + R, K. The same draws for the same N."""
    size = len(weights_N)
    rng = np.random.default_rng(SEED)  # its own: no other random state moves
    parts = [resampled_means(values_NK, weights_N, np.ones((1, size)))]
    rows = max(1, BLOCK // size)
    for start in range(0, RESAMPLES, rows):
        count = min(rows, RESAMPLES - start)
        drawn = rng.integers(0, size, size=(count, size)) + size * np.arange(count)[:, None]
        counts = np.bincount(drawn.ravel(), minlength=count * size).reshape(count, size)
        parts.append(resampled_means(values_NK, weights_N, counts.astype(np.float64)))
    return np.concatenate(parts)


def share(won_N: FloatArray) -> Figure:
    """The share of pairs that were won (Wilson 1927). Ties, which are half won, make the interval a little too wide."""
    pairs, won = len(won_N), float(won_N.sum())

    def low(count: float) -> float:
        return (count + Z * Z / 2 - Z * math.sqrt(count * (pairs - count) / pairs + Z * Z / 4)) / (pairs + Z * Z)

    return Figure(won / pairs, low(won), 1 - low(pairs - won))


def figure(values: FloatArray) -> Figure:
    """The figure of all pairs, which is the first, and the interval of the resamples where it is defined."""
    defined = values[1:][np.isfinite(values[1:])]
    low, high = np.percentile(defined, INTERVAL) if len(defined) else (values[0], values[0])
    return Figure(float(values[0]), float(low), float(high))


def correlation(x: FloatArray, y: FloatArray, xy: FloatArray, xx: FloatArray, yy: FloatArray) -> Figure | None:
    """Pearson's correlation from the means of x, y and their products; None where one of them is constant."""
    spread = np.maximum(xx - x**2, 0.0) * np.maximum(yy - y**2, 0.0)
    if spread[0] == 0:
        return None
    with np.errstate(invalid="ignore", divide="ignore"):
        return figure(np.clip((xy - x * y) / np.sqrt(spread), -1.0, 1.0))
