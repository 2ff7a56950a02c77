"""Records with one answer and a label that says whether it is good or bad, as for KTO."""

from __future__ import annotations

from typing import Any

from isopref.data.columns import OPTIONAL, SIDES
from isopref.data.known_shapes.prompted import alpaca_prompt
from isopref.data.known_shapes.shape import Fields, Labelled, Shape, is_long
from isopref.data.messages import (
    DefectError,
    Turns,
    WrongColumnError,
    kind,
    read_answer,
    read_messages,
    read_number,
    read_prompt,
    read_text,
    shown,
)

LABELS = ("label", "kto_tag")  # the second is LLaMA-Factory's
UNJUDGED = (  # of data for supervised fine-tuning
    "The data has one answer per record, without a judgement. Add a column rejected or label, or sample more answers "
    "with isopref sample and judge them with isopref judge (docs/rounds.md)"
)
PROMPTS = ("prompt", "instruction")
COMPLETION, OTHER_ANSWERS = "completion", ("response", "answer", "output")
CHATS = ("messages", "conversations")
LISTS = ("responses", "generations", "answers", "completions")  # a record with one of these is a list
GOOD = ("true", "1", "good", "chosen", "desirable", "up", "thumbs up")
BAD = ("false", "0", "bad", "rejected", "undesirable", "down", "thumbs down")
ACCEPTED = "true or false, 1 or 0, good or bad, chosen or rejected, desirable or undesirable, up or down"


class Label(Shape):
    """A prompt with a completion, or a conversation whose last turn is the answer; and a label."""

    name = "label"
    looks = "prompt and completion, or messages that end with the answer; label: true or false"
    columns = (*PROMPTS, "input", "history", COMPLETION, *OTHER_ANSWERS, *CHATS, *LABELS)
    prompt_from = "the column 'prompt' or 'instruction'; of messages, all turns before the last one"
    has_raw = True
    holds = "labels"

    def fits(self, fields: Fields) -> bool:
        if _label_column(fields) is None or any(fields.get(side) is not None for side in SIDES):
            return False
        if any(isinstance(fields.get(name), list) and fields[name] for name in LISTS):
            return False
        return _answer_column(fields) is not None or _chat_column(fields) is not None

    def used(self, fields: Fields) -> frozenset[str]:
        found: tuple[str | None, ...] = (_label_column(fields), _answer_column(fields), _prompt_column(fields))
        if found[1] is None:
            chat = _chat_column(fields) or next((name for name in CHATS if name in self.written), None)
            found = (found[0], chat)
        beside = ("input", "history") if "instruction" in found else ()
        return frozenset((*filter(None, found), *beside, *OPTIONAL))

    def read_label(self, fields: Fields) -> Labelled:
        column = _label_column(fields)
        assert column is not None, "checked by fits"
        return Labelled(*_read_turns(fields), _is_good(fields[column], column))

    def lacks(self, fields: Fields) -> str | None:
        return "label" if _label_column(fields) is None else None


def _label_column(fields: Fields) -> str | None:
    return next((name for name in LABELS if fields.get(name) is not None), None)


def _prompt_column(fields: Fields) -> str | None:
    return next((name for name in PROMPTS if kind(fields.get(name)) in ("text", "messages")), None)


def _answer_column(fields: Fields) -> str | None:
    """The column with the answer to a prompt: 'completion', or else the only one of OTHER_ANSWERS."""
    found = [name for name in (COMPLETION, *OTHER_ANSWERS) if kind(fields.get(name)) in ("text", "messages")]
    if _prompt_column(fields) is None or not found:
        return None
    return found[0] if found[0] == COMPLETION or len(found) == 1 else None


def _chat_column(fields: Fields) -> str | None:
    return next((name for name in CHATS if kind(fields.get(name)) == "messages" and is_long(fields[name])), None)


def _read_turns(fields: Fields) -> tuple[Turns, Turns]:
    """The prompt and its answer."""
    column = _answer_column(fields)
    if column is not None:
        return _read_prompt(fields), _read_either(fields[column], column)
    chat = _chat_column(fields)
    assert chat is not None, "checked by fits"
    turns = read_messages(fields[chat], chat)
    return read_prompt(turns[:-1], chat), read_answer(turns[-1:], f"{chat}[-1]")


def _read_prompt(fields: Fields) -> Turns:
    name = _prompt_column(fields)
    assert name is not None, "checked by fits"
    if isinstance(fields[name], str):
        return read_text(fields[name], name) if name == "prompt" else alpaca_prompt(fields)
    return read_prompt(fields[name], name)


def _read_either(value: Any, name: str) -> Turns:
    return read_text(value, name) if isinstance(value, str) else read_answer(value, name)


def _is_good(value: Any, name: str) -> bool:
    """Whether a label means good. Raises WrongColumnError for other numbers than 0 and 1: then a 1 is a rating, too."""
    number = read_number(value)
    if number is not None and number not in (0.0, 1.0):
        raise WrongColumnError(
            "label",
            f"'{name}' is {shown(value)}, which looks like a rating, not a label. A label is {ACCEPTED}. Convert "
            "ratings to labels with a threshold, or put all answers to a prompt into one record, with their ratings in "
            "'scores'",
        )
    word = str(int(number)) if number is not None else _word(value)
    if word not in (*GOOD, *BAD):
        raise DefectError("label", f"'{name}' is {shown(value)}, which is not a label: write {ACCEPTED}")
    return word in GOOD


def _word(value: Any) -> str:
    if not isinstance(value, bool | str):
        return ""
    return " ".join(str(value).lower().replace("_", " ").replace("-", " ").split())
