"""The shapes that preference data comes in. Each is one class: what it looks like, when it fits, how it is read.

To add a shape, write its class and list it in SHAPES. At most one fits a record, so their order does not matter.
Which shape a source has, and what is refused, is decided in shapes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from isopref.data.columns import OPTIONAL, SIDES, column_like, quoted
from isopref.data.messages import (
    HH_TURN,
    DefectError,
    Message,
    Turns,
    is_transcript,
    kind,
    read_answer,
    read_history,
    read_messages,
    read_prompt,
    read_text,
    read_transcript,
)

Fields = dict[str, Any]
Parts = tuple[Turns, Turns, Turns]  # prompt, chosen, rejected


@dataclass(frozen=True)
class Shape(ABC):
    """One form of record. `written` are the columns of a source whose messages are written as text, as in CSV."""

    name: ClassVar[str]
    looks: ClassVar[str]  # for errors
    columns: ClassVar[tuple[str, ...]]  # that it reads, besides OPTIONAL
    has_raw: ClassVar[bool] = False  # whether it can be read without a chat template

    written: frozenset[str] = frozenset()

    @property
    def reads(self) -> frozenset[str]:
        """Every column that is read of a record."""
        return frozenset((*self.columns, *OPTIONAL))

    @abstractmethod
    def fits(self, fields: Fields) -> bool:
        """Whether a record has this shape, by the kinds of its columns."""

    @abstractmethod
    def split(self, fields: Fields) -> Parts:
        """The parts of a record that fits. Raises DefectError."""

    def split_raw(self, fields: Fields) -> Parts:
        """The parts as text, where there is no chat template."""
        assert self.has_raw
        return self.split(fields)

    def objection(self, fields: Fields) -> str | None:
        """What is wrong with a source most of whose records are like this one, and the way out; None: nothing."""
        return None


class _Kinds(NamedTuple):
    """What the columns that tell shapes apart hold; sides is "" where chosen and rejected differ."""

    prompt: str = "absent"
    conversations: str = "absent"
    sides: str = "absent"


def _kinds(fields: Fields) -> _Kinds:
    prompt, conversations, chosen, rejected = (kind(fields.get(key)) for key in ("prompt", "conversations", *SIDES))
    return _Kinds(prompt, conversations, chosen if chosen == rejected else "")


class Text(Shape):
    name = "text"
    looks = "prompt, chosen, rejected: text"
    columns = ("prompt", *SIDES)
    has_raw = True

    def fits(self, fields: Fields) -> bool:
        return _kinds(fields) == _Kinds(prompt="text", sides="text") and not is_transcript(fields["prompt"])

    def split(self, fields: Fields) -> Parts:
        prompt, chosen, rejected = (read_text(fields[key], key) for key in self.columns)
        return prompt, chosen, rejected


class Alpaca(Shape):
    """Records of the Alpaca kind, joined as LLaMA-Factory does: the parts that are not empty, one line each."""

    name = "alpaca"
    looks = "instruction, chosen, rejected: text; input: text or empty; history: [user, assistant] turns or empty"
    columns = ("instruction", "input", "history", *SIDES)
    has_raw = True

    def fits(self, fields: Fields) -> bool:
        is_alpaca = _kinds(fields) == _Kinds(sides="text") and kind(fields.get("instruction")) == "text"
        return is_alpaca and not HH().fits(fields)

    def split(self, fields: Fields) -> Parts:
        parts = [read_text(fields[key], key) for key in ("instruction", "input") if fields.get(key)]
        chosen, rejected = (read_text(fields[key], key) for key in SIDES)
        prompt = "\n".join(parts)
        history = read_history(fields.get("history"))
        if not history:
            return prompt, chosen, rejected
        return [*history, {"role": "user", "content": prompt}], chosen, rejected


class Messages(Shape):
    name = "messages"
    looks = "prompt: messages or text; chosen, rejected: one assistant turn"
    columns = ("prompt", *SIDES)

    def fits(self, fields: Fields) -> bool:
        kinds = _kinds(fields)
        if kinds == _Kinds(prompt="text", sides="messages"):
            return not _is_long(fields["chosen"])
        return kinds in (_Kinds(prompt="messages", sides="messages"), _Kinds(prompt="messages", sides="text"))

    def split(self, fields: Fields) -> Parts:
        prompt = fields["prompt"]
        prompt = read_text(prompt, "prompt") if isinstance(prompt, str) else read_prompt(prompt, "prompt")
        chosen, rejected = (
            read_text(fields[key], key) if isinstance(fields[key], str) else read_answer(fields[key], key)
            for key in SIDES
        )
        return prompt, chosen, rejected

    def objection(self, fields: Fields) -> str | None:
        return _whole_beside("prompt", fields)


class ShareGPT(Shape):
    name = "sharegpt"
    looks = "conversations, chosen, rejected: turns with from and value"
    columns = ("conversations", *SIDES)

    def fits(self, fields: Fields) -> bool:
        return _kinds(fields) == _Kinds(conversations="messages", sides="messages")

    def split(self, fields: Fields) -> Parts:
        chosen, rejected = (read_answer(fields[key], key) for key in SIDES)
        return read_prompt(fields["conversations"], "conversations"), chosen, rejected

    def objection(self, fields: Fields) -> str | None:
        return _whole_beside("conversations", fields)


class Conversations(Shape):
    name = "conversations"
    looks = "chosen, rejected: conversations, the same but for the end"
    columns = SIDES

    def fits(self, fields: Fields) -> bool:
        return _kinds(fields) == _Kinds(sides="messages")

    def split(self, fields: Fields) -> Parts:
        return _split_conversations(fields)


class UltraFeedback(Shape):
    name = "ultrafeedback"
    looks = "prompt: text; chosen, rejected: conversations with it"
    columns = ("prompt", *SIDES)

    def fits(self, fields: Fields) -> bool:
        return _kinds(fields) == _Kinds(prompt="text", sides="messages") and _is_long(fields["chosen"])

    def split(self, fields: Fields) -> Parts:
        asked = read_text(fields["prompt"], "prompt")
        users = [turn for turn in read_messages(fields["chosen"], "chosen") if turn["role"] == "user"]
        if not users or users[0]["content"] != asked:
            raise DefectError("shape", "'prompt' is not the first user turn of 'chosen', as this shape has it")
        return _split_conversations(fields)


class HH(Shape):
    """Anthropic's HH data. Some sets have the prompt apart, and of those some repeat it in each side."""

    name = "hh"
    looks = r"chosen, rejected: text, '\n\nHuman: ... \n\nAssistant: ...'"
    columns = ("prompt", *SIDES)
    has_raw = True

    def fits(self, fields: Fields) -> bool:
        kinds = _kinds(fields)
        if kinds == _Kinds(prompt="text", sides="text"):
            return is_transcript(fields["prompt"])
        return kinds == _Kinds(sides="text") and all(is_transcript(fields[key]) for key in SIDES)

    def split(self, fields: Fields) -> Parts:
        chosen, rejected = (read_transcript(self._text(fields, key)) for key in SIDES)
        return _split_whole(chosen, rejected)

    def split_raw(self, fields: Fields) -> Parts:
        """As in the DPO authors' code: the prompt is all up to the last "Assistant:", as it stands."""
        texts = [self._text(fields, key) for key in SIDES]
        chosen, rejected = ([*HH_TURN.finditer(text)][-1] for text in texts)
        if texts[0][: chosen.end()] != texts[1][: rejected.end()]:
            raise DefectError("diverging", "'chosen' and 'rejected' differ before their last answer")
        if chosen[1] != "Assistant":
            raise DefectError("role", "the last turn is not the assistant's")
        return texts[0][: chosen.end()], texts[0][chosen.end() :], texts[1][rejected.end() :]

    @staticmethod
    def _text(fields: Fields, key: str) -> str:
        """A whole transcript."""
        text = read_text(fields[key], key)
        return text if is_transcript(text) else read_text(fields["prompt"], "prompt") + text


