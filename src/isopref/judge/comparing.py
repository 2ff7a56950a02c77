"""Comparisons of two answers by a language model: the question, the reply, and the combined verdict of both orders.

A judge may prefer the answer it reads first, so each comparison is made twice, once in each order. If both verdicts
name the same answer, it wins. Ties and disagreements are dropped, or count as half a win each, as the user chooses.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import combinations
from pathlib import Path
from typing import Literal, NamedTuple

from isopref.data.messages import Turns
from isopref.errors import ConfigError, UserError

RUBRIC = Path(__file__).with_name("rubric.txt")
PARTS = ("{prompt}", "{a}", "{b}")
# "a" may be an article ("verdict: a tie", "a close call"), so a lowercase letter counts only at the end of its line.
VERDICT = re.compile(
    r"""(?i:VERDICT) \W*
    (?: (?i:ANSWER) \W+ | (?i:A) \s+ (?=(?i:TIE)\b) )?
    ( (?i:TIE)\b | [AB]\b | [ab]\b(?=\W*?$) )""",
    re.MULTILINE | re.VERBOSE,
)

Verdict = Literal["first", "second", "tie"]  # which of the two answers is better, whatever the order they were shown in
Ties = Literal["drop", "keep"]


class NoVerdictError(UserError):
    """A judge replied, but did not decide."""


def read_rubric(path: Path | None) -> str:
    """The question for the judge: the default, or one from a file. Raises ConfigError."""
    try:
        text = (path or RUBRIC).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--rubric: {path} cannot be read ({error}). Name a text file.") from error
    missing = [part for part in PARTS if part not in text]
    if missing:
        raise ConfigError(
            f"--rubric: {path} has no {', '.join(missing)}. Add it where the judge should read the prompt or answer."
        )
    return text


def question(rubric: str, prompt: Turns, a: str, b: str) -> str:
    """The rubric with a prompt and two answers filled in. Placeholders inside these texts are left alone."""
    given = {"{prompt}": _shown(prompt), "{a}": a, "{b}": b}
    return re.sub("|".join(map(re.escape, PARTS)), lambda found: given[found[0]], rubric)


def _shown(prompt: Turns) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(f"{turn['role']}: {turn['content']}" for turn in prompt)


def read_verdict(reply: str) -> Literal["A", "B", "TIE"] | None:
    """The last verdict in a reply; None if there is none."""
    found = VERDICT.findall(reply)
    if not found:
        return None
    verdict: Literal["A", "B", "TIE"] = found[-1].upper()
    return verdict


class Comparison(NamedTuple):
    """One question for the judge: two answers in one of their orders."""

    key: str
    record: int
    first: int
    second: int
    swapped: bool  # the second answer is shown as A


def comparisons(record: int, prompt: Turns, answers: Sequence[str], judge: str) -> list[Comparison]:
    """All pairs of distinct answers of a record, in both orders. `judge` is a digest of what determines a verdict."""
    found = []
    for first, second in combinations(range(len(answers)), 2):
        if answers[first] == answers[second] or not (answers[first] and answers[second]):
            continue
        for swapped in (False, True):
            content = json.dumps([judge, prompt, answers[first], answers[second], swapped])
            key = blake2b(content.encode(), digest_size=16).hexdigest()
            found.append(Comparison(key, record, first, second, swapped))
    return found


def verdict_of(letter: str, swapped: bool) -> Verdict:
    if letter == "TIE":
        return "tie"
    return "first" if (letter == "A") != swapped else "second"


@dataclass
class Tally:
    """Counts of comparison outcomes."""

    counts: Counter[str] = field(default_factory=Counter)

    def joined(self, one: Verdict, other: Verdict) -> Verdict | None:
        """The combined verdict of both orders; None if they disagree."""
        if one != other:
            self.counts["disagreements"] += 1
            return None
        self.counts["ties" if one == "tie" else "decided"] += 1
        return one


def scores_of(num_answers: int, verdicts: Mapping[tuple[int, int], Verdict | None], ties: Ties) -> list[float | None]:
    """The share of its comparisons that each answer won; None if none was decided.

    With ties: keep, a tie or disagreement is half a win for each. With drop, it does not count.
    """
    won, made = [0.0] * num_answers, [0] * num_answers
    for (first, second), verdict in verdicts.items():
        if verdict in (None, "tie") and ties == "drop":
            continue
        points = {"first": 1.0, "second": 0.0}.get(verdict or "tie", 0.5)
        won[first] += points
        won[second] += 1 - points
        made[first] += 1
        made[second] += 1
    return [total / count if count else None for total, count in zip(won, made, strict=True)]
