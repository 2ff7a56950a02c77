"""The metrics of an evaluation: over all held-out examples, per source and per subset."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import PurePath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isopref.evaluate.calibration import calibration_error
from isopref.evaluate.intervals import Figure, correlation, figure, means, share
from isopref.evaluate.labels import Bin, Labels
from isopref.evaluate.lists import Lists, lists_of
from isopref.evaluate.losses import Losses, losses_of_labels, losses_of_lists, losses_of_pairs
from isopref.evaluate.pairs import Bucket, Pairs, answer_rewards, buckets, pairs_of, taken, won
from isopref.examples import Lengths
from isopref.normalize import Weighting
from isopref.objectives.loss import Loss
from isopref.score import TableLogps
from isopref.types import FloatArray, IntArray


@dataclass(frozen=True)
class Evaluation:
    """Metrics over held-out pairs; every pair counts once, except in the loss, which uses the objective's weighting.

    Metrics of pairs are None if nothing is compared, as with labelled answers.
    """

    pairs: int
    accuracy: Figure | None  # share of pairs whose chosen answer has the larger implicit reward; a tie counts half
    reward_margin: Figure | None  # mean of beta * margin, with the margin of the loss
    reward_margin_std: Figure | None  # its standard deviation over pairs
    logp_accuracy: Figure | None  # share of pairs whose chosen answer has the larger log-probability per token
    loss: Figure
    length_correlation: Figure | None  # of reward and tokens, over all answers; None if either is constant
    by_length: tuple[Bucket, ...]
    # For lists, each counting once; None if all examples are pairs.
    lists: int = 0
    top1_accuracy: Figure | None = None  # share of lists whose answer with the largest reward has the best score
    kendall_tau: Figure | None = None  # mean over lists of the rank correlation of rewards and scores
    ndcg: Figure | None = None  # mean over lists: how close the ranking by reward comes to the gain of the best order
    # For a loss of labels, every answer counts once.
    answers: int = 0
    auc: Figure | None = None  # share of (good, bad) pairs of answers in which the good one has the larger reward
    reward_good: Figure | None = None  # mean reward of good answers
    reward_bad: Figure | None = None  # mean reward of bad answers
    # How far sigmoid(reward) is from the share of good answers; for a reward model, see calibration.py.
    calibration_error: Figure | None = None
    calibration: tuple[Bin, ...] = ()
    by_source: dict[str, "Evaluation"] = field(default_factory=dict)  # if there are several
    by_subset: dict[str, "Evaluation"] = field(default_factory=dict)  # by the data's column 'subset'; same

    def figures(self) -> dict[str, Figure]:
        """The metrics over all pairs, by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Figure)}

    def as_metrics(self) -> dict[str, float]:
        """For the metrics log: eval/NAME with its interval; by length and by source, only the values.

        There may be many subsets, so only one metric is logged for each.
        """
        named = dict(self._values("eval"))
        for name, one in self.figures().items():
            named |= {f"eval/{name}_low": one.low, f"eval/{name}_high": one.high}
        for source, part in self.by_source.items():
            named |= dict(part._values(f"eval/{source}"))
        for subset, part in self.by_subset.items():
            name, headline = part.headline
            named |= {} if headline is None else {f"eval/subset/{subset}/{name}": headline.value}
        return named

    @property
    def headline(self) -> tuple[str, Figure | None]:
        """The most informative metric, with its name: accuracy, or AUC if nothing is compared."""
        return ("accuracy", self.accuracy) if self.accuracy is not None else ("auc", self.auc)

    def as_json(self) -> dict[str, Any]:
        """Without list metrics if there are no lists."""
        named = asdict(self)
        for name in ("top1_accuracy", "kendall_tau", "ndcg"):
            if named[name] is None:
                del named[name]
        for name in ("by_source", "by_subset"):
            named[name] = {part: figures.as_json() for part, figures in getattr(self, name).items()}
        return named

    def _values(self, prefix: str) -> Iterator[tuple[str, float]]:
        for name, one in self.figures().items():
            yield f"{prefix}/{name}", one.value
        for bucket in self.by_length:
            yield f"{prefix}/accuracy_length_{bucket.quarter}", bucket.accuracy.value


