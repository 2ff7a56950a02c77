"""Content ids: digests of an example, an answer or a prompt, independent of its file, order and layout."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from isopref.examples import Example, is_plain_pair
from isopref.types import FloatArray, IntArray

ID_BYTES = 16
PROMPT_ID_BYTES = 8


def example_id(example: Example) -> bytes:
    """16 bytes: digest of the tokens of prompt and answers, their weights, scores and comparisons, and nothing else."""
    weights = [_as_ints(one) for one in example.weights]
    if is_plain_pair(example) and not weights:
        return _id(example.prompt, *example.answers)
    known: list[Any] = [example.comparisons, example.scores]
    if example.score_gaps != example._replace(gaps=()).score_gaps:  # otherwise the gaps follow from the scores
        known.append(example.gaps)
    return _id(example.prompt, *example.answers, np.frombuffer(json.dumps(known).encode(), np.uint8), *weights)


def answer_id(prompt: IntArray, answer: IntArray, weights: FloatArray | None = None) -> bytes:
    """16 bytes: digest of the tokens of an answer, their weights (None: all are 1), and the tokens of its prompt."""
    return _id(prompt, answer) if weights is None else _id(prompt, answer, _as_ints(weights))


def prompt_id(prompt: IntArray) -> bytes:
    """8 bytes: digest of the tokens of a prompt, as a model sees it."""
    return hashlib.blake2b(_bytes(prompt), digest_size=PROMPT_ID_BYTES).digest()


def question_id(messages: Sequence[Any], tools: Sequence[Any] | None) -> bytes:
    """8 bytes: digest of a prompt before any template or tokenizer, so it is the same for every model."""
    text = json.dumps([messages, tools], sort_keys=True, ensure_ascii=False)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=PROMPT_ID_BYTES).digest()


def _id(*parts: IntArray) -> bytes:
    """A digest of some parts, each with its length."""
    digest = hashlib.blake2b(digest_size=ID_BYTES)
    for part in parts:
        digest.update(part.size.to_bytes(8, "little"))
        digest.update(_bytes(part))
    return digest.digest()


def _as_ints(weights: FloatArray) -> IntArray:
    """The bits of float64 weights, as two int32 each."""
    return np.ascontiguousarray(weights, dtype="<f8").view("<i4")


def _bytes(tokens: IntArray) -> bytes:
    return np.ascontiguousarray(tokens, dtype="<i4").tobytes()
