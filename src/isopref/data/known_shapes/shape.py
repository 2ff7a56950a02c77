"""What a shape is, and what several of them need."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from isopref.data.columns import OPTIONAL, SIDES
from isopref.data.messages import Turns, kind

Fields = dict[str, Any]
Parts = tuple[Turns, Turns, Turns]  # prompt, chosen, rejected


class Ranked(NamedTuple):
    """A prompt and its answers, all different, with their scores."""

    prompt: Turns
    answers: tuple[Turns, ...]
    scores: tuple[float, ...]
    left_out: Counter[str]  # answers of the record that are not among them, by reason


@dataclass(frozen=True)
class Shape(ABC):
    """One form of record. `written` are the columns of a source whose messages are written as text, as in CSV."""

    name: ClassVar[str]
    looks: ClassVar[str]  # for errors
    columns: ClassVar[tuple[str, ...]]  # that it reads, besides OPTIONAL
    prompt_from: ClassVar[str]  # what is taken to be the prompt
    has_raw: ClassVar[bool] = False  # whether it can be read without a chat template
    has_template: ClassVar[bool] = True  # whether it can be written with one
    is_list: ClassVar[bool] = False  # whether records hold lists of answers, not pairs
    is_guess: ClassVar[bool] = False  # nothing proves where the prompt ends: only where no other shape fits a source

    written: frozenset[str] = frozenset()

    @property
    def unit(self) -> str:
        """What records are."""
        return "lists" if self.is_list else "pairs"

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

    def read_list(self, fields: Fields) -> Ranked | None:
        """The parts of a record that holds a list of answers; None for a shape of pairs. Raises DefectError."""
        return None

    def objection(self, fields: Fields) -> str | None:
        """What is wrong with a source most of whose records are like this one, and the way out; None: nothing."""
        return None


class Kinds(NamedTuple):
    """What the columns that tell shapes apart hold; sides is "" where chosen and rejected differ."""

    prompt: str = "absent"
    conversations: str = "absent"
    sides: str = "absent"


def kinds_of(fields: Fields) -> Kinds:
    prompt, conversations, chosen, rejected = (kind(fields.get(key)) for key in ("prompt", "conversations", *SIDES))
    return Kinds(prompt, conversations, chosen if chosen == rejected else "")


def begins_whole(side: list[dict[str, Any]]) -> bool:
    """Whether a side begins as a conversation does: with a turn of the system or a user."""
    return bool(side) and side[0].get("role", side[0].get("from")) in ("system", "developer", "user", "human")


def is_long(side: Any) -> bool:
    """Whether a side holds several turns."""
    return isinstance(side, list) and len(side) > 1
