"""What a reference scores of a table: its answers, for LD-DPO beginnings of them, and for KTO mismatched pairs.

Each is scored once, together with others of its prompt. A beginning of an answer has the log-probability of an answer
that ends there, so that it is one like the others.

N: examples of a table, A: its answers, M: its comparisons, I: items, which are A answers, 2 M heads and N mismatches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from isopref.batch.packing import Budget, RowKind
from isopref.data.content import ID_BYTES, answer_id
from isopref.data.mismatched import Mismatched
from isopref.data.table import ExampleTable
from isopref.examples import Example, Lengths
from isopref.reference.store import as_keys
from isopref.types import IntArray

MOST_TOGETHER = 16  # answers that are scored as one example


@dataclass(frozen=True)
class Items:
    """The answers of a table, in order; if asked for, the heads of all better and all worse answers; and mismatches."""

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
        """The mismatched pairs, if asked for."""
        return Mismatched(self.table) if self.mismatched else None

    @cached_property
    def answer(self) -> IntArray:
        """The answer that each item is a beginning of, or the whole of, as a number of the table: I."""
        lengths = self.table.lengths
        parts: list[IntArray] = [np.arange(len(lengths.answer))]
        if self.heads:
            parts.append(lengths.sides.ravel())
        if self.others is not None:
            parts.append(self.others.answer)
        return np.concatenate(parts)

    @cached_property
    def num_tokens(self) -> IntArray:
        """Tokens of each item: I."""
        lengths = self.table.lengths
        parts = [lengths.answer]
        if self.heads:
            shorter_M = lengths.compared_tokens.min(axis=0)
            parts += [shorter_M, shorter_M]
        if self.others is not None:
            parts.append(self.others.lengths.answer)
        return np.concatenate(parts)

    @cached_property
    def ids(self) -> NDArray[np.uint8]:
        """What each item is, by content: I, 16."""
        matched = slice(0, self.num_answers + self.num_heads)
        found = self.table.answer_ids[self.answer[matched]]
        cut = np.flatnonzero(self.num_tokens[matched] < self.table.lengths.answer[self.answer[matched]])
        for item in cut.tolist():
            prompt, tokens = self.tokens(item)
            found[item] = np.frombuffer(answer_id(prompt, tokens), np.uint8, ID_BYTES)
        return found if self.others is None else np.concatenate([found, self.others.answer_ids])

    @cached_property
    def example(self) -> IntArray:
        """The example of the table whose prompt each item has: I."""
        matched = self.table.lengths.of_answer[self.answer[: self.num_answers + self.num_heads]]
        return matched if self.others is None else np.append(matched, np.arange(len(self.table)))

    def num_examples(self, some: IntArray) -> int:
        """How many examples some items are of."""
        return len(np.unique(self.example[some]))

    def tokens(self, item: int) -> tuple[IntArray, IntArray]:
        """Prompt and answer."""
        example = int(self.example[item])
        if self.others is not None and item >= self.num_answers + self.num_heads:
            mismatched = self.others.example(example)
            return mismatched.prompt, mismatched.answers[0]
        prompt, answers = self.table.example(example)[:2]
        number = int(self.answer[item] - self.table.lengths.first_answer[example])
        return prompt, answers[number][: int(self.num_tokens[item])]

    def origin(self, item: int) -> str:
        return self.table.origin(int(self.example[item]))


def one_of_each(items: Items, some: IntArray) -> IntArray:
    """Of items that are equal, the first."""
    _, first = np.unique(as_keys(items.ids[some]), return_index=True)
    return some[np.sort(first)]


class Unscored:
    """Some items as examples: those of one prompt together, so that it is computed once. Nothing is compared.

    `budget`: what an example of several items may take.
    """

    def __init__(self, items: Items, some: IntArray, budget: Budget):
        self.items = items
        self._groups = _by_prompt(items, some, budget)
        self.items_in_order: IntArray = np.array([item for group in self._groups for item in group], np.int64)
        self.lengths = _lengths(items, self._groups)

    def example(self, index: int) -> Example:
        tokens = [self.items.tokens(item) for item in self._groups[index]]
        return Example(tokens[0][0], tuple(answer for _, answer in tokens))

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
    """Token slots of an example whose answers have no beginning in common."""
    if kind == "shared":
        return prompt + sum(answers)
    if kind == "padded":
        return len(answers) * (prompt + max(answers))
    return len(answers) * prompt + sum(answers)


def _lengths(items: Items, groups: Sequence[Sequence[int]]) -> Lengths:
    """Their token counts, whatever answers begin with alike."""
    flat = np.array([item for group in groups for item in group], np.int64)
    count = np.array([len(group) for group in groups], np.int64)
    first = np.array([group[0] for group in groups], np.int64)
    prompt, answer = items.table.lengths.prompt[items.example[first]], items.num_tokens[flat]
    of_group = np.repeat(np.arange(len(groups)), count)
    return Lengths(
        prompt=prompt,
        answer=answer,
        tree=prompt + np.bincount(of_group, answer, minlength=len(groups)).astype(np.int64),
        num_answers=count,
        num_comparisons=np.zeros(len(groups), np.int64),
        compared=np.zeros((0, 2), np.int64),
    )
