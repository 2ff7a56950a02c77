"""Examples: a prompt with K answers, their labels or scores, and their token counts. Depends only on numpy.

Dimensions: N examples, A answers of all examples, M comparisons of all examples, K answers of the example with the
most. Answers and comparisons are listed example by example.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Self

import numpy as np

from isopref.types import FloatArray, IntArray

FEWEST_SHARED = 8  # tokens: a row stores a shorter common prefix of two answers twice, as sharing it gains nothing


class Example(NamedTuple):
    """Token ids of one prompt and its answers, each directly following the prompt, with their comparisons or scores.

    Comparisons are for pairwise objectives, scores for list and label objectives. A labelled answer has the score 1.0
    (good) or 0.0 (bad) and no comparison. The log-probability of an answer is the sum over its tokens of weight times
    log p. Tokens of weight 0 are context: a tool result, a later user turn. All others are trained.
    """

    prompt: IntArray
    answers: tuple[IntArray, ...]
    comparisons: tuple[tuple[int, int], ...] = ()  # (better, worse): indices of answers
    scores: tuple[float, ...] = ()  # of each answer, higher is better; empty if unknown
    gaps: tuple[float, ...] = ()  # of each comparison: score of better minus worse, if not given by `scores`
    weights: tuple[FloatArray, ...] = ()  # of the tokens of each answer; empty if all are 1

    @property
    def parts(self) -> tuple[IntArray, ...]:
        """The prompt and the answers."""
        return self.prompt, *self.answers

    @property
    def score_gaps(self) -> tuple[float, ...]:
        """How much better the better answer of each comparison is; empty if unknown.

        The scores of a plain pair only say which answer is better: they are always 1 and 0.
        """
        if self.gaps or not self.scores or is_plain_pair(self):
            return self.gaps
        return tuple(self.scores[better] - self.scores[worse] for better, worse in self.comparisons)

    @property
    def trained(self) -> tuple[int, ...]:
        """The number of trained tokens of each answer."""
        if not self.weights:
            return tuple(map(len, self.answers))
        return tuple(int(np.count_nonzero(weights)) for weights in self.weights)

    @property
    def token_weights(self) -> tuple[FloatArray, ...]:
        """The token weights of each answer, even if all are 1."""
        return self.weights or tuple(np.ones(len(answer)) for answer in self.answers)

    def weights_of(self, answer: int) -> FloatArray | None:
        """The weights of an answer's tokens; None if all are 1."""
        return None if not self.weights or (self.weights[answer] == 1).all() else self.weights[answer]


PAIR = ((0, 1),)  # the comparisons of a pair: answer 0 is better than answer 1
PAIR_SCORES = (1.0, 0.0)  # a pair is a ranked list of two, too


def is_plain_pair(example: Example) -> bool:
    """Whether an example is a pair without scores: only which answer is better is known."""
    return example.comparisons == PAIR and example.scores == PAIR_SCORES and not example.gaps


class PairTokens(NamedTuple):
    """Token ids of one pair: an example with two answers, the first one better, with all their tokens trained."""

    prompt: IntArray
    chosen: IntArray
    rejected: IntArray

    @property
    def example(self) -> Example:
        return Example(self.prompt, (self.chosen, self.rejected), PAIR, PAIR_SCORES)