def evaluate(
    policy: TableLogps,
    ref: TableLogps,
    lengths: Lengths,
    own: FloatArray,
    *,
    loss: Loss,
    weighting: Weighting,
    sources: IntArray | None = None,
    source_names: Sequence[str] = (),
    subsets: Sequence[str | None] = (),
    scores: FloatArray | None = None,
    gaps: FloatArray | None = None,
) -> Evaluation:
    """Compare policy and reference on the comparisons of a table, and also per source and subset if there are several.

    `own` is the weight of each example, `sources` where it comes from, `subsets` the name of its subset, if the data
    has any. `scores`: of the answers, for a list loss.
    `gaps`: between the scores of compared answers, for a loss or a weighting that needs them.
    """
    logps = taken(policy, ref, lengths, loss, gaps)
    pairs, labels = pairs_of(logps, policy, lengths, own, loss), None
    if loss.kind == "lists":
        assert scores is not None, "a loss of lists needs scores"
        losses = losses_of_lists(policy, ref, lengths, scores, own, loss, weighting)
    elif loss.kind == "labels":
        assert scores is not None, "a loss of labels needs the labels, as scores"
        losses = losses_of_labels(policy, ref, lengths, scores, own, loss, weighting)
        labels = _labels(policy, ref, lengths, scores, own, loss)
    else:
        losses = losses_of_pairs(logps, lengths, gaps, own, loss, weighting)
    lists = None
    if loss.kind != "labels" and scores is not None and lengths.num_answers.max(initial=0) > 2:
        lists = lists_of(answer_rewards(policy, ref, lengths, loss), scores, lengths)
    parts = _Parts(pairs, losses, lists, labels)
    by_source, by_subset = {}, {}
    if sources is not None and len(present := np.unique(sources).tolist()) > 1:
        names = source_labels(source_names)
        for source in present:
            by_source[names[source]] = _figures(parts.select(sources == source))
    if len(set(subsets)) > 1:
        for subset in sorted({name for name in subsets if name is not None}):
            by_subset[subset] = _figures(parts.select(np.array([name == subset for name in subsets])))
    return replace(_figures(parts), by_source=by_source, by_subset=by_subset)


def _labels(
    policy: TableLogps, ref: TableLogps, lengths: Lengths, scores: FloatArray, own: FloatArray, loss: Loss
) -> Labels:
    good = scores > 0
    return Labels(
        reward=answer_rewards(policy, ref, lengths, loss),
        good=good,
        nll=-loss.nll_weight * policy.answers / lengths.trained,
        liked=own[lengths.of_answer] * lengths.trained * good,
        example=lengths.of_answer,
    )


@dataclass(frozen=True)
class _Parts:
    """Everything known about some examples."""

    pairs: Pairs
    losses: Losses
    lists: Lists | None
    labels: Labels | None

    def select(self, some: NDArray[np.bool_]) -> "_Parts":
        """The part for some examples, renumbered from 0."""
        number = np.cumsum(some) - 1

        def selected(part: Any) -> Any:
            kept = part.select(some[part.example])
            return replace(kept, example=number[kept.example])

        lists = None if self.lists is None else selected(self.lists)
        labels = None if self.labels is None else selected(self.labels)
        return _Parts(selected(self.pairs), selected(self.losses), lists, labels)


def _figures(parts: _Parts) -> Evaluation:
    losses, lists, labels = parts.losses, parts.lists, parts.labels
    # With the same resamples as for the loss.
    nll, liked, example = (
        (parts.pairs.nll, parts.pairs.chosen_weights, parts.pairs.example)
        if labels is None
        else (labels.nll, labels.liked, labels.example)
    )
    loss = means(losses.value[:, None], losses.weight, losses.example)[:, 0]
    if nll.any() and liked.any():
        loss = loss + means(nll[:, None], liked, example)[:, 0]
    found = _of_pairs(parts.pairs)
    if lists is not None:
        found |= {"lists": len(lists.example), **lists.figures()}
    if labels is not None:
        found |= labels.figures()
    return Evaluation(loss=figure(loss), **found)


def _of_pairs(pairs: Pairs) -> dict[str, Any]:
    """The metrics of comparisons, by name; None if there are none."""
    if not len(pairs.won):
        names = ("accuracy", "reward_margin", "reward_margin_std", "logp_accuracy", "length_correlation")
        return {"pairs": 0, "by_length": (), **dict.fromkeys(names)}
    reward_margin_N = pairs.rewards[:, 0] - pairs.rewards[:, 1]
    # Moments are centred on the mean of all pairs: far from zero, a difference of large squares would be noise.
    margin = reward_margin_N - reward_margin_N.mean()
    tokens_N2 = pairs.tokens.astype(np.float64)
    reward, tokens = (x - x.mean() for x in (pairs.rewards, tokens_N2))
    products = [(a * b).mean(axis=1) for a, b in ((reward, tokens), (reward, reward), (tokens, tokens))]
    columns = [
        reward_margin_N,
        *(margin, margin**2),
        *(reward.mean(axis=1), tokens.mean(axis=1), *products),
    ]
    found = means(np.stack(columns, axis=1), np.ones(len(margin)), pairs.example)
    reward_margin, first, second, *moments = found.T
    of_reward_model = pairs.per_token is None
    return {
        "pairs": len(margin),
        "accuracy": share(pairs.won, pairs.example),
        "reward_margin": figure(reward_margin),
        "reward_margin_std": figure(np.sqrt(np.maximum(second - first**2, 0.0))),
        "logp_accuracy": None if pairs.per_token is None else share(won(pairs.per_token), pairs.example),
        "length_correlation": correlation(*moments),
        "calibration_error": calibration_error(reward_margin_N, pairs.won, pairs.example) if of_reward_model else None,
        "by_length": tuple(buckets(pairs)),
    }


def source_labels(names: Sequence[str]) -> list[str]:
    """Short, distinct names of sources: without folder and extension if that is enough, otherwise numbered."""
    short = [PurePath(name).name.split(".")[0] for name in names]
    chosen = short if len(set(short)) == len(short) and all(short) else list(names)
    twice = {name for name in chosen if chosen.count(name) > 1}
    return [f"{name} ({number})" if name in twice else name for number, name in enumerate(chosen, start=1)]
