"""Figures of a pair table, and pairs as text again: what a user should see before training.

Pure functions of a table (and a tokenizer). How they are printed is not decided here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from isopref.data.table import ExampleTable
from isopref.examples import Example
from isopref.types import IntArray

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PERCENTILES = (0, 25, 50, 75, 90, 99, 100)
NUM_LONGEST = 10
NUM_SAMPLES = 3


@dataclass(frozen=True)
class Lengths:
    """Tokens of one part of the pairs. A percentile is the length of some pair, never between two."""

    mean: float
    percentiles: dict[int, int]


@dataclass(frozen=True)
class PairSize:
    """One pair: its origin and the tokens of its parts."""

    origin: str
    prompt: int
    chosen: int
    rejected: int


@dataclass(frozen=True)
class OverContext:
    """Pairs that the model cannot take: a prompt and its longer answer are over its context length."""

    pairs: int
    longest: PairSize


@dataclass(frozen=True)
class PairText:
    """One pair as its tokens say it, special tokens included."""

    size: PairSize
    prompt: str
    chosen: str
    rejected: str


@dataclass(frozen=True)
class TableFigures:
    """A table in numbers. `tokens` counts the prompt in each sequence, `tokens_shared` once for both answers."""

    pairs: int
    prompts: int  # different ones
    repeated: int  # pairs whose tokens came before
    lengths: dict[str, Lengths]  # prompt, chosen, rejected, sequence (with the longer answer), pair (prompt once)
    tokens: int
    tokens_shared: int
    longest: list[PairSize]
    over_context: OverContext | None  # None where there are none


def figures(table: ExampleTable, *, context: int | None = None) -> TableFigures:
    """The figures of a table that is not empty, for a model with this context length (None: without limit)."""
    lengths = table.lengths
    chosen, rejected = lengths.compared_tokens
    pair = _pair_tokens(table)
    parts = {
        "prompt": lengths.prompt,
        "chosen": chosen,
        "rejected": rejected,
        "sequence": lengths.sequences.max(axis=1),
        "pair": pair,
    }
    longest = np.argsort(-pair, kind="stable")[:NUM_LONGEST]
    return TableFigures(
        pairs=len(table),
        prompts=len(np.unique(table.question_ids)),
        repeated=len(table) - len(np.unique(table.ids, axis=0)),
        lengths={name: _lengths(values) for name, values in parts.items()},
        tokens=int(lengths.sequence.sum()),
        tokens_shared=int(pair.sum()),
        longest=[_size(table, int(index)) for index in longest],
        over_context=None if context is None else _over(table, parts["sequence"], context),
    )


def samples(table: ExampleTable, tokenizer: PreTrainedTokenizerBase) -> list[PairText]:
    """A short, a middling and a long pair (the quartiles of length), as text."""
    order = np.argsort(_pair_tokens(table), kind="stable")
    steps = range(1, NUM_SAMPLES + 1)
    chosen = dict.fromkeys(int(order[len(order) * step // (NUM_SAMPLES + 1)]) for step in steps)
    return [_text(table, index, tokenizer) for index in chosen]


def _pair_tokens(table: ExampleTable) -> IntArray:
    """Tokens of each pair, its prompt once."""
    lengths = table.lengths
    tokens: IntArray = lengths.prompt + lengths.answer.reshape(-1, 2).sum(axis=1)
    return tokens


def _lengths(values: IntArray) -> Lengths:
    found = np.percentile(values, PERCENTILES, method="inverted_cdf")
    return Lengths(float(values.mean()), {at: int(value) for at, value in zip(PERCENTILES, found, strict=True)})


def _over(table: ExampleTable, sequence: IntArray, context: int) -> OverContext | None:
    count = int((sequence > context).sum())
    return OverContext(count, _size(table, int(sequence.argmax()))) if count else None


def _size(table: ExampleTable, index: int) -> PairSize:
    lengths = table.lengths.select([index])
    return PairSize(table.origin(index), *(int(length) for length in (*lengths.prompt, *lengths.answer)))


def _text(table: ExampleTable, index: int, tokenizer: PreTrainedTokenizerBase) -> PairText:
    return PairText(_size(table, index), *pair_text(table.example(index), tokenizer))


def pair_text(tokens: Example, tokenizer: PreTrainedTokenizerBase) -> tuple[str, str, str]:
    """Prompt and both answers. An answer is what it adds to the prompt's text, so nothing is lost at the border."""

    def decode(*parts: IntArray) -> str:
        ids = [int(token) for part in parts for token in part]
        text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def answer(part: IntArray) -> str:
        whole = decode(tokens.prompt, part)
        # A border inside a character leaves half of it on each side, and neither half is text.
        return whole.removeprefix(prompt) if whole.startswith(prompt) else decode(part)

    prompt = decode(tokens.prompt)
    chosen, rejected = (answer(part) for part in tokens.answers)
    return prompt, chosen, rejected
