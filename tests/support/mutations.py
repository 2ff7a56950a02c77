"""Planted bugs, each one that a known trainer has or had. A suite that stays green with one of them is no suite."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from isopref import score
from isopref.batch import rows, step
from isopref.data import schedule
from isopref.engine import padded, train_module
from isopref.models.row import Row
from isopref.ranks import num_ranks
from isopref.types import IntArray


@contextmanager
def mean_of_means() -> Iterator[None]:
    """Each microbatch's mean counts the same, whatever it holds."""

    def share(loss_P: Tensor, _coefficient_P: Tensor, *, num_ranks: int) -> Tensor:
        return loss_P.sum() / max(1, len(loss_P)) * num_ranks / 3

    with patch.object(train_module, "share_of_loss", share):
        yield


@contextmanager
def token_share_of_pair_mean() -> Iterator[None]:
    """A microbatch's share of the tokens, times its mean over pairs."""

    def share(loss_P: Tensor, coefficient_P: Tensor, *, num_ranks: int) -> Tensor:
        return loss_P.sum() / max(1, len(loss_P)) * coefficient_P.sum() * num_ranks

    with patch.object(train_module, "share_of_loss", share):
        yield


@contextmanager
def rank_local_denominator() -> Iterator[None]:
    """Each rank divides by its own pairs' weight; the ranks' gradients are then averaged."""
    build = step.build_step

    def local(table: Any, index: IntArray, plan: Any, kind: Any, weighting: Any, *, rank: int = 0) -> Any:
        whole = build(table, index, plan, kind, weighting, rank=rank)
        mine = sum(float(work.loss_share.sum()) for work in whole.work)
        for work in whole.work:
            work.loss_share.div_(max(mine, 1e-9) * len(plan))
        return whole

    with patch("isopref.testing.exactness.build_step", local):
        yield


@contextmanager
def token_mean_of_each_microbatch() -> Iterator[None]:
    """The likelihood of chosen answers is a mean over the tokens of a microbatch, and these means count the same."""

    build = step.build_step

    def local(table: Any, index: IntArray, plan: Any, kind: Any, weighting: Any, *, rank: int = 0) -> Any:
        whole = build(table, index, plan, kind, weighting, rank=rank)
        for work in whole.work:
            chosen = work.microbatch.compared[: work.microbatch.num_comparisons]
            num_tokens = int(work.microbatch.num_tokens[chosen].sum())
            work.nll_share.fill_(1 / max(1, num_tokens) / (len(whole.work) * len(plan)))
        return whole

    with patch("isopref.testing.exactness.build_step", local):
        yield


