"""Evaluation on held-out pairs: what the log-probabilities of policy and reference say, pair by pair.

Pure arithmetic on scored tables; the scoring itself is score.py's. A share of the pairs has Wilson's interval, which
keeps its width where all of them were won. Every other figure is a function of a few means over pairs, so its interval
comes from the same function on the means of resampled pairs.

N: pairs, which are the comparisons of a table, R: resamples, K: means.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isopref.examples import Lengths
from isopref.normalize import Weighting, coefficients, comparison_weights, list_weights, resampled_means
from isopref.objectives.coupled import Whole
from isopref.objectives.loss import PairLoss, log_likelihood
from isopref.score import TableLogps
from isopref.types import FloatArray, IntArray, ListLogps, PairLogps

RESAMPLES, SEED = 1000, 0
INTERVAL = (2.5, 97.5)  # percent of the resamples
Z = 1.959963984540054  # as many standard deviations to each side hold 95% of a normal distribution
BLOCK = 2**22  # pairs drawn at a time
NUM_BUCKETS = 4
LISTS_AT_ONCE = 256  # of a table, when their losses are computed


@dataclass(frozen=True)
class Figure:
    """A figure with its 95% interval: Wilson's of a share, else that of 95 in 100 resamples of the pairs."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Bucket:
    """A quarter of the pairs by the tokens of their answers (the mean of the two); 1 has the shortest."""

    quarter: int
    shortest: float
    longest: float
    pairs: int
    accuracy: Figure


@dataclass(frozen=True)
class Evaluation:
    """Figures over held-out pairs; every pair counts once, but for the loss, which has the objective's weighting."""

    pairs: int
    accuracy: Figure  # share of pairs whose chosen answer has the larger implicit reward; a tie is half
    reward_margin: Figure  # mean of beta * margin, as the loss has its margin
    reward_margin_std: Figure  # its standard deviation over pairs
    logp_accuracy: Figure  # share of pairs whose chosen answer has the larger log-probability per token
    loss: Figure
    length_correlation: Figure | None  # of reward and tokens, over all answers; None where one of them is constant
    by_length: tuple[Bucket, ...]
    by_source: dict[str, "Evaluation"] = field(default_factory=dict)  # where there are several

    def figures(self) -> dict[str, Figure]:
        """The figures over all pairs, by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Figure)}

    def as_metrics(self) -> dict[str, float]:
        """For the metrics log: eval/NAME with its interval; by length and by source the values alone."""
        named = dict(self._values("eval"))
        for name, figure in self.figures().items():
            named |= {f"eval/{name}_low": figure.low, f"eval/{name}_high": figure.high}
        for source, part in self.by_source.items():
            named |= dict(part._values(f"eval/{source}"))
        return named

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def _values(self, prefix: str) -> Iterator[tuple[str, float]]:
        for name, figure in self.figures().items():
            yield f"{prefix}/{name}", figure.value
        for bucket in self.by_length:
            yield f"{prefix}/accuracy_length_{bucket.quarter}", bucket.accuracy.value


def evaluate(
    policy: TableLogps,
    ref: TableLogps,
    lengths: Lengths,
    own: FloatArray,
    *,
    loss: PairLoss,
    weighting: Weighting,
    sources: IntArray | None = None,
    source_names: Sequence[str] = (),
    scores: FloatArray | None = None,
) -> Evaluation:
    """Compare policy and reference on the comparisons of a table; if of several sources, also on those of each.

    `own` is the weight of each example, `sources` where it comes from. `scores`: of the answers, for a loss of lists.
    """
    logps = _taken(policy, ref, lengths, loss)
    gain_N2, reward_N2 = (_side_by_side(of(*logps)) for of in (loss.gains, loss.rewards))
    tokens_N2 = lengths.compared_tokens.T
    per_token_N2 = policy.answers[lengths.sides].T / tokens_N2
    losses = _losses(logps, policy, ref, lengths, scores, own, loss=loss, weighting=weighting)
    won_N = _won(gain_N2[:, 0] - gain_N2[:, 1])
    nll_N = -loss.nll_weight * log_likelihood(logps[0]).numpy() / tokens_N2[:, 0]
    chosen_N = own[lengths.of_comparison] * tokens_N2[:, 0]
    pairs = _Pairs(won_N, reward_N2, per_token_N2, nll_N, tokens_N2, chosen_N)
    by_source = {}
    if sources is not None and len(present := np.unique(sources).tolist()) > 1:
        labels = source_labels(source_names)
        for source in present:
            there = sources == source
            some = pairs.select(there[lengths.of_comparison]), losses.select(there[losses.example])
            by_source[labels[source]] = _figures(*some, {})
    return _figures(pairs, losses, by_source)


def _losses(
    pairs: tuple[PairLogps, PairLogps],
    policy: TableLogps,
    ref: TableLogps,
    lengths: Lengths,
    scores: FloatArray | None,
    own: FloatArray,
    *,
    loss: PairLoss,
    weighting: Weighting,
) -> "_Losses":
    if not loss.lists:
        weights = comparison_weights(lengths, weighting, own)
        # Where a loss couples the pairs of a batch, all held-out pairs are one.
        whole = Whole.first(torch.from_numpy(coefficients(weights)))
        return _Losses(loss(*pairs, whole=whole).numpy(), weights, lengths.of_comparison)
    assert scores is not None, "a loss of lists needs scores"
    found = np.zeros(len(lengths))
    for start in range(0, len(lengths), LISTS_AT_ONCE):
        some = lengths.answers_of(np.arange(start, min(start + LISTS_AT_ONCE, len(lengths))))
        of = torch.from_numpy(lengths.trained[some]), torch.from_numpy(lengths.of_answer[some])
        both = (
            ListLogps(torch.from_numpy(x.answers[some]), *of, torch.from_numpy(scores[some])) for x in (policy, ref)
        )
        np.add.at(found, lengths.of_answer[some], loss.of_lists(*both).numpy())
    return _Losses(found, list_weights(lengths, weighting, own), np.arange(len(lengths)))


def rewards(policy: TableLogps, ref: TableLogps, lengths: Lengths, loss: PairLoss) -> FloatArray:
    """The implicit rewards of every comparison's answers, chosen and rejected: N, 2."""
    return _side_by_side(loss.rewards(*_taken(policy, ref, lengths, loss)))