SHAPES: dict[str, Shape] = {
    shape.name: shape for shape in (Text(), Alpaca(), Messages(), Conversations(), UltraFeedback(), ShareGPT(), HH())
}


def _split_conversations(fields: Fields) -> Parts:
    chosen, rejected = (read_messages(fields[key], key) for key in SIDES)
    if len(chosen) == 1 and (asked := column_like("prompt", fields)):
        columns = f"data.columns={{prompt: {quoted(asked)}}}"
        raise DefectError("empty", f"there is no prompt in 'chosen', and '{asked}' is not read ({columns} reads it)")
    return _split_whole(chosen, rejected)


def _split_whole(chosen: list[Message], rejected: list[Message]) -> Parts:
    """Two whole conversations: what comes before the last turn is the prompt, and must be the same."""
    if chosen[:-1] != rejected[:-1]:
        raise DefectError("diverging", "'chosen' and 'rejected' differ before their last answer")
    return (
        read_prompt(chosen[:-1], "chosen"),
        read_answer(chosen[-1:], "chosen"),
        read_answer(rejected[-1:], "rejected"),
    )


def _is_long(side: Any) -> bool:
    """Whether a side holds several turns."""
    return isinstance(side, list) and len(side) > 1


def _whole_beside(column: str, fields: Fields) -> str | None:
    """An objection to answers of several turns beside a prompt: none of them makes a pair."""
    if not all(_is_long(fields[side]) for side in SIDES):
        return None
    return (
        f"'chosen' and 'rejected' hold several turns beside the column '{column}', where one assistant turn each is "
        f"expected. If they are whole conversations, remove the column '{column}' from the data; else keep only the "
        "last turn of each."
    )