@contextmanager
def dropped_last_batch() -> Iterator[None]:
    """A short last batch is thrown away."""
    with patch.object(schedule, "num_batches", lambda num_pairs, batch_size: num_pairs // batch_size):
        yield


@contextmanager
def duplicated_pair() -> Iterator[None]:
    """A short last batch is filled up with pairs that were seen already."""
    with patch.object(
        schedule, "batch", lambda order, size, n: np.take(order, range(n * size, (n + 1) * size), mode="wrap")
    ):
        yield


@contextmanager
def leaking_attention() -> Iterator[None]:
    """The rejected answer of a shared row also attends to the chosen one."""
    segment = rows._Row.segment

    def leak(self: Any, tokens: IntArray, positions: IntArray, seen_before: IntArray) -> IntArray:
        if len(seen_before):
            seen_before = np.arange(seen_before[0], self.length)
        return segment(self, tokens, positions, seen_before)

    with patch.object(rows._Row, "segment", leak):
        yield


@contextmanager
def shifted_long_answers() -> Iterator[None]:
    """The positions of a rejected answer of more than 30 tokens in a shared row are off by one."""
    segment = rows._Row.segment

    def shift(self: Any, tokens: IntArray, positions: IntArray, seen_before: IntArray) -> IntArray:
        is_long_answer = len(seen_before) > 0 and len(tokens) > 30
        return segment(self, tokens, positions + is_long_answer, seen_before)

    with patch.object(rows._Row, "segment", shift):
        yield


@contextmanager
def state_of_a_sibling() -> Iterator[None]:
    """A layer with a state starts an answer from where the answer before it in the row ended, not from the prompt."""
    keys = Row.keys

    def sibling(self: Row, x: Tensor) -> Tensor:
        taken = keys(self, x).clone()
        queries, bounds = self.segments.query_bounds, self.segments.key_bounds
        for s, (start, end) in enumerate(pairwise(queries)):
            before = slice(bounds[s], bounds[s + 1] - (end - start))
            taken[before] = x[0, start - (before.stop - before.start) : start]
        return taken

    with patch.object(Row, "keys", sibling):
        yield


# --- in examples of several answers -----------------------------------------------------------------


@contextmanager
def first_comparison_alone() -> Iterator[None]:
    """Of the comparisons of an example only the first counts."""
    build = step.build_step

    def first_alone(table: Any, index: IntArray, *rest: Any, **more: Any) -> Any:
        whole = build(table, index, *rest, **more)
        for work in whole.work:
            again = torch.zeros(len(work.example), dtype=torch.bool)
            again[1:] = work.example[1:] == work.example[:-1]
            work.loss_share[again] = 0.0
        return whole

    with patch("isopref.testing.exactness.build_step", first_alone):
        yield


@contextmanager
def list_of_a_microbatch() -> Iterator[None]:
    """All answers of a microbatch are one list."""
    own = score.listed

    def together(readout: Any, microbatch: Any) -> Any:
        lists = own(readout, microbatch)
        return replace(lists, list=torch.zeros_like(lists.list))

    with patch.object(train_module, "listed", together):
        yield


@contextmanager
def reference_by_example() -> Iterator[None]:
    """The reference's values are looked up example by example, while rows number answers in rounds."""
    with patch.object(step, "in_rounds", lambda lengths, index: lengths.answers_of(index)):
        yield


# --- in batches of a script's collator ---------------------------------------------------------------


@contextmanager
def rank_local_token_mean() -> Iterator[None]:
    """The likelihood of chosen answers is a mean over each rank's own tokens; the ranks' means are averaged."""
    exchange = padded._over_ranks

    def local(sums: list[float], *rest: Any) -> Any:
        totals, before, largest = exchange(sums, *rest)
        totals[1] = sums[1] * num_ranks()
        return totals, before, largest

    with patch.object(padded, "_over_ranks", local):
        yield


@contextmanager
def likelihood_with_the_weights_of_the_loss() -> Iterator[None]:
    """The likelihood of a chosen answer is a mean over its own tokens, and counts as much as the pair's loss."""

    def weighed(microbatch: Any, **parts: Tensor) -> Any:
        tokens = microbatch.num_tokens[microbatch.compared[: microbatch.num_comparisons]]
        return step.Work(microbatch, **{**parts, "nll_share": parts["loss_share"] / tokens})

    with patch.object(padded, "Work", weighed):
        yield


@contextmanager
def ignored_weights() -> Iterator[None]:
    """The weights that the data gives its pairs are ignored."""
    with patch.object(padded, "_own", lambda piece: np.ones(len(piece["index"]))):
        yield


GRADIENT = {
    m.__name__: m
    for m in (
        mean_of_means,
        token_share_of_pair_mean,
        rank_local_denominator,
        token_mean_of_each_microbatch,
        leaking_attention,
        shifted_long_answers,
    )
}
TREES = {m.__name__: m for m in (leaking_attention, first_comparison_alone, reference_by_example)}
LISTS = {m.__name__: m for m in (list_of_a_microbatch, leaking_attention, reference_by_example)}
STATES = {m.__name__: m for m in (state_of_a_sibling, leaking_attention)}
COLLATED = {m.__name__: m for m in (rank_local_token_mean, likelihood_with_the_weights_of_the_loss, ignored_weights)}
SCHEDULE = {m.__name__: m for m in (dropped_last_batch, duplicated_pair)}


def mutated(name: str, function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)` with a bug planted."""
    with {**GRADIENT, **TREES, **LISTS, **STATES, **COLLATED, **SCHEDULE}[name]():
        return function(*args)
