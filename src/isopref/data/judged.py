"""An interpreted record: a prompt with a pair, a list or a labelled answer; and the error for one that has none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from isopref.data.columns import SIDES
from isopref.data.messages import Turns
from isopref.errors import DataError
from isopref.examples import PAIR_SCORES


class BadPairError(DataError):
    """A record that does not yield a training pair. data.on_bad: drop counts it under `reason`."""

    def __init__(self, origin: str, reason: str, what: str) -> None:
        super().__init__(origin, reason, what)  # as args, so that it survives pickling from a worker process
        self.reason = reason

    def __str__(self) -> str:
        origin, _, what = self.args
        return f"{origin}: {what}. Remove it, or set data.on_bad: drop."


@dataclass(frozen=True)
class PreferencePair:
    """A prompt with two answers. Text in the record stays text here; chat.py turns it into a conversation."""

    prompt: Turns
    chosen: Turns
    rejected: Turns
    tools: list[dict[str, Any]] | None
    weight: float
    origin: str
    gap: float | None = None  # score of chosen minus score of rejected, if the record has them
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # for the chat template, e.g. enable_thinking
    subset: str | None = None  # of the source, evaluated separately

    names: ClassVar[tuple[str, ...]] = SIDES  # of the answers, for errors
    scores: ClassVar[tuple[float, ...]] = PAIR_SCORES

    @property
    def answers(self) -> tuple[Turns, ...]:
        return self.chosen, self.rejected

    def with_answers(self, prompt: Turns, answers: Sequence[Turns]) -> PreferencePair:
        """A copy with another prompt and other answers, judged the same."""
        chosen, rejected = answers
        return replace(self, prompt=prompt, chosen=chosen, rejected=rejected)


@dataclass(frozen=True)
class RankedList:
    """A prompt with any number of distinct answers, each with a score: higher is better."""

    prompt: Turns
    answers: tuple[Turns, ...]
    scores: tuple[float, ...]
    tools: list[dict[str, Any]] | None
    weight: float
    origin: str
    notes: Mapping[str, int] = field(default_factory=dict)  # dropped answers, by reason
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # for the chat template, e.g. enable_thinking
    subset: str | None = None  # of the source, evaluated separately

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"answer {number}" for number in range(1, len(self.answers) + 1))

    def with_answers(self, prompt: Turns, answers: Sequence[Turns]) -> RankedList:
        """A copy with another prompt and other answers, judged the same."""
        return replace(self, prompt=prompt, answers=tuple(answers))


@dataclass(frozen=True)
class LabelledAnswer:
    """A prompt with one answer, which is good or bad."""

    prompt: Turns
    answer: Turns
    is_good: bool
    tools: list[dict[str, Any]] | None
    weight: float
    origin: str
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # for the chat template, e.g. enable_thinking
    subset: str | None = None  # of the source, evaluated separately

    names: ClassVar[tuple[str, ...]] = ("answer",)  # for errors

    @property
    def answers(self) -> tuple[Turns, ...]:
        return (self.answer,)

    @property
    def scores(self) -> tuple[float, ...]:
        return (1.0,) if self.is_good else (0.0,)

    def with_answers(self, prompt: Turns, answers: Sequence[Turns]) -> LabelledAnswer:
        """A copy with another prompt and another answer, judged the same."""
        (answer,) = answers
        return replace(self, prompt=prompt, answer=answer)


Preference = PreferencePair | RankedList | LabelledAnswer
