"""What a reference scores of a table: answers; for LD-DPO, also prefixes of them ("heads"); for KTO, mismatched pairs.

Each item is scored once, together with others of the same prompt. A head is the part of an answer that LD-DPO does not
discount: it ends when it has as many trained tokens as the shorter answer of its comparison. It is scored like an
answer that ends there.

N: examples of a table, A: its answers, M: its comparisons, I: items, which are A answers, 2 M heads and N mismatches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isopref.batch.packing import Budget, RowKind
from isopref.data.content import ID_BYTES, answer_id
from isopref.data.mismatched import Mismatched
from isopref.data.table import ExampleTable
from isopref.examples import Example, Lengths
from isopref.reference.store import as_keys
from isopref.types import FloatArray, IntArray

MOST_TOGETHER = 16  # answers that are scored as one example


@dataclass(frozen=True)
class Items:
    """The answers of a table, in order; if requested, heads of all better, then all worse answers; and mismatches."""

    table: ExampleTable
    heads: bool = False
    mismatched: bool = False

    def __len__(self) -> int:
        return len(self.num_tokens)

    @property
    def num_answers(self) -> int:
        return len(self.table.lengths.answer)

    @property
    def num_heads(self) -> int:
        return 2 * len(self.table.lengths.compared) if self.heads else 0

    @cached_property
    def others(self) -> Mismatched | None:
        """The mismatched pairs, if requested."""
        return Mismatched(self.table) if self.mismatched else None

    @cached_property
    def answer(self) -> IntArray:
        """The table's index of the answer that each item is, or is a prefix of: I."""
        lengths = self.table.lengths
        parts: list[IntArray] = [np.arange(len(lengths.answer))]
        if self.heads:
            parts.append(lengths.sides.ravel())
        if self.others is not None:
            parts.append(self.others.answer)
        return np.concatenate(parts)

    @cached_property
    def num_tokens(self) -> IntArray:
        """Tokens of each item, context included: I."""
        lengths = self.table.lengths
        parts: list[NDArray[Any]] = [lengths.answer]
        if self.heads:
            parts.append(self._head_tokens())
        if self.others is not None:
            parts.append(self.others.lengths.answer)
        return np.concatenate(parts)

    @property
    def shortest(self) -> int:
        """Tokens of the shortest item with its prompt."""
        return int((self.table.lengths.prompt[self.example] + self.num_tokens).min())

    def _head_tokens(self) -> IntArray:
        """Tokens of the heads, context included: up to as many trained ones as the shorter answer has: 2 M."""
        lengths = self.table.lengths
        counts = np.tile(lengths.compared_tokens.min(axis=0), 2)
        has_context = lengths.trained < lengths.answer
        for head in np.flatnonzero(has_context[lengths.sides.ravel()]).tolist():
            _, _, weights = self._whole(self.num_answers + head)
            assert weights is not None, "it has context"
            counts[head] = np.flatnonzero(weights)[counts[head] - 1] + 1
        return counts

    @cached_property
    def ids(self) -> NDArray[np.uint8]:
        """A digest of each item's content: I, 16 bytes."""
        matched = slice(0, self.num_answers + self.num_heads)
        found = self.table.answer_ids[self.answer[matched]]
        cut = np.flatnonzero(self.num_tokens[matched] < self.table.lengths.answer[self.answer[matched]])
        for item in cut.tolist():
            found[item] = np.frombuffer(answer_id(*self.tokens(item)), np.uint8, ID_BYTES)
        return found if self.others is None else np.concatenate([found, self.others.answer_ids])

    @cached_property
    def example(self) -> IntArray:
        """The example of the table whose prompt each item has: I."""
        matched = self.table.lengths.of_answer[self.answer[: self.num_answers + self.num_heads]]
        return matched if self.others is None else np.append(matched, np.arange(len(self.table)))

    def num_examples(self, some: IntArray) -> int:
        """How many examples some items belong to."""
        return len(np.unique(self.example[some]))

    def tokens(self, item: int) -> tuple[IntArray, IntArray, FloatArray | None]:
        """Prompt, answer and the weights of its tokens; None if all are 1."""
        prompt, answer, weights = self._whole(item)
        end = int(self.num_tokens[item])
        if weights is not None:
            weights = None if (weights[:end] == 1).all() else weights[:end]
        return prompt, answer[:end], weights

    def _whole(self, item: int) -> tuple[IntArray, IntArray, FloatArray | None]:
        """The same for the complete answer, if the item is a head."""
        number = int(self.example[item])
        if self.others is not None and item >= self.num_answers + self.num_heads:
            example, k = self.others.example(number), 0
        else:
            example = self.table.example(number)
            k = int(self.answer[item] - self.table.lengths.first_answer[number])
        return example.prompt, example.answers[k], example.weights_of(k)

    def origin(self, item: int) -> str:
        return self.table.origin(int(self.example[item]))


