"""Figures of a table, and its examples as text again: what a user should see before training.

Pure functions of a table (and a tokenizer). How they are printed is not decided here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from isopref.data.columns import SIDES
from isopref.data.context import context_ranges, decoder
from isopref.data.table import ExampleTable
from isopref.examples import PAIR, PAIR_SCORES, Example
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
class ExampleSize:
    """One pair or list: its origin, the tokens of its prompt and of each answer."""

    origin: str
    prompt: int
    answers: dict[str, int]  # by name: "chosen" and "rejected", or "score 4.5"


@dataclass(frozen=True)
class OverContext:
    """Examples that the model cannot take: a prompt and its longest answer are over its context length."""

    examples: int
    longest: ExampleSize


@dataclass(frozen=True)
class ExampleText:
    """One pair or list as its tokens say it, special tokens included."""

    size: ExampleSize
    prompt: str
    answers: dict[str, str]  # by name, as in the size
    context: dict[str, list[tuple[int, int]]] = field(default_factory=dict)  # stretches that are not trained, by name


@dataclass(frozen=True)
class TableFigures:
    """A table in numbers. `tokens` counts the prompt in each sequence, `tokens_shared` once for all answers."""

    examples: int
    answers: int
    comparisons: int
    prompts: int  # different ones
    repeated: int  # examples whose tokens came before
    lengths: dict[str, Lengths]  # prompt; chosen, rejected, or answer; sequence (the longest); example (prompt once)
    tokens: int
    tokens_shared: int
    longest: list[ExampleSize]
    over_context: OverContext | None  # None where there are none
    with_context: int = 0  # answers that hold tokens that are not trained
    answer_tokens: int = 0
    trained_tokens: int = 0  # of those

    @property
    def pairs_alone(self) -> bool:
        """Whether there is no list among the examples."""
        return "chosen" in self.lengths


def figures(table: ExampleTable, *, context: int | None = None) -> TableFigures:
    """The figures of a table that is not empty, for a model with this context length (None: without limit)."""
    lengths = table.lengths
    chosen, rejected = lengths.answer[lengths.sides]
    pairs_alone = table.unit == "pair"
    tokens = _tokens(table)
    parts = {
        "prompt": lengths.prompt,
        **({"chosen": chosen, "rejected": rejected} if pairs_alone else {"answer": lengths.answer}),
        "sequence": lengths.sequences.max(axis=1),
        "example": tokens,
    }
    longest = np.argsort(-tokens, kind="stable")[:NUM_LONGEST]
    return TableFigures(
        examples=len(table),
        answers=len(lengths.answer),
        comparisons=len(lengths.compared),
        prompts=len(np.unique(table.question_ids)),
        repeated=len(table) - len(np.unique(table.ids, axis=0)),
        lengths={name: _lengths(values) for name, values in parts.items()},
        tokens=int(lengths.sequence.sum()),
        tokens_shared=int(tokens.sum()),
        longest=[_size(table, int(index)) for index in longest],
        over_context=None if context is None else _over(table, parts["sequence"], context),
        with_context=int((lengths.trained < lengths.answer).sum()),
        answer_tokens=int(lengths.answer.sum()),
        trained_tokens=int(lengths.trained.sum()),
    )


def samples(table: ExampleTable, tokenizer: PreTrainedTokenizerBase) -> list[ExampleText]:
    """A short, a middling and a long example (the quartiles of length), as text."""
    order = np.argsort(_tokens(table), kind="stable")
    steps = range(1, NUM_SAMPLES + 1)
    chosen = dict.fromkeys(int(order[len(order) * step // (NUM_SAMPLES + 1)]) for step in steps)
    return [_text(table, index, tokenizer) for index in chosen]


def _tokens(table: ExampleTable) -> IntArray:
    """Tokens of each example, its prompt once."""
    lengths = table.lengths
    tokens: IntArray = lengths.prompt + np.bincount(lengths.of_answer, lengths.answer, len(lengths)).astype(np.int64)
    return tokens


def _lengths(values: IntArray) -> Lengths:
    found = np.percentile(values, PERCENTILES, method="inverted_cdf")
    return Lengths(float(values.mean()), {at: int(value) for at, value in zip(PERCENTILES, found, strict=True)})


def _over(table: ExampleTable, sequence: IntArray, context: int) -> OverContext | None:
    count = int((sequence > context).sum())
    return OverContext(count, _size(table, int(sequence.argmax()))) if count else None


def _size(table: ExampleTable, index: int) -> ExampleSize:
    example = table.example(index)
    answers = {name: len(answer) for name, answer in zip(_names(example), example.answers, strict=True)}
    return ExampleSize(table.origin(index), len(example.prompt), answers)


def _names(example: Example) -> list[str]:
    """What the answers are called: chosen and rejected, or by their numbers and scores."""
    if example.comparisons == PAIR and example.scores in ((), PAIR_SCORES):
        return list(SIDES)
    scores = [f", score {score:g}" for score in example.scores] or [""] * len(example.answers)
    return [f"answer {number}{score}" for number, score in enumerate(scores, start=1)]


def _text(table: ExampleTable, index: int, tokenizer: PreTrainedTokenizerBase) -> ExampleText:
    example = table.example(index)
    prompt, *answers = example_text(example, tokenizer)
    names, decode = _names(example), decoder(tokenizer)
    context = {name: context_ranges(example, number, decode) for number, name in enumerate(names)}
    return ExampleText(_size(table, index), prompt, dict(zip(names, answers, strict=True)), context)


def example_text(example: Example, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Prompt and answers. An answer is what it adds to the prompt's text, so nothing is lost at the border."""

    decode = decoder(tokenizer)

    def answer(part: IntArray) -> str:
        whole = decode(example.prompt, part)
        # A border inside a character leaves half of it on each side, and neither half is text.
        return whole.removeprefix(prompt) if whole.startswith(prompt) else decode(part)

    prompt = decode(example.prompt)
    return [prompt, *(answer(part) for part in example.answers)]
