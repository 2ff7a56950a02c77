"""Which pairs of a table are used: the mix of several sources, and the split into training and evaluation.

Pure functions of contents and a seed. schedule.py decides the order of training.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from isopref.data.sources import SourceSpec
from isopref.data.table import ExampleTable
from isopref.errors import ConfigError, DataError
from isopref.types import IntArray


def mix(num_pairs: Sequence[int], specs: Sequence[SourceSpec], seed: int, *, why_few: str = "") -> IntArray:
    """Indices, ascending, into a table of `num_pairs[s]` pairs of each source, one source after another.

    A source with `count` contributes that many pairs; with `weight` (all sources or none), its share of the largest
    mix that repeats no pair; with neither, everything. The pairs with the lowest hashes (with the seed) are taken, so a
    larger share contains a smaller one. Raises ConfigError; `why_few` is appended to messages about too few pairs.
    """
    counts = _counts(num_pairs, specs, why_few)
    picked = []
    start = 0
    for source, (size, count) in enumerate(zip(num_pairs, counts, strict=True)):
        order = np.argsort(_hash(np.arange(size, dtype=np.uint64), seed=seed, stream=source), kind="stable")
        picked.append(start + np.sort(order[:count]))
        start += size
    return np.concatenate(picked) if picked else np.empty(0, np.int64)


def split_by_prompt(table: ExampleTable, fraction: float, seed: int) -> tuple[IntArray, IntArray]:
    """Indices of the pairs to train on and to evaluate on (about `fraction` of the prompts), each ascending.

    A hash of the prompt before templating decides, independently of the other pairs, their order and the model: all
    pairs with the same prompt are on one side, and stay there when data is added. Raises ConfigError, and DataError if
    a side is empty.
    """
    if not 0 <= fraction < 1:
        raise ConfigError(f"data.eval: {fraction} is the share of prompts to hold out. Use at least 0 and less than 1.")
    held_out = _hash(table.question_ids, seed=seed, stream=0) < np.uint64(int(fraction * 2**64))
    # Two prompts can become one when truncated. Then both are trained on, with all other pairs that have either prompt.
    before = -1
    while before != (before := int(held_out.sum())):
        for ids in (table.prompt_ids, table.question_ids):
            held_out &= ~np.isin(ids, ids[~held_out])
    train, held = np.flatnonzero(~held_out), np.flatnonzero(held_out)
    if fraction and not (len(train) and len(held)):
        raise DataError(
            f"Holding out {fraction} of {len(table)} pairs leaves {len(train)} to train on and {len(held)} to "
            "evaluate on. Use more pairs, another share, or a separate source for evaluation."
            f"{table.stats.dropped_note}"
        )
    return train, held


def without(table: ExampleTable, held_out: ExampleTable) -> IntArray:
    """Indices, ascending, of the pairs of `table` whose prompt is not held out, before templating or as tokens."""
    asked = np.isin(table.question_ids, held_out.question_ids)
    return np.flatnonzero(~(asked | np.isin(table.prompt_ids, held_out.prompt_ids)))


def _counts(num_pairs: Sequence[int], specs: Sequence[SourceSpec], why_few: str) -> list[int]:
    for spec, size in zip(specs, num_pairs, strict=True):
        where = f"The source '{spec.path}'"
        if spec.weight is not None and spec.count is not None:
            raise ConfigError(f"{where}: both weight and count are set. Keep one of them.")
        if spec.count is not None and not 0 < spec.count <= size:
            raise ConfigError(
                f"{where}: count must be 1 to {size}, the number of its pairs; found {spec.count}. Pairs are not "
                f"repeated.{why_few}"
            )
        if spec.weight is not None and not 0 < spec.weight < np.inf:
            raise ConfigError(f"{where}: weight must be a positive number; found {spec.weight}.")
    # Decimal fractions, as in the config: in floats, 0.3 is not three times 0.1.
    weights = [Fraction(str(spec.weight)) for spec in specs if spec.weight is not None]
    if not weights:
        return [size if spec.count is None else spec.count for spec, size in zip(specs, num_pairs, strict=True)]
    if len(weights) < len(specs):
        raise ConfigError("Some sources have a weight and some have none. Set one for all of them, or for none.")
    scale = min(int(size) / weight for size, weight in zip(num_pairs, weights, strict=True))
    counts = [int(weight * scale) for weight in weights]
    for spec, count in zip(specs, counts, strict=True):
        if count == 0:
            raise ConfigError(f"The source '{spec.path}': weight {spec.weight} selects no pair. Raise it.{why_few}")
    return counts


def _hash(values: NDArray[np.uint64], *, seed: int, stream: int) -> NDArray[np.uint64]:
    """SplitMix64 of each value. Ours, because numpy may change its random streams between versions."""
    with np.errstate(over="ignore"):
        mixed = _finalize(_finalize(np.array([seed % 2**64], np.uint64)) + np.uint64(stream))
        return _finalize(_finalize(values) ^ mixed)


def _finalize(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
