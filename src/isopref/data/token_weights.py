"""Weights of tokens as runs of equal ones, which is how a table keeps them: a conversation has one for each turn.

A: answers of an example, R: runs of equal weights over all their tokens, one answer after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from isopref.examples import Example
from isopref.types import FloatArray, IntArray


class Runs(NamedTuple):
    """Weights of the tokens of an example's answers. None at all: every token has a weight of one."""

    lengths: IntArray  # R
    weights: FloatArray  # R


def to_runs(example: Example) -> Runs:
    """Raises ValueError if a part has no tokens, an answer none that is trained, or weights are not those of tokens."""
    flat = np.concatenate([np.ones(0), *example.weights])
    if 0 in map(len, example.parts):
        raise ValueError("a prompt and each of its answers need at least one token")
    if (flat == 1).all():
        return Runs(np.zeros(0, np.int32), np.zeros(0))
    if [len(one) for one in example.weights] != [len(one) for one in example.answers]:
        raise ValueError("every token of every answer needs a weight, or none at all has one")
    if not (np.isfinite(flat) & (flat >= 0)).all():
        raise ValueError("weights of tokens must be finite and not negative")
    if 0 in example.trained:
        raise ValueError("an answer needs at least one token with a weight above 0")
    starts = np.flatnonzero(np.append(True, flat[1:] != flat[:-1]))
    return Runs(np.diff(np.append(starts, len(flat))).astype(np.int32), flat[starts])


def from_runs(runs: Runs, answer_tokens: IntArray | Sequence[int]) -> tuple[FloatArray, ...]:
    """The weights of each answer."""
    if not len(runs.lengths):
        return ()
    return tuple(np.split(np.repeat(runs.weights, runs.lengths), np.cumsum(answer_tokens)[:-1]))
