"""Groups records with the same prompt into one example: builds one table from another.

The example of several pairs has their distinct answers, and one comparison for each pair; that of several labelled
answers has all of them, each with its label. No judgement is changed or dropped: repeated and contradictory ones still
count (statistics.py reports both). Lists stay as they are.

Records belong together if they have the same source and the same prompt, both as asked and as tokens. Sources are mixed
by weight and evaluated separately, so an example never spans two; and a prompt truncated in two ways is two prompts to
the model. Records of one prompt must have the same weight, because an example has only one.

Only the small columns of the table are in memory: tokens are read from the mapped file and written chunk by chunk.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np

from isopref.data.judged import BadPairError
from isopref.data.table import ExampleTable
from isopref.data.table_file import TableRow, TableWriter, record_batch
from isopref.data.table_stats import TableStats
from isopref.examples import Example
from isopref.types import FloatArray, IntArray

VERSION = 2  # raise it when the same table would give a different result


def write_grouped(table: ExampleTable, sink: Any, *, drop_bad: bool, chunk_examples: int) -> None:
    """Write the table with one example per prompt, at the position of its first record.

    A record whose weight differs from that of its prompt's first record raises BadPairError, or is dropped and counted.
    """
    writer = TableWriter(sink)
    kept: Counter[int] = Counter()
    dropped: Counter[int] = Counter()
    for source, groups in groupby(prompt_groups(table), key=lambda group: int(table.sources[group[0]])):
        for chunk in _chunks(groups, chunk_examples):
            rows = []
            for group in chunk:
                same = _with_one_weight(table, group, drop_bad)
                dropped[source] += len(group) - len(same)
                rows.append(_row(table, same))
            writer.write(record_batch(rows, source))
            kept[source] += len(rows)
    sources = []
    for index, found in enumerate(table.stats.sources):
        reasons = Counter(found.dropped) + Counter(weight=dropped[index])
        grouped = found.kept - kept[index] - dropped[index]
        sources.append(replace(found, kept=kept[index], grouped=grouped, dropped=dict(reasons)))
    writer.close(TableStats(tuple(sources)))


def prompt_groups(table: ExampleTable) -> Iterator[IntArray]:
    """The records of each prompt, in order: indices into the table. Prompts come in the order of their first record."""
    index = np.arange(len(table))
    is_list = np.array([source.holds == "lists" for source in table.stats.sources])[table.sources]
    alone = np.where(is_list, index, -1)
    keys = (alone, table.prompt_ids, table.question_ids, table.sources)
    order = np.lexsort((index, *keys))
    is_first = np.ones(len(table), np.bool_)
    is_first[1:] = np.any([key[order[1:]] != key[order[:-1]] for key in keys], axis=0)
    starts = np.flatnonzero(is_first)
    ends = np.append(starts[1:], len(table))
    for number in np.argsort(order[starts]):
        yield order[starts[number] : ends[number]]


def merged(examples: Sequence[Example]) -> Example:
    """Merge the examples of one prompt: pairs, or labelled answers."""
    if len(examples) == 1:
        return examples[0]
    if any(one.comparisons for one in examples):
        return _merged_pairs(examples)
    answers = tuple(answer for one in examples for answer in one.answers)
    scores = tuple(score for one in examples for score in one.scores)
    weights = [weights for one in examples for weights in one.token_weights]
    return Example(examples[0].prompt, answers, (), scores, weights=_unless_ones(weights))


def _merged_pairs(pairs: Sequence[Example]) -> Example:
    """The scores are 1 for chosen and 0 for rejected answers; there are none if any answer is both.

    Each comparison keeps the score gap of its record, NaN if it has none.
    """
    answers: dict[bytes, tuple[IntArray, FloatArray]] = {}
    compared: list[tuple[bytes, bytes]] = []
    for pair in pairs:
        both = list(zip(pair.answers, pair.token_weights, strict=True))
        chosen, rejected = (answer.tobytes() + weights.tobytes() for answer, weights in both)
        compared.append((chosen, rejected))
        for key, answer in zip((chosen, rejected), both, strict=True):
            answers.setdefault(key, answer)
    numbers = {key: number for number, key in enumerate(answers)}
    comparisons = tuple((numbers[chosen], numbers[rejected]) for chosen, rejected in compared)
    better, worse = ({pair[side] for pair in comparisons} for side in (0, 1))
    scores = () if better & worse else tuple(float(number in better) for number in range(len(answers)))
    gaps = tuple(gap for pair in pairs for gap in pair.score_gaps or (math.nan,))
    tokens, weights = zip(*answers.values(), strict=True)
    return Example(pairs[0].prompt, tokens, comparisons, scores, gaps, _unless_ones(weights))


def _unless_ones(weights: Sequence[FloatArray]) -> tuple[FloatArray, ...]:
    """The token weights of some answers; empty if all are 1, as in `Example.weights`."""
    return () if all((one == 1).all() for one in weights) else tuple(weights)


def _with_one_weight(table: ExampleTable, group: IntArray, drop_bad: bool) -> IntArray:
    """The records with the same weight as the first one."""
    weights = table.weights[group]
    same: IntArray = group[weights == weights[0]]
    if len(same) < len(group) and not drop_bad:
        other = int((weights != weights[0]).argmax())
        raise BadPairError(
            table.origin(int(group[other])),
            "weight",
            f"'weight' is {weights[other]:g}, but {weights[0]:g} in {table.origin(int(group[0]))}, which has the same "
            "prompt. With data.group_by_prompt they become one example, which has one weight: set the same in both",
        )
    return same


def _row(table: ExampleTable, group: IntArray) -> TableRow:
    first = int(group[0])
    example = merged([table.example(int(index)) for index in group])
    more = f" and {len(group) - 1} more" if len(group) > 1 else ""
    question = int(table.question_ids[first]).to_bytes(8, "little")
    subsets = {table.subset(int(index)) for index in group}
    subset = subsets.pop() if len(subsets) == 1 else None  # records of two subsets belong to neither
    return TableRow(example, float(table.weights[first]), question, f"{table.place(first)}{more}", subset)


def _chunks(groups: Iterator[IntArray], size: int) -> Iterator[list[IntArray]]:
    chunk: list[IntArray] = []
    for group in groups:
        chunk.append(group)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk
