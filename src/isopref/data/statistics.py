"""Figures of a table, and its examples decoded as text: what a user should see before training.

Pure functions of a table (and a tokenizer), which print nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from isopref.data.columns import SIDES
from isopref.data.context import decoder, weight_ranges
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
    """Token counts of one part of the examples. A percentile is the length of an actual example, not interpolated."""

    mean: float
    percentiles: dict[int, int]


@dataclass(frozen=True)
class ExampleSize:
    """One example: its origin, the tokens of its prompt and of each answer."""

    origin: str
    prompt: int
    answers: dict[str, int]  # by name: "chosen" and "rejected", "good" or "bad", or "answer 1, score 4.5"


@dataclass(frozen=True)
class OverContext:
    """Examples that exceed the model's context length with their longest answer."""

    examples: int
    longest: ExampleSize


@dataclass(frozen=True)
class ExampleText:
    """One example decoded from its tokens, including special tokens."""

    size: ExampleSize
    prompt: str
    answers: dict[str, str]  # by name, as in the size
    comparisons: list[tuple[int, int]]  # better, worse: numbers of answers, counted from 1
    context: dict[str, list[tuple[int, int]]] = field(default_factory=dict)  # parts that are not trained, by name
    weights: dict[str, list[tuple[int, int, float]]] = field(default_factory=dict)  # parts with another weight than 1


@dataclass(frozen=True)
class TableFigures:
    """A table in numbers. `tokens` counts the prompt in each sequence, `tokens_shared` once for all answers."""

    unit: str  # what an example is called: "pair", "list", ...
    examples: int
    answers: int
    comparisons: int
    good: int  # labelled answers
    bad: int
    prompts: int  # different ones
    answers_per_prompt: tuple[int, float, int]  # least, mean and most of a different prompt
    repeated: int  # comparisons or labels that occurred before; for lists, complete lists
    contradicted: int  # comparisons whose reverse occurs, too, and labels whose opposite occurs for the same answer
    lengths: dict[str, Lengths]  # prompt; the parts of _answer_parts; sequence (the longest); example (prompt once)
    tokens: int
    tokens_shared: int
    longest: list[ExampleSize]
    over_context: OverContext | None  # None if all fit
    joinable: int = 0  # examples that data.group_by_prompt would join to an earlier one
    with_context: int = 0  # answers with tokens that are not trained
    answer_tokens: int = 0
    trained_tokens: int = 0  # of the answer tokens


def figures(table: ExampleTable, *, context: int | None = None) -> TableFigures:
    """The figures of a non-empty table, for a model with this context length (None: no limit)."""
    lengths = table.lengths
    tokens = _tokens(table)
    parts = {
        "prompt": lengths.prompt,
        **_answer_parts(table),
        "sequence": np.maximum.reduceat(lengths.sequence, lengths.first_answer),
        "example": tokens,
    }
    labels = table.scores[_is_label(table)]
    _, prompt_N = np.unique(table.question_ids, return_inverse=True)
    per_prompt = np.bincount(prompt_N, lengths.num_answers).astype(np.int64)
    repeated, contradicted = _repeated_and_contradicted(table)
    longest = np.argsort(-tokens, kind="stable")[:NUM_LONGEST]
    return TableFigures(
        unit=table.unit,
        examples=len(table),
        answers=len(lengths.answer),
        comparisons=len(lengths.compared),
        good=int((labels == 1).sum()),
        bad=int((labels == 0).sum()),
        prompts=len(per_prompt),
        answers_per_prompt=(int(per_prompt.min()), float(per_prompt.mean()), int(per_prompt.max())),
        repeated=repeated,
        contradicted=contradicted,
        lengths={name: _lengths(values) for name, values in parts.items()},
        tokens=int(lengths.sequence.sum()),
        tokens_shared=int(tokens.sum()),
        longest=[_size(table, int(index)) for index in longest],
        over_context=None if context is None else _over(table, parts["sequence"], context),
        joinable=_joinable(table),
        with_context=int((lengths.trained < lengths.answer).sum()),
        answer_tokens=int(lengths.answer.sum()),
        trained_tokens=int(lengths.trained.sum()),
    )


