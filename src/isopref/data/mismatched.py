"""Mismatched pairs: every prompt of a table with an answer to another question. KTO estimates its KL term with them.

The matching depends on content alone, not on the order of the examples, their files, batches or ranks. N: examples of a
table.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from isopref.data.content import ID_BYTES, answer_id
from isopref.data.table import ExampleTable
from isopref.errors import DataError
from isopref.examples import Example, Lengths
from isopref.types import IntArray


class Mismatched:
    """The examples of a table, each with one answer: an answer of its partner, which has another question.

    The partner is the next example with another question in the (cyclic) order of the examples' ids. Of its answers,
    the one with the smallest id is taken. It is cut if the sequence would be longer than the longest one of the table,
    so a budget that is large enough for the table is large enough for mismatched pairs.

    Raises DataError for a table with a single question.
    """

    def __init__(self, table: ExampleTable):
        self.table = table
        self.answer = _first_answers(table)[partners(table.ids, table.question_ids)]  # N: number of the table's answer

    def __len__(self) -> int:
        return len(self.table)

    @cached_property
    def lengths(self) -> Lengths:
        of_table = self.table.lengths
        room = of_table.sequence.max() - of_table.prompt
        answer = np.minimum(of_table.answer[self.answer], room)
        trained = of_table.trained[self.answer].copy()
        for index in np.flatnonzero(answer < of_table.answer[self.answer]).tolist():
            (trained[index],) = self._cut(index, int(answer[index])).trained
        return Lengths(
            prompt=of_table.prompt,
            answer=answer,
            trained=trained,
            tree=of_table.prompt + answer,
            num_answers=np.ones(len(self), np.int64),
            num_comparisons=np.zeros(len(self), np.int64),
            compared=np.zeros((0, 2), np.int64),
        )

    def example(self, index: int) -> Example:
        return self._cut(index, int(self.lengths.answer[index]))

    def _cut(self, index: int, num_tokens: int) -> Example:
        """An example with the first `num_tokens` tokens of its partner's answer."""
        lengths, answer = self.table.lengths, int(self.answer[index])
        partner = int(lengths.of_answer[answer])
        of_partner, k = self.table.example(partner), answer - int(lengths.first_answer[partner])
        weights = of_partner.weights_of(k)
        return Example(
            self.table.example(index).prompt,
            (of_partner.answers[k][:num_tokens],),
            weights=() if weights is None else (weights[:num_tokens],),
        )

    def origin(self, index: int) -> str:
        return self.table.origin(index)

    @cached_property
    def answer_ids(self) -> NDArray[np.uint8]:
        """Content ids of the answers with their prompts: N, 16."""
        ids = bytearray()
        for index in range(len(self)):
            one = self.example(index)
            ids += answer_id(one.prompt, one.answers[0], one.weights_of(0))
        return np.frombuffer(bytes(ids), np.uint8).reshape(-1, ID_BYTES)


def partners(ids_N: NDArray[np.uint8], questions_N: NDArray[np.uint64]) -> IntArray:
    """For each example, the next one by id (cyclically) that has another question: N.

    Raises DataError if all have the same question.
    """
    order = _by_id(ids_N)
    questions = questions_N[order]
    twice = np.concatenate([questions, questions])
    changes = np.flatnonzero(twice[1:] != twice[:-1]) + 1  # where another question begins
    if not len(changes):
        raise DataError(
            "The loss kto compares answers with answers to other prompts, but all examples have the same prompt. Add "
            "data with other prompts, or use another loss, such as bco."
        )
    size = len(order)
    following = changes[np.searchsorted(changes, np.arange(size), side="right")]
    found = np.empty(size, np.int64)
    found[order] = order[following % size]
    return found


def _first_answers(table: ExampleTable) -> IntArray:
    """The answer of each example that has the smallest id, as an index among all answers of the table: N."""
    rank = np.empty(len(table.answer_ids), np.int64)
    rank[_by_id(table.answer_ids)] = np.arange(len(rank))
    order = np.lexsort((rank, table.lengths.of_answer))
    first: IntArray = order[table.lengths.first_answer]
    return first


def _by_id(ids: NDArray[np.uint8]) -> IntArray:
    """The indices that sort ids."""
    high, low = np.ascontiguousarray(ids).view(">u8").T
    return np.lexsort((low, high))
