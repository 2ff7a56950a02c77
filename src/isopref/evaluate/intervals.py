"""A metric with its 95% confidence interval.

A share of pairs gets the Wilson interval, which keeps its width even if all pairs were won. Every other metric is a
function of a few means over pairs, so its interval comes from the same function of the means of resampled pairs.

The comparisons of a list are not independent: a model that prefers the worst answer loses several at once. So whole
examples are resampled, and the interval of a share uses the effective number of pairs, from its spread over examples.

N: pairs, G: examples, R: resamples, K: means.
"""

import math
from dataclasses import dataclass

import numpy as np

from isopref.normalize import resampled_means
from isopref.types import FloatArray, IntArray

RESAMPLES, SEED = 1000, 0
INTERVAL = (2.5, 97.5)  # percent of the resamples
Z = 1.959963984540054  # standard deviations to each side that hold 95% of a normal distribution
BLOCK = 2**22  # pairs drawn at a time


@dataclass(frozen=True)
class Figure:
    """A metric with its 95% interval: Wilson's for a share, otherwise from percentiles of resampled examples."""

    value: float
    low: float
    high: float


def means(values_NK: FloatArray, weights_N: FloatArray, example_N: IntArray | None = None) -> FloatArray:
    """Means over the pairs, then over resamples of their examples, G drawn from G: 1 + R, K.

    `example` is the example, from 0 to G - 1, of each pair; None: one each. The same G gives the same resamples.
    """
    example_N = np.arange(len(weights_N)) if example_N is None else example_N
    size = int(example_N.max()) + 1
    rng = np.random.default_rng(SEED)  # its own generator, so no other random state changes
    parts = [resampled_means(values_NK, weights_N, np.ones((1, len(weights_N))))]
    rows = max(1, BLOCK // len(weights_N))
    for start in range(0, RESAMPLES, rows):
        count = min(rows, RESAMPLES - start)
        drawn = rng.integers(0, size, size=(count, size)) + size * np.arange(count)[:, None]
        counts = np.bincount(drawn.ravel(), minlength=count * size).reshape(count, size)
        parts.append(resampled_means(values_NK, weights_N, counts.astype(np.float64)[:, example_N]))
    return np.concatenate(parts)


def share(won_N: FloatArray, example_N: IntArray | None = None) -> Figure:
    """The share of pairs won (Wilson 1927). Ties count half, which makes the interval slightly too wide."""
    return wilson(float(won_N.mean()), len(won_N) if example_N is None else _independent(won_N, example_N))


def wilson(value: float, count: float) -> Figure:
    """A share of `count` pairs, with Wilson's interval."""

    def low(won: float) -> float:
        return (won + Z * Z / 2 - Z * math.sqrt(won * (count - won) / count + Z * Z / 4)) / (count + Z * Z)

    return Figure(value, low(value * count), 1 - low(count - value * count))


def _independent(won_N: FloatArray, example_N: IntArray) -> float:
    """The number of independent pairs whose share would vary as much, at least the examples and at most the pairs.

    The variance is that of a ratio of two sums over examples (Cochran 1977, eq. 2.46): pairs won, and pairs.
    """
    value, (won_G, pairs_G) = (
        won_N.mean(),
        (np.bincount(example_N, weights) for weights in (won_N, np.ones_like(won_N))),
    )
    variance = ((won_G - value * pairs_G) ** 2).sum() / len(won_N) ** 2
    examples = np.count_nonzero(pairs_G)
    return float(np.clip(value * (1 - value) / variance, examples, len(won_N))) if variance > 0 else float(examples)


def figure(values: FloatArray) -> Figure:
    """The metric over all pairs, which comes first, and the interval from the resamples in which it is defined."""
    defined = values[1:][np.isfinite(values[1:])]
    low, high = np.percentile(defined, INTERVAL) if len(defined) else (values[0], values[0])
    return Figure(float(values[0]), float(low), float(high))


def figure_of_size(values: FloatArray) -> Figure:
    """Like `figure`, for a sum of absolute values, which on average is larger in a resample than in the data.

    The resamples are corrected for that bias: their mean minus the value.
    """
    bias = values[1:].mean() - values[0]
    return figure(np.maximum(np.concatenate([values[:1], values[1:] - bias]), 0.0))


def correlation(x: FloatArray, y: FloatArray, xy: FloatArray, xx: FloatArray, yy: FloatArray) -> Figure | None:
    """Pearson's correlation from the means of x, y and their products; None if either is constant."""
    spread = np.maximum(xx - x**2, 0.0) * np.maximum(yy - y**2, 0.0)
    if spread[0] == 0:
        return None
    with np.errstate(invalid="ignore", divide="ignore"):
        return figure(np.clip((xy - x * y) / np.sqrt(spread), -1.0, 1.0))