def _answer_parts(table: ExampleTable) -> dict[str, IntArray]:
    """Tokens of the answers: of chosen and rejected ones, of good and bad ones, or of all together."""
    lengths = table.lengths
    if table.unit == "pair":
        chosen, rejected = lengths.answer[lengths.sides]
        return {"chosen": chosen, "rejected": rejected}
    if table.holds == {"labels"}:
        both = {"good": lengths.answer[table.scores == 1], "bad": lengths.answer[table.scores == 0]}
        return {name: values for name, values in both.items() if len(values)}
    return {"answer": lengths.answer}


def _is_label(table: ExampleTable) -> NDArray[np.bool_]:
    """Whether each answer has a label and is not compared: A."""
    is_label: NDArray[np.bool_] = table.lengths.num_comparisons[table.lengths.of_answer] == 0
    return is_label


def _repeated_and_contradicted(table: ExampleTable) -> tuple[int, int]:
    """How many judgements repeat an earlier one, and how many are contradicted by their opposite."""
    _, answer_A = np.unique(_as_numbers(table.answer_ids), return_inverse=True)
    better_M, worse_M = answer_A[table.lengths.sides]
    is_label = _is_label(table)
    labelled, is_good = answer_A[is_label], table.scores[is_label] == 1
    most = len(answer_A)
    # A label is treated as a comparison with a fictitious answer, number `most`.
    better = np.concatenate([better_M, np.where(is_good, labelled, most)])
    worse = np.concatenate([worse_M, np.where(is_good, most, labelled)])
    judged, opposite = better * (most + 1) + worse, worse * (most + 1) + better
    different = _as_numbers(table.ids) if "lists" in table.holds else judged
    repeated = len(different) - len(np.unique(different))
    return repeated, int(np.isin(judged, opposite).sum())


def _joinable(table: ExampleTable) -> int:
    """How many examples have the prompt, question and source of an earlier one."""
    keys = (table.prompt_ids, table.question_ids, table.sources)
    order = np.lexsort(keys)  # much faster than np.unique over columns
    same = [key[order[1:]] == key[order[:-1]] for key in keys]
    return int(np.logical_and.reduce(same).sum())


def _as_numbers(ids_N: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """The first eight bytes of each id: enough to count distinct ids, and far faster to sort."""
    numbers: NDArray[np.uint64] = np.ascontiguousarray(ids_N[:, :8]).view(np.uint64).ravel()
    return numbers


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
    answers = {name: len(answer) for name, answer in zip(_names(table, index), example.answers, strict=True)}
    return ExampleSize(table.origin(index), len(example.prompt), answers)


def _names(table: ExampleTable, index: int) -> list[str]:
    """What the answers are called: chosen and rejected, good or bad, or their numbers with their scores or labels."""
    example, holds = table.example(index), table.stats.sources[table.sources[index]].holds
    if example.comparisons == PAIR and example.scores in ((), PAIR_SCORES):
        return list(SIDES)
    known = [""] * len(example.answers)
    if holds == "lists":
        known = [f"score {score:g}" for score in example.scores] or known
    else:
        good, bad = ("good", "bad") if holds == "labels" else SIDES
        known = [good if score == 1 else bad for score in example.scores] or known
    if holds == "labels" and len(known) == 1:
        return known
    return [f"answer {number}" + (f", {what}" if what else "") for number, what in enumerate(known, start=1)]


def _text(table: ExampleTable, index: int, tokenizer: PreTrainedTokenizerBase) -> ExampleText:
    example = table.example(index)
    prompt, *answers = example_text(example, tokenizer)
    comparisons = [(better + 1, worse + 1) for better, worse in example.comparisons]
    names, decode = _names(table, index), decoder(tokenizer)
    weights = {name: weight_ranges(example, number, decode) for number, name in enumerate(names)}
    context = {name: [(start, end) for start, end, weight in some if not weight] for name, some in weights.items()}
    texts = dict(zip(names, answers, strict=True))
    return ExampleText(_size(table, index), prompt, texts, comparisons, context, weights)


def example_text(example: Example, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Prompt and answers as text. An answer is what it adds to the prompt's text, so nothing is lost at the border."""

    decode = decoder(tokenizer)

    def answer(part: IntArray) -> str:
        whole = decode(example.prompt, part)
        # A border inside a character leaves half of it on each side, and neither half is text.
        return whole.removeprefix(prompt) if whole.startswith(prompt) else decode(part)

    prompt = decode(example.prompt)
    return [prompt, *(answer(part) for part in example.answers)]
