"""Token weights, run-length encoded: a conversation has one run of equal weights per turn. Tables store them so.

R: runs of equal weights over the tokens of all answers of an example, one answer after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from isopref.examples import Example
from isopref.types import FloatArray, IntArray


class Runs(NamedTuple):
    """Weights of the tokens of an example's answers. Without runs, every token has a weight of 1."""

    lengths: IntArray  # R
    weights: FloatArray  # R


def to_runs(example: Example) -> Runs:
    """The runs of an example's weights.

    Raises ValueError for wrong weights, a part without tokens, or an answer without trained tokens.
    """
    flat = np.concatenate([np.ones(0), *example.weights])
    if 0 in map(len, example.parts):
        raise ValueError("a prompt and each of its answers need at least one token")
    if (flat == 1).all():
        return Runs(np.zeros(0, np.int32), np.zeros(0))
    if [len(one) for one in example.weights] != [len(one) for one in example.answers]:
        raise ValueError("either every token of every answer has a weight, or none has one")
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