@dataclass(frozen=True)
class Lengths:
    """Token counts of N examples: all that the plan and the denominator need."""

    prompt: IntArray  # N
    answer: IntArray  # A
    trained: IntArray  # A: trained tokens, without context
    tree: IntArray  # N: tokens of the example as a prefix tree, in which every shared prefix counts once
    num_answers: IntArray  # N
    num_comparisons: IntArray  # N
    compared: IntArray  # M, 2: better and worse, as indices of the example's own answers

    @classmethod
    def of(cls, examples: Sequence[Example]) -> Self:
        """The lengths of some examples."""
        compared = [pair for one in examples for pair in one.comparisons]
        return cls(
            prompt=_counts(len(one.prompt) for one in examples),
            answer=_counts(len(answer) for one in examples for answer in one.answers),
            trained=_counts(count for one in examples for count in one.trained),
            tree=_counts(tree_tokens(one) for one in examples),
            num_answers=_counts(len(one.answers) for one in examples),
            num_comparisons=_counts(len(one.comparisons) for one in examples),
            compared=np.array(compared, np.int64).reshape(-1, 2),
        )

    @classmethod
    def of_pairs(cls, lengths_N3: IntArray) -> Self:
        """The lengths of pairs, from prompt, chosen and rejected; without context or a common prefix of answers."""
        lengths = np.asarray(lengths_N3, np.int64)
        size = len(lengths)
        return cls(
            prompt=lengths[:, 0],
            answer=lengths[:, 1:].ravel(),
            trained=lengths[:, 1:].ravel(),
            tree=lengths.sum(axis=1),
            num_answers=np.full(size, 2),
            num_comparisons=np.ones(size, np.int64),
            compared=np.tile(np.arange(2), (size, 1)),
        )

    def __len__(self) -> int:
        return len(self.prompt)

    def select(self, index: IntArray | Sequence[int]) -> Lengths:
        """The lengths of these examples, in this order."""
        index = np.asarray(index, np.int64)
        return Lengths(
            prompt=self.prompt[index],
            answer=self.answer[self.answers_of(index)],
            trained=self.trained[self.answers_of(index)],
            tree=self.tree[index],
            num_answers=self.num_answers[index],
            num_comparisons=self.num_comparisons[index],
            compared=self.compared[self.comparisons_of(index)],
        )

    # --- where answers and comparisons are -----------------------------------------------------------

    def answers_of(self, index: IntArray) -> IntArray:
        """Indices, among all A, of the answers of some examples, example by example."""
        return _ranges(self.first_answer[index], self.num_answers[index])

    def comparisons_of(self, index: IntArray) -> IntArray:
        """Indices, among all M, of the comparisons of some examples, example by example."""
        return _ranges(self.first_comparison[index], self.num_comparisons[index])

    @cached_property
    def first_answer(self) -> IntArray:
        """The index, among all A, of the first answer of each example: N."""
        first: IntArray = np.cumsum(self.num_answers) - self.num_answers
        return first

    @cached_property
    def first_comparison(self) -> IntArray:
        """The index, among all M, of the first comparison of each example: N."""
        first: IntArray = np.cumsum(self.num_comparisons) - self.num_comparisons
        return first

    @cached_property
    def of_answer(self) -> IntArray:
        """The example of each answer: A."""
        return np.repeat(np.arange(len(self)), self.num_answers)

    @cached_property
    def of_comparison(self) -> IntArray:
        """The example of each comparison: M."""
        return np.repeat(np.arange(len(self)), self.num_comparisons)

    @cached_property
    def sides(self) -> IntArray:
        """The better and the worse answer of each comparison, as indices among all A: 2, M."""
        sides: IntArray = (self.compared + self.first_answer[self.of_comparison][:, None]).T
        return sides

    # --- tokens ------------------------------------------------------------------------------------

    @cached_property
    def sequence(self) -> IntArray:
        """Tokens of each answer with its prompt: A."""
        sequence: IntArray = self.answer + self.prompt[self.of_answer]
        return sequence

    @cached_property
    def sequences(self) -> IntArray:
        """The same per example, padded with 0 for examples with fewer than K answers: N, K."""
        most = int(self.num_answers.max(initial=0))
        filled = np.zeros((len(self), most), np.int64)
        filled[self.of_answer, np.arange(len(self.answer)) - self.first_answer[self.of_answer]] = self.sequence
        return filled

    @cached_property
    def compared_tokens(self) -> IntArray:
        """Trained tokens of the better and the worse answer of each comparison: 2, M."""
        return self.trained[self.sides]


def tree_tokens(example: Example) -> int:
    """Tokens of an example in a row that holds every shared prefix once."""
    total = len(example.prompt)
    for k, answer in enumerate(example.answers):
        total += len(answer) - max((shared_tokens(answer, other) for other in example.answers[:k]), default=0)
    return total


def shared_tokens(answer: IntArray, other: IntArray) -> int:
    """Tokens of the common prefix of two answers that a row holds once."""
    shared = common_tokens(answer, other)
    return shared if shared >= FEWEST_SHARED else 0


def common_tokens(a: IntArray, b: IntArray) -> int:
    """The length of the common prefix of two sequences."""
    shorter = min(len(a), len(b))
    different = np.flatnonzero(a[:shorter] != b[:shorter])
    return int(different[0]) if len(different) else shorter


def _counts(values: Iterable[int]) -> IntArray:
    return np.fromiter(values, np.int64)


def _ranges(first: IntArray, count: IntArray) -> IntArray:
    """first[0], first[0] + 1, ... (count[0] of them), first[1], ..."""
    ends = np.cumsum(count)
    within: IntArray = np.arange(int(count.sum())) - np.repeat(ends - count, count)
    return np.repeat(first, count) + within
