"""Content ids: what a pair or a prompt is, whatever file, order or layout it comes in."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from isopref.types import IntArray, PairTokens

ID_BYTES = 16
PROMPT_ID_BYTES = 8


def pair_id(tokens: PairTokens) -> bytes:
    """16 bytes over the tokens of the three parts, each with its length. Nothing else goes in."""
    digest = hashlib.blake2b(digest_size=ID_BYTES)
    for part in tokens:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(_bytes(part))
    return digest.digest()


def prompt_id(prompt: IntArray) -> bytes:
    """8 bytes over the tokens of a prompt, as a model sees it."""
    return hashlib.blake2b(_bytes(prompt), digest_size=PROMPT_ID_BYTES).digest()


def question_id(messages: Sequence[Any], tools: Sequence[Any] | None) -> bytes:
    """8 bytes over what is asked, before any template or tokenizer: the same for every model."""
    text = json.dumps([messages, tools], sort_keys=True, ensure_ascii=False)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=PROMPT_ID_BYTES).digest()


def _bytes(tokens: IntArray) -> bytes:
    return np.ascontiguousarray(tokens, dtype="<i4").tobytes()