def one_of_each(items: Items, some: IntArray) -> IntArray:
    """The first of each set of equal items."""
    _, first = np.unique(as_keys(items.ids[some]), return_index=True)
    return some[np.sort(first)]


class Unscored:
    """Some items as examples without comparisons. Items of one prompt form one example, so that it is computed once.

    `budget` limits the size of an example of several items.
    """

    def __init__(self, items: Items, some: IntArray, budget: Budget):
        self.items = items
        self._groups = _by_prompt(items, some, budget)
        self.items_in_order: IntArray = np.array([item for group in self._groups for item in group], np.int64)
        self.lengths = _lengths(items, self._groups)

    def example(self, index: int) -> Example:
        tokens = [self.items.tokens(item) for item in self._groups[index]]
        weights = tuple(np.ones(len(answer)) if own is None else own for _, answer, own in tokens)
        plain = all(own is None for *_, own in tokens)
        return Example(tokens[0][0], tuple(answer for _, answer, _ in tokens), weights=() if plain else weights)

    def origin(self, index: int) -> str:
        return self.items.origin(self._groups[index][0])


def _by_prompt(items: Items, some: IntArray, budget: Budget) -> list[list[int]]:
    example = items.example[some]
    prompts = items.table.prompt_ids[example].tolist()
    prompt_tokens = items.table.lengths.prompt[example].tolist()
    answer_tokens = items.num_tokens[some].tolist()
    groups: list[list[int]] = []
    filling: dict[int, tuple[list[int], list[int]]] = {}  # by prompt: items, and the tokens of each
    for item, prompt, size, tokens in zip(some.tolist(), prompts, prompt_tokens, answer_tokens, strict=True):
        group, sizes = filling.get(prompt, ([], []))
        if not group or len(group) == MOST_TOGETHER or _tokens(size, [*sizes, tokens], budget.kind) > budget.tokens:
            group, sizes = filling[prompt] = [], []
            groups.append(group)
        group.append(item)
        sizes.append(tokens)
    return groups


def _tokens(prompt: int, answers: list[int], kind: RowKind) -> int:
    """Token slots of an example whose answers have no common prefix."""
    if kind == "shared":
        return prompt + sum(answers)
    if kind == "padded":
        return len(answers) * (prompt + max(answers))
    return len(answers) * prompt + sum(answers)


def _lengths(items: Items, groups: Sequence[Sequence[int]]) -> Lengths:
    """Token counts of the groups as examples, ignoring common prefixes of answers."""
    flat = np.array([item for group in groups for item in group], np.int64)
    count = np.array([len(group) for group in groups], np.int64)
    first = np.array([group[0] for group in groups], np.int64)
    prompt, answer = items.table.lengths.prompt[items.example[first]], items.num_tokens[flat]
    of_group = np.repeat(np.arange(len(groups)), count)
    return Lengths(
        prompt=prompt,
        answer=answer,
        trained=answer,  # nothing is divided by it
        tree=prompt + np.bincount(of_group, answer, minlength=len(groups)).astype(np.int64),
        num_answers=count,
        num_comparisons=np.zeros(len(groups), np.int64),
        compared=np.zeros((0, 2), np.int64),
    )
