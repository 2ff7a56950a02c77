"""Shapes with a list of answers to one prompt, each with a score, a rating or a rank."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

from isopref.data.columns import OPTIONAL, SIDES
from isopref.data.conversations import split_whole
from isopref.data.known_shapes.shape import Fields, Ranked, Shape, begins_whole, is_long
from isopref.data.messages import DefectError, Turns, kind, read_answer, read_messages, read_prompt, read_text, shown

ANSWERS = ("responses", "generations", "answers", "completions")
SCORES = ("scores", "ratings", "rewards")  # the higher, the better
RANKS = ("ranking", "ranks")  # 1 is the best
PROMPTS = ("prompt", "instruction")
RESPONSE, RESPONSE_SCORES = "response", ("overall_score", "score", "rating")  # of UltraFeedback's completions


class Responses(Shape):
    """Two lists side by side, as in distilabel's `generations` and `ratings`."""

    name = "list"
    looks = (
        "prompt: text or messages; responses: list of answers (or, without a prompt, of full conversations with a "
        "common beginning); scores, ratings or ranking: list of numbers"
    )
    columns = (*PROMPTS, *ANSWERS, *SCORES, *RANKS)
    prompt_from = "the column 'prompt' or 'instruction', or the turns that all conversations begin with"
    has_raw = True
    holds = "lists"

    def fits(self, fields: Fields) -> bool:
        answers, values = _column(fields, ANSWERS), _column(fields, (*SCORES, *RANKS))
        if answers is None or values is None or not _has_prompt(fields, fields[answers]):
            return False
        return all(isinstance(one, str) or kind(one) == "messages" for one in fields[answers])

    def used(self, fields: Fields) -> frozenset[str]:
        found = (_prompt_column(fields), _column(fields, ANSWERS), _column(fields, (*SCORES, *RANKS)))
        return frozenset((*filter(None, found), *OPTIONAL))

    def read_list(self, fields: Fields) -> Ranked:
        answers, values = _column(fields, ANSWERS), _column(fields, (*SCORES, *RANKS))
        assert answers is not None, "checked by fits"
        assert values is not None, "checked by fits"
        if len(fields[answers]) != len(fields[values]):
            raise DefectError(
                "shape", f"'{answers}' has {len(fields[answers])} entries and '{values}' has {len(fields[values])}"
            )
        sign = -1.0 if values in RANKS else 1.0
        scored = [
            (one, _score(value, values, sign)) for one, value in zip(fields[answers], fields[values], strict=True)
        ]
        return _ranked(fields, scored, answers)


class Completions(Shape):
    """UltraFeedback's own records: an instruction, and completions, each of which is a record with a score."""

    name = "completions"
    looks = "instruction: text; completions: records with response and overall_score"
    columns = (*PROMPTS, "completions")
    prompt_from = "the column 'prompt' or 'instruction', or the turns that all conversations begin with"
    has_raw = True
    holds = "lists"

    def fits(self, fields: Fields) -> bool:
        every = fields.get("completions")
        if not (isinstance(every, list) and every and all(isinstance(one, dict) for one in every)):
            return False
        answers = [one.get(RESPONSE) for one in every]
        return _has_prompt(fields, answers) and all(kind(one) in ("text", "messages") for one in answers)

    def used(self, fields: Fields) -> frozenset[str]:
        return frozenset((_prompt_column(fields) or "", "completions", *OPTIONAL))

    def read_list(self, fields: Fields) -> Ranked:
        scored = []
        for one in fields["completions"]:
            name = next((key for key in RESPONSE_SCORES if one.get(key) is not None), None)
            scored.append((one[RESPONSE], None if name is None else _score(one[name], name, 1.0)))
        return _ranked(fields, scored, "completions")


def _column(fields: Fields, names: Sequence[str]) -> str | None:
    """The first of these columns that holds a non-empty list."""
    return next((name for name in names if isinstance(fields.get(name), list) and fields[name]), None)


def _prompt_column(fields: Fields) -> str | None:
    if any(fields.get(side) is not None for side in SIDES):
        return None  # a pair, whatever other columns it has
    return next((name for name in PROMPTS if kind(fields.get(name)) in ("text", "messages")), None)


def _has_prompt(fields: Fields, answers: Sequence[Any]) -> bool:
    """Whether there is a prompt: in a column, or at the beginning of all answers. Pairs are never lists."""
    if any(fields.get(side) is not None for side in SIDES):
        return False
    return _prompt_column(fields) is not None or all(map(_is_whole, answers))


def _is_whole(answer: Any) -> bool:
    """Whether an answer in a list is a conversation, with its prompt."""
    return kind(answer) == "messages" and is_long(answer) and begins_whole(answer)


def _read_prompt(fields: Fields) -> Turns:
    name = _prompt_column(fields)
    assert name is not None, "checked by fits"
    value = fields[name]
    return read_text(value, name) if isinstance(value, str) else read_prompt(value, name)


def _score(value: Any, name: str, sign: float) -> float | None:
    """A score; None if there is none. Also reads numbers in text, which distilabel's ratings sometimes are."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            if value.strip().lower() in ("", "n/a", "na", "none", "null"):
                return None
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > sys.float_info.max:
        raise DefectError("type", f"'{name}' has {shown(value)}, which is not a number")
    return None if math.isnan(value) else sign * value


def _ranked(fields: Fields, scored: Sequence[tuple[Any, float | None]], column: str) -> Ranked:
    """The answers that have a score; of equal answers, only the first."""
    left_out: Counter[str] = Counter()
    answers: list[Turns] = []
    scores: list[float] = []
    are_whole = all(_is_whole(value) for value, _ in scored)
    read = read_messages if are_whole else read_answer
    for value, score in scored:
        answer = read_text(value, column) if isinstance(value, str) else read(value, column)
        if score is None:
            left_out["unscored_answers"] += 1
        elif answer in answers:
            left_out["repeated_answers"] += 1
        else:
            answers.append(answer)
            scores.append(score)
    if len(answers) < 2:
        raise DefectError(
            "single",
            f"'{column}' has {len(answers)} different answers with a score, but a comparison needs two",
        )
    prompt, own = _split_whole(fields, answers, column) if are_whole else (_read_prompt(fields), answers)
    return Ranked(prompt, tuple(own), tuple(scores), left_out)


def _split_whole(fields: Fields, answers: Sequence[Any], column: str) -> tuple[Turns, Sequence[Turns]]:
    """The turns that all conversations begin with, and the rest of each. Raises DefectError if a prompt differs."""
    prompt, own = split_whole(answers)
    name = _prompt_column(fields)
    asked = None if name is None else _read_prompt(fields)
    first = next(turn["content"] for turn in prompt if turn["role"] == "user")
    if asked is not None and (first != asked if isinstance(asked, str) else prompt[: len(asked)] != asked):
        raise DefectError("shape", f"the conversations in '{column}' do not begin with the prompt in '{name}'")
    return prompt, own
