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

from isopref.batch import rows, step, terms
from isopref.data import mismatched, schedule
from isopref.engine import first_pass, padded, train_module
from isopref.examples import Lengths
from isopref.models import tree
from isopref.models.row import Row
from isopref.ops.convolution import Taps
from isopref.ops.levels import Levels
from isopref.ranks import num_ranks
from isopref.types import FloatArray, IntArray, Segments
from support.splitting_mutations import OWN_HEADS, SPLIT


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

    def local(table: Any, index: IntArray, plan: Any, *rest: Any, **more: Any) -> Any:
        whole = build(table, index, plan, *rest, **more)
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

    def local(table: Any, index: IntArray, plan: Any, *rest: Any, **more: Any) -> Any:
        whole = build(table, index, plan, *rest, **more)
        for work in whole.work:
            chosen = work.microbatch.compared[: work.microbatch.num_comparisons]
            num_tokens = int(work.microbatch.num_tokens[chosen].sum())
            work.nll_share[chosen] = 1 / max(1, num_tokens) / (len(whole.work) * len(plan))
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

    def along_the_row(segments: Segments, count: int) -> Taps:
        bounds = (0, segments.query_bounds[-1])
        whole = torch.tensor(bounds, dtype=torch.int32)
        one = Segments(whole, whole, None, None, bounds, bounds, follows=(-1,), longest=bounds[-1])
        return tree.taps_of(one, count)

    with (
        patch.object(Row, "keys", sibling),
        patch("isopref.models.row.taps_of", along_the_row),
        recurrent_state_of_a_sibling(),
    ):
        yield


@contextmanager
def recurrent_state_of_a_sibling() -> Iterator[None]:
    """The same for the recurrence of layers that follow the tree, while their convolution starts from the prompt."""

    def after_siblings(segments: Segments) -> Levels:
        starts = segments.query_bounds[:-1]
        ends = tuple(start - 1 if token >= 0 else -1 for start, token in zip(starts, segments.follows, strict=True))
        return tree.levels_of(replace(segments, follows=ends))

    with patch("isopref.models.row.levels_of", after_siblings):
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
    own = terms.Lists.view

    def together(self: Any, readout: Any, microbatch: Any, needs: Any) -> Any:
        lists = own(self, readout, microbatch, needs)
        return replace(lists, list=torch.zeros_like(lists.list))

    with patch.object(terms.Lists, "view", together):
        yield


@contextmanager
def split_lists() -> Iterator[None]:
    """Lists are cut in two, as if their answers were in different microbatches."""
    own = terms.Lists.view

    def cut(self: Any, readout: Any, microbatch: Any, needs: Any) -> Any:
        lists = own(self, readout, microbatch, needs)
        parity = torch.arange(len(lists.list), device=lists.list.device) % 2
        return replace(lists, list=2 * lists.list + parity)

    with patch.object(terms.Lists, "view", cut):
        yield


@contextmanager
def term_counted_twice() -> Iterator[None]:
    """The first term of a microbatch (a comparison, a labelled answer, an answer of a list) counts twice."""
    build = step.build_step

    def twice(*args: Any, **more: Any) -> Any:
        whole = build(*args, **more)
        for work in whole.work:
            work.loss_share[:1] *= 2
        return whole

    with patch("isopref.testing.exactness.build_step", twice):
        yield


@contextmanager
def reference_by_example() -> Iterator[None]:
    """The reference's values are looked up example by example, while rows number answers in rounds."""
    with patch.object(step, "in_rounds", lambda lengths, index: lengths.answers_of(index)):
        yield


# --- in reward models ---------------------------------------------------------------------------------


@contextmanager
def reward_at_the_end_of_the_row() -> Iterator[None]:
    """The reward is read at the last token of the row (of the batch, where that is padded), not of the answer."""
    with _moved_last(lambda ends, size: [(size - 1, answer) for _, answer in ends]):
        yield


@contextmanager
def reward_of_the_first_branch() -> Iterator[None]:
    """All answers of a pass get the reward of its first one."""
    with _moved_last(lambda ends, _: [(ends[0][0], answer) for _, answer in ends]):
        yield


@contextmanager
def reward_before_the_last_token() -> Iterator[None]:
    """The reward is read one token early, as where the token that ends an answer is taken for padding."""
    with _moved_last(lambda ends, _: [(max(0, position - 1), answer) for position, answer in ends]):
        yield


@contextmanager
def _moved_last(move: Callable[[Any, int], Any]) -> Iterator[None]:
    last = rows._last
    with patch.object(rows, "_last", lambda ends, size: last(move(ends, size), size)):
        yield


# --- in answers with context -------------------------------------------------------------------------


def _with_weights(change: Callable[[FloatArray], FloatArray]) -> Any:
    """Rows are built with other weights of tokens than the examples have."""
    own = rows._sequence

    def changed(example: Any, *rest: Any) -> Any:
        weights = tuple(change(one) for one in example.weights)
        return own(example._replace(weights=weights), *rest)

    return patch.object(rows, "_sequence", changed)


@contextmanager
def trained_tool_results() -> Iterator[None]:
    """Turns of context are trained like the others."""
    with _with_weights(lambda weights: np.where(weights == 0, 1.0, weights)):
        yield


