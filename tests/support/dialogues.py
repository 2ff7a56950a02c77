"""Answers of several turns: messages, and what is trained of them under a family's template."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from isopref.data.chat import EncodedPair, PairEncoder, TokenizeOptions
from isopref.data.judged import BadPairError, Preference
from isopref.data.shapes import detect_shape, to_pair
from isopref.data.sources import Record
from isopref.examples import Example
from support.families import FAMILIES


def turn(role: str, content: str = "", **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


Q, AGAIN = turn("user", "why?"), turn("user", "and then?")
GOOD, BAD, NEXT = turn("assistant", "because"), turn("assistant", "no"), turn("assistant", "done")
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
ADD = turn("assistant", tool_calls=[CALL])
RESULT = turn("tool", "it is 4")
TOOLS = json.dumps([{"name": "add", "description": "adds", "parameters": {"type": "object", "properties": {}}}])


def read(**fields: Any) -> Preference:
    record = Record(fields, "file:7")
    return to_pair(record, detect_shape([record], raw=False), raw=False)


def encode(pair: Preference, family: str = "qwen2.5", train_on: Any = "assistant") -> EncodedPair | BadPairError:
    tokenizer = FAMILIES[family].tokenizer()
    options = TokenizeOptions(template=None, max_length=None, truncation="drop", on_bad="error", train_on=train_on)
    (result,) = PairEncoder(tokenizer, options).encode([pair])
    assert result is not None
    return result


def shown(example: Example, number: int, family: str = "qwen2.5") -> str:
    """An answer with what is trained in brackets, and their weights where they are not 1."""
    tokenizer, answer = FAMILIES[family].tokenizer(), example.answers[number]
    weights = example.weights[number] if example.weights else np.ones(len(answer))
    borders = np.flatnonzero(np.diff(weights)) + 1
    text = ""
    for piece, own in zip(np.split(answer, borders), np.split(weights, borders), strict=True):
        said = tokenizer.decode(piece, skip_special_tokens=False)
        text += said if own[0] == 0 else f"[{said}]" if own[0] == 1 else f"[{own[0]:g}: {said}]"
    return text


def answers(family: str = "qwen2.5", train_on: Any = "assistant", **fields: Any) -> list[str]:
    result = encode(read(**fields), family, train_on)
    assert isinstance(result, EncodedPair), result
    return [shown(result.tokens, number, family) for number in range(len(result.tokens.answers))]
