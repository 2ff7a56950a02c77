"""Spot checks: questions with known answers, and plain texts, that show what a model forgot in training.

Owns the format of the file and the rule for correct answers. Nothing here affects the loss.
"""

import re
from dataclasses import dataclass, field
from typing import Any

from isopref.data.sources import Record, read_source
from isopref.errors import DataError

FORMS = '{"prompt": "...", "expect": "..."}, where expect may be a list, or {"text": "..."}'

FIRST_WITHOUT_SPACES = "\u2e80"  # Chinese, Japanese and others follow


@dataclass(frozen=True)
class Question:
    """A prompt, and what a correct answer contains: one of these strings."""

    prompt: str
    expect: tuple[str, ...]

    def is_answered_by(self, answer: str) -> bool:
        """Whether an answer contains an expected string as whole words, ignoring case."""
        return any(re.search(_as_words(one), answer, re.IGNORECASE) for one in self.expect)


def _as_words(text: str) -> str:
    """A pattern that matches the text as whole words; inside words, too, if its script has no spaces between words."""
    pattern = re.escape(text)
    return pattern if any(character >= FIRST_WITHOUT_SPACES for character in text) else rf"(?<!\w){pattern}(?!\w)"


@dataclass(frozen=True)
class SpotChecks:
    questions: list[Question] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)


def read_spot_checks(spec: str) -> SpotChecks:
    """The spot checks of a file, in order. Raises DataError for the first record that is not a spot check."""
    checks = SpotChecks()
    for record in read_source(spec):
        fields = {name: value for name, value in record.fields.items() if value is not None}  # CSV has every column
        if set(fields) == {"text"}:
            checks.texts.append(_text(record, "text", fields["text"]))
        elif set(fields) == {"prompt", "expect"}:
            checks.questions.append(_question(record))
        else:
            raise DataError(f"{record.origin}: has the fields {sorted(fields)}. A spot check is {FORMS}.")
    return checks


def _question(record: Record) -> Question:
    prompt, expect = _text(record, "prompt", record.fields["prompt"]), record.fields["expect"]
    every = expect if isinstance(expect, list) and expect else [expect]
    return Question(prompt, tuple(_text(record, "expect", one) for one in every))


def _text(record: Record, name: str, value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{record.origin}: '{name}' must be text; found {value!r}. A spot check is {FORMS}.")
    return value