def _taken(policy: TableLogps, ref: TableLogps, lengths: Lengths, loss: PairLoss) -> tuple[PairLogps, PairLogps]:
    return loss.taken(policy.compared(lengths)), loss.taken(ref.compared(lengths))


def source_labels(names: Sequence[str]) -> list[str]:
    """Short names of sources, all different: without folder and ending where that is enough, else numbered."""
    short = [PurePath(name).name.split(".")[0] for name in names]
    chosen = short if len(set(short)) == len(short) and all(short) else list(names)
    twice = {name for name in chosen if chosen.count(name) > 1}
    return [f"{name} ({number})" if name in twice else name for number, name in enumerate(chosen, start=1)]


@dataclass(frozen=True)
class _Pairs:
    """What the figures are made of, pair by pair."""

    won: FloatArray  # N
    rewards: FloatArray  # N, 2
    per_token: FloatArray  # N, 2: log-probability
    nll: FloatArray  # N: of a chosen token, times its weight in the objective
    tokens: IntArray  # N, 2
    chosen_weights: FloatArray  # N: of the NLL

    def select(self, some_N: NDArray[np.bool_]) -> "_Pairs":
        return _Pairs(*(part[some_N] for part in vars(self).values()))


@dataclass(frozen=True)
class _Losses:
    """The loss of each of T terms, which are comparisons or lists."""

    value: FloatArray  # T
    weight: FloatArray  # T
    example: IntArray  # T: which example it is of

    def select(self, some_T: NDArray[np.bool_]) -> "_Losses":
        return _Losses(*(part[some_T] for part in vars(self).values()))


