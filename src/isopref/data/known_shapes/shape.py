"""What a shape is, and what several of them need."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from isopref.data.columns import GAPS, OPTIONAL, SIDES
from isopref.data.messages import Turns, kind
from isopref.types import Kind

Fields = dict[str, Any]
Parts = tuple[Turns, Turns, Turns]  # prompt, chosen, rejected


class Ranked(NamedTuple):
    """A prompt and its answers, all different, with their scores."""

    prompt: Turns
    answers: tuple[Turns, ...]
    scores: tuple[float, ...]
    left_out: Counter[str]  # counts of the record's answers that were left out, by reason


class Labelled(NamedTuple):
    """A prompt and one answer, which is good or bad."""

    prompt: Turns
    answer: Turns
    is_good: bool


@dataclass(frozen=True)
class Shape(ABC):
    """One form of record. `written`: the columns of a source that hold messages written as text, as in CSV."""

    name: ClassVar[str]
    looks: ClassVar[str]  # a description, for errors
    columns: ClassVar[tuple[str, ...]]  # the columns that it reads, besides OPTIONAL
    prompt_from: ClassVar[str]  # what is taken to be the prompt
    has_raw: ClassVar[bool] = False  # whether it can be read without a chat template
    has_template: ClassVar[bool] = True  # whether a chat template can be applied to it
    holds: ClassVar[Kind] = "pairs"  # what a record holds
    is_guess: ClassVar[bool] = False  # the end of the prompt is guessed, so only if no other shape fits a source

    written: frozenset[str] = frozenset()

    @property
    def reads(self) -> frozenset[str]:
        """Every column of a record that may be read."""
        return frozenset((*self.columns, *OPTIONAL, *(GAPS if self.holds == "pairs" else ())))

    def used(self, fields: Fields) -> frozenset[str]:
        """The columns that are read from this record, which fits: some shapes read only the first of several."""
        return self.reads

    @abstractmethod
    def fits(self, fields: Fields) -> bool:
        """Whether a record has this shape, by the kinds of its columns."""

    def split(self, fields: Fields) -> Parts:
        """The parts of a pair that fits. Raises DefectError."""
        raise AssertionError(f"a record of shape '{self.name}' is not a pair")

    def split_raw(self, fields: Fields) -> Parts:
        """The parts as text, for use without a chat template."""
        assert self.has_raw
        return self.split(fields)

    def read_list(self, fields: Fields) -> Ranked | None:
        """The parts of a record that holds a list of answers; None for a shape of another kind. Raises DefectError."""
        return None

    def read_label(self, fields: Fields) -> Labelled | None:
        """The parts of a record with one labelled answer; None for a shape of another kind. Raises DefectError."""
        return None

    def lacks(self, fields: Fields) -> str | None:
        """A column that every record of this shape must have and this one lacks; None if there is none."""
        return next((side for side in SIDES if side in self.columns and fields.get(side) is None), None)

    def objection(self, fields: Fields) -> str | None:
        """What is wrong with a source if most of its records are like this one, and the way out; None: nothing."""
        return None


class Kinds(NamedTuple):
    """What the columns hold that tell shapes apart (see messages.kind); `sides` is "" if chosen and rejected differ."""

    prompt: str = "absent"
    conversations: str = "absent"
    sides: str = "absent"


def kinds_of(fields: Fields) -> Kinds:
    prompt, conversations, chosen, rejected = (kind(fields.get(key)) for key in ("prompt", "conversations", *SIDES))
    return Kinds(prompt, conversations, chosen if chosen == rejected else "")


def begins_whole(side: list[dict[str, Any]]) -> bool:
    """Whether a side begins like a conversation: with a turn of the system or a user."""
    return bool(side) and side[0].get("role", side[0].get("from")) in ("system", "developer", "user", "human")


def is_long(side: Any) -> bool:
    """Whether a side holds several turns."""
    return isinstance(side, list) and len(side) > 1