@contextmanager
def weights_of_other_turns() -> Iterator[None]:
    """Each turn has the weight that belongs to another one of its answer."""
    with _with_weights(lambda weights: weights[::-1]):
        yield


@contextmanager
def weights_of_the_token_before() -> Iterator[None]:
    """The weight of a token is applied where the token is read, not where it is predicted."""
    with _with_weights(lambda weights: np.append(weights[1:], weights[-1])):
        yield


@contextmanager
def means_over_context() -> Iterator[None]:
    """Where a loss divides by the tokens of an answer, context is counted."""
    own = rows.build_microbatch

    def counted(examples: Any, *rest: Any, **more: Any) -> Any:
        built = own(examples, *rest, **more)
        lengths = Lengths.of(examples)
        every = lengths.answer[rows.in_rounds(lengths, np.arange(len(lengths)))]
        return replace(built, num_tokens=torch.from_numpy(every))

    with patch.object(step, "build_microbatch", counted):
        yield


# --- in labelled answers ----------------------------------------------------------------------------


@contextmanager
def kl_of_one_microbatch() -> Iterator[None]:
    """KTO's KL term is the mean over the mismatched pairs of one microbatch."""
    own = first_pass.FirstPass._kl

    def local(self: Any, whole: Any, gain: Any) -> Any:
        one = whole.mismatched[0]
        alone = replace(one, share=one.share / max(1e-9, float(one.share.sum())))
        with patch.object(first_pass, "over_ranks", lambda total, _group: total):
            return own(self, replace(whole, mismatched=(alone,)), gain)

    with patch.object(first_pass.FirstPass, "_kl", local):
        yield


@contextmanager
def kl_of_one_rank() -> Iterator[None]:
    """KTO's KL term is the mean over each rank's own mismatched pairs."""
    own = first_pass.FirstPass._kl

    def local(self: Any, whole: Any, gain: Any) -> Any:
        mine = max(1e-9, sum(float(one.share.sum()) for one in whole.mismatched))
        alone = tuple(replace(one, share=one.share / mine) for one in whole.mismatched)
        with patch.object(first_pass, "over_ranks", lambda total, _group: total):
            return own(self, replace(whole, mismatched=alone), gain)

    with patch.object(first_pass.FirstPass, "_kl", local):
        yield


@contextmanager
def mismatch_counted_twice() -> Iterator[None]:
    """One mismatched pair counts twice in KTO's KL term."""
    own = step.build_mismatched

    def twice(*args: Any, **more: Any) -> Any:
        found = own(*args, **more)
        if len(found[0].share):
            found[0].share[0] *= 2
        return found

    with patch("isopref.testing.exactness.build_mismatched", twice):
        yield


@contextmanager
def mismatch_in_batch_order() -> Iterator[None]:
    """The partner of an example is the one before it in its batch."""
    with patch.object(mismatched, "partners", lambda ids, _questions: np.roll(np.arange(len(ids)), 1)):
        yield


@contextmanager
def midpoint_of_all_answers() -> Iterator[None]:
    """BCO's shift is the mean over all answers: with more good ones than bad, it is among the good."""
    with patch.object(first_pass, "midpoint", lambda past: past[:, 0].sum() / past[:, 1].sum()):
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

    def weighed(microbatch: Any, **parts: Any) -> Any:
        chosen = microbatch.compared[: microbatch.num_comparisons]
        share = parts["nll_share"].clone()
        share[chosen] = parts["loss_share"] / microbatch.num_tokens[chosen]
        return step.Work(microbatch, **{**parts, "nll_share": share})

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
TREES = {m.__name__: m for m in (leaking_attention, first_comparison_alone, term_counted_twice, reference_by_example)}
CONTEXT = {
    m.__name__: m
    for m in (
        trained_tool_results,
        weights_of_other_turns,
        weights_of_the_token_before,
        means_over_context,
        leaking_attention,
    )
}
LISTS = {
    m.__name__: m
    for m in (list_of_a_microbatch, split_lists, term_counted_twice, leaking_attention, reference_by_example)
}
REWARDS = {
    m.__name__: m
    for m in (
        *(reward_at_the_end_of_the_row, reward_of_the_first_branch, reward_before_the_last_token),
        *(leaking_attention, mean_of_means),
    )
}
KTO = {
    m.__name__: m
    for m in (
        *(kl_of_one_microbatch, kl_of_one_rank, mismatch_counted_twice, mismatch_in_batch_order),
        *(term_counted_twice, leaking_attention),
    )
}
BCO = {m.__name__: m for m in (midpoint_of_all_answers, term_counted_twice, reference_by_example)}
STATES = {m.__name__: m for m in (state_of_a_sibling, recurrent_state_of_a_sibling, leaking_attention)}
COLLATED = {m.__name__: m for m in (rank_local_token_mean, likelihood_with_the_weights_of_the_loss, ignored_weights)}
SCHEDULE = {m.__name__: m for m in (dropped_last_batch, duplicated_pair)}


def mutated(name: str, function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)` with a bug planted."""
    every = (GRADIENT, TREES, CONTEXT, LISTS, KTO, BCO, REWARDS, STATES, SPLIT, OWN_HEADS, COLLATED, SCHEDULE)
    with next(some[name] for some in every if name in some)():
        return function(*args)
