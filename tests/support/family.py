"""A model family: its chat template, and a second description, in Python, of what it writes of an assistant turn."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from isopref.examples import Example
from isopref.testing.tokenizers import tiny_tokenizer

Message = dict[str, Any]
THINK = ("<think>", "</think>")


class Place(NamedTuple):
    """Where a turn is in its conversation."""

    last: bool = True
    kept: bool = True  # whether the template writes reasoning there
    kwargs: Mapping[str, Any] = {}  # of the template


def always(messages: Sequence[Message], index: int) -> bool:
    return True


def never(messages: Sequence[Message], index: int) -> bool:
    return False


def after_the_last_question(messages: Sequence[Message], index: int) -> bool:
    return all(one["role"] != "user" for one in messages[index:])


@dataclass(frozen=True)
class Family:
    """A template with its special tokens, and its assistant turns: `thought` and `said` follow the role's header.

    `said` writes a turn's text, its calls and the token that the model stops at.
    """

    template: str
    special: tuple[str, ...]
    eos: str
    said: Callable[[Message], str]
    thought: Callable[[Message, Place], str] = lambda message, place: ""
    asks: Callable[[dict[str, Any]], str] = lambda kwargs: ""  # what a generation prompt has after the role's header
    call: Callable[[Message], str] | None = None  # the calls of a turn without text; None: all that `said` writes
    stops: tuple[str, ...] = ()
    kwargs: tuple[dict[str, Any], ...] = ({},)
    system: bool = True
    tools: bool = True
    many_calls: bool = True
    text_with_calls: bool = True
    thinks: bool = False  # in `reasoning_content`
    inline: Literal["", "parsed", "raw"] = ""  # how <think> in `content` is written: as reasoning, or as it stands
    keeps: Callable[[Sequence[Message], int], bool] = always  # whether the template writes the reasoning of a turn
    has_block: bool = False  # whether it writes an empty block of reasoning where there is none
    proves: Callable[[Sequence[Message], int], bool] = (
        always  # whether the end of a turn is the same as if it were last
    )
    moves_tools: bool = False  # to the last question

    def tokenizer(self) -> Any:
        tokenizer = tiny_tokenizer(None)
        tokenizer.add_special_tokens({"additional_special_tokens": list(self.special), "eos_token": self.eos})
        tokenizer.chat_template = self.template
        return tokenizer

    def turn(self, messages: Sequence[Message], index: int, kwargs: dict[str, Any]) -> str:
        """What is trained of an assistant turn: all that the model was not given."""
        message = self._parsed(messages[index])
        place = Place(index == len(messages) - 1, self.keeps(messages, index), kwargs)
        return _without_start(self.thought(message, place) + self.said(message), self.asks(kwargs))

    def final(self, message: Message) -> str:
        """What the last turn says after its reasoning."""
        said = self.said(self._parsed(message))
        thought, _, text = message["content"].rpartition("</think>")
        text = text.lstrip("\n")
        if not text:
            return said.lstrip("\n") if self.call is None else self.call(message)
        return said[said.index(text, len(thought) if self.inline == "raw" else 0) :]

    def refuses(self, messages: Sequence[Message], trained: Sequence[int], *, tools: bool) -> bool:
        """Whether some of these turns cannot be trained, as the template rewrites what was read or written."""
        spoken = [n for n, one in enumerate(messages) if one["role"] == "assistant"]
        written = [n for n in spoken if self.has_block or _reasons(self._parsed(messages[n]))]
        cut = {n for n in written if not self.keeps(messages, n)}
        if any(n in cut and _reasons(self._parsed(messages[n])) for n in trained):
            return True
        if any(n - 1 in spoken and not self.proves(messages, n - 1) for n in trained):
            return True  # the turn before it ends in another way when the model is asked for this one
        if len(trained) == 1:
            return False  # it is the last one, and follows what the model was given
        asked = {n: {m for m in written if m < n and not self.keeps(messages[:n], m)} for n in trained}
        if any({m for m in cut if m < n} != asked[n] for n in trained):
            return True
        inner = [n for n in trained if n < len(messages) - 1]
        moved = self.moves_tools and tools and any(one["role"] == "user" for one in messages[trained[0] :])
        return moved or not all(self.proves(messages, n) for n in inner)

    def _parsed(self, message: Message) -> Message:
        """A message with the reasoning in its text as the template reads it."""
        thought, end, text = message["content"].rpartition("</think>")
        if self.inline != "parsed" or not end:
            return message
        why = thought.removeprefix("<think>").strip("\n")
        return {**message, "content": text.lstrip("\n"), "reasoning_content": why}


def _reasons(message: Message) -> bool:
    return bool(message.get("reasoning_content"))


def _without_start(text: str, start: str) -> str:
    """A text without what it has in common with a start, in whole tags."""
    pieces, others = (re.findall(r"<[^<>\s]+>|.", one, re.DOTALL) for one in (text, start))
    shared = 0
    while shared < min(len(pieces), len(others)) and pieces[shared] == others[shared]:
        shared += 1
    return "".join(pieces[shared:])


def trained_texts(example: Example, number: int, tokenizer: Any) -> list[str]:
    """The stretches of an answer that are trained, decoded."""
    return [text for text, _ in weighted_texts(example, number, tokenizer)]


def weighted_texts(example: Example, number: int, tokenizer: Any) -> list[tuple[str, float]]:
    """The same, with their weights."""
    answer = example.answers[number]
    weights = example.weights[number] if example.weights else np.ones(len(answer))
    borders = np.flatnonzero(np.diff(weights)) + 1
    pieces = zip(np.split(answer, borders), np.split(weights, borders), strict=True)
    return [(tokenizer.decode(one, skip_special_tokens=False), float(own[0])) for one, own in pieces if own[0] != 0]


def dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def calls_of(message: Message) -> list[dict[str, Any]]:
    return [call["function"] for call in message.get("tool_calls", [])]


def bare(function: dict[str, Any], arguments: str = "arguments") -> str:
    return f'{{"name": "{function["name"]}", "{arguments}": {dumped(function["arguments"])}}}'


def as_text(value: Any) -> str:
    """A value of an argument: text as it stands, all else as JSON."""
    return value if isinstance(value, str) else dumped(value)