def _figures(pairs: _Pairs, losses: _Losses, by_source: dict[str, Evaluation]) -> Evaluation:
    won_N, reward_margin_N = pairs.won, pairs.rewards[:, 0] - pairs.rewards[:, 1]
    # Moments are taken around the mean of all pairs: far from zero, a difference of large squares would be noise.
    margin = reward_margin_N - reward_margin_N.mean()
    tokens_N2 = pairs.tokens.astype(np.float64)
    reward, tokens = (x - x.mean() for x in (pairs.rewards, tokens_N2))
    products = [(a * b).mean(axis=1) for a, b in ((reward, tokens), (reward, reward), (tokens, tokens))]
    columns = [
        reward_margin_N,
        *(margin, margin**2),
        *(reward.mean(axis=1), tokens.mean(axis=1), *products),
    ]
    means = _means(np.stack(columns, axis=1), np.ones(len(won_N)))
    loss = _means(losses.value[:, None], losses.weight)[:, 0]
    if pairs.nll.any():  # of pairs, the same draws as those of the loss
        loss = loss + _means(pairs.nll[:, None], pairs.chosen_weights)[:, 0]
    reward_margin, first, second, *moments = means.T
    return Evaluation(
        pairs=len(won_N),
        accuracy=_share(won_N),
        reward_margin=_figure(reward_margin),
        reward_margin_std=_figure(np.sqrt(np.maximum(second - first**2, 0.0))),
        logp_accuracy=_share(_won(pairs.per_token[:, 0] - pairs.per_token[:, 1])),
        loss=_figure(loss),
        length_correlation=_correlation(*moments),
        by_length=tuple(_buckets(won_N, tokens_N2.mean(axis=1))),
        by_source=by_source,
    )


def _means(values_NK: FloatArray, weights_N: FloatArray) -> FloatArray:
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


def _share(won_N: FloatArray) -> Figure:
    """The share of pairs that were won (Wilson 1927). Ties, which are half won, make the interval a little too wide."""
    pairs, won = len(won_N), float(won_N.sum())

    def low(count: float) -> float:
        return (count + Z * Z / 2 - Z * math.sqrt(count * (pairs - count) / pairs + Z * Z / 4)) / (pairs + Z * Z)

    return Figure(won / pairs, low(won), 1 - low(pairs - won))


def _figure(values: FloatArray) -> Figure:
    """The figure of all pairs, which is the first, and the interval of the resamples where it is defined."""
    defined = values[1:][np.isfinite(values[1:])]
    low, high = np.percentile(defined, INTERVAL) if len(defined) else (values[0], values[0])
    return Figure(float(values[0]), float(low), float(high))


def _correlation(x: FloatArray, y: FloatArray, xy: FloatArray, xx: FloatArray, yy: FloatArray) -> Figure | None:
    """Pearson's correlation from the means of x, y and their products."""
    spread = np.maximum(xx - x**2, 0.0) * np.maximum(yy - y**2, 0.0)
    if spread[0] == 0:
        return None
    with np.errstate(invalid="ignore", divide="ignore"):
        return _figure(np.clip((xy - x * y) / np.sqrt(spread), -1.0, 1.0))


def _buckets(won_N: FloatArray, tokens_N: FloatArray) -> Iterator[Bucket]:
    edges = np.quantile(tokens_N, np.arange(1, NUM_BUCKETS) / NUM_BUCKETS, method="inverted_cdf")
    bucket_N = np.searchsorted(edges, tokens_N, side="left")  # the edge belongs to the shorter ones
    for number in np.unique(bucket_N):
        inside = bucket_N == number
        shortest, longest = float(tokens_N[inside].min()), float(tokens_N[inside].max())
        yield Bucket(int(number) + 1, shortest, longest, int(inside.sum()), _share(won_N[inside]))


def _side_by_side(chosen_and_rejected: tuple[Tensor, Tensor]) -> FloatArray:
    values_N2: FloatArray = torch.stack(chosen_and_rejected, dim=1).numpy()
    return values_N2


def _won(difference: FloatArray) -> FloatArray:
    won: FloatArray = (difference > 0) + 0.5 * (difference == 0)
    return won
