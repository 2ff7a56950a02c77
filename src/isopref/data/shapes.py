"""What records mean: the shapes preference data comes in, and how a record becomes a PreferencePair.

Owns the columns we read, the names of the shapes and the reasons a record is refused. Fields are read by
messages; files (sources) and tokens (chat) are not known here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from isopref.data.messages import (
    HH_TURN,
    DefectError,
    Message,
    Turns,
    is_transcript,
    is_written,
    kind,
    parse_written,
    read_answer,
    read_messages,
    read_prompt,
    read_text,
    read_tools,
    read_transcript,
    read_weight,
    shown,
)
from isopref.data.sources import Record
from isopref.errors import DataError

Fields = dict[str, Any]
Parts = tuple[Turns, Turns, Turns]  # prompt, chosen, rejected

SIDES = ("chosen", "rejected")
PARTS = ("prompt", "conversations", *SIDES)
COLUMNS = (*PARTS, "system", "tools", "weight")
MEDIA = ("image", "images", "audio", "audios", "video", "videos")  # columns whose content a model would have to see
# Other names of our columns, in small letters, for a suggestion.
ALIASES = {
    "prompt": ("question", "instruction", "query", "input", "problem", "messages", "conversations", "conversation"),
    "chosen": ("accepted", "accept", "preferred", "better", "best", "good", "positive", "winner", "win", "pos"),
    "rejected": ("reject", "dispreferred", "unpreferred", "worse", "worst", "bad", "negative", "loser", "lose", "neg"),
}
WITH_PROMPT = {"messages": "prompt", "sharegpt": "conversations"}  # shapes whose answers are one turn: their prompt
OTHER_WORDS = {"response", "responses", "answer", "answers", "completion", "output", "text", "message", "messages"}
DETECT_RECORDS = 100  # how far a source is searched for a first record that has a shape


class BadPairError(DataError):
    """A record that gives no pair to train on. `reason` is what data.on_bad: drop counts it under."""

    def __init__(self, origin: str, reason: str, what: str) -> None:
        super().__init__(origin, reason, what)  # as args, so that it survives the way from a worker process
        self.reason = reason

    def __str__(self) -> str:
        origin, _, what = self.args
        return f"{origin}: {what}. Remove it, or set data.on_bad: drop."


@dataclass(frozen=True)
class PreferencePair:
    """A prompt with two answers. What was text in the record is text here; chat says what becomes of it."""

    prompt: Turns
    chosen: Turns
    rejected: Turns
    tools: list[dict[str, Any]] | None
    weight: float
    origin: str


@dataclass(frozen=True)
class Shape:
    """One form of record. `split` gives its parts, or raises DefectError; `split_raw` gives them as text.

    `written` are the columns of a source whose messages are written as text, as in CSV.
    """

    name: str
    looks: str
    split: Callable[[Fields], Parts]
    split_raw: Callable[[Fields], Parts] | None = None
    written: frozenset[str] = frozenset()


def detect_shape(records: Sequence[Record], *, raw: bool, columns: Mapping[str, str] | None = None) -> Shape:
    """The shape of the first record that has one, among the first records of a source.

    `raw`: there is no chat template, so only shapes made of text will do. `columns` were renamed (ours: theirs). Raises
    DataError if none fits.
    """
    written = _written_columns(records)
    for record in records:
        try:
            name = _shape_name(_parsed(record.fields, written))
        except DefectError:
            continue
        if name is None:
            continue
        if raw and SHAPES[name].split_raw is None:
            raise DataError(
                f"{record.origin}: records of shape '{name}' are messages, which data.template: none cannot "
                "write. Use the tokenizer's chat template, or data.template: path.jinja."
            )
        if name in WITH_PROMPT:
            _refuse_conversations(records, written, WITH_PROMPT[name])
        return replace(SHAPES[name], written=written)
    assert records, "a source without records raises before this"
    known = "".join(f"\n  {shape.name}: {shape.looks}" for shape in SHAPES.values())
    first = records[0]
    found = ", ".join(f"{key} ({kind(value)})" for key, value in first.fields.items()) or "(none)"
    renames = _renames(first.fields)
    names = ", ".join(f"{ours}: {_quoted(theirs)}" for ours, theirs in ({**(columns or {}), **renames}).items())
    way_out = f"Set data.columns={{{names}}}" if renames else "Rename columns with data.columns (ours: theirs)"
    raise DataError(f"{first.origin}: no shape fits the columns {found}. {way_out}. The shapes we know:{known}")


def to_pair(record: Record, shape: Shape, *, raw: bool) -> PreferencePair:
    """The pair in a record of this shape. Raises BadPairError."""
    try:
        return _to_pair(record, shape, raw)
    except DefectError as defect:
        raise BadPairError(record.origin, *defect.args) from None
    except RecursionError:  # JSON that nests a thousand deep is read, but not compared or shown
        raise BadPairError(record.origin, "type", "the record nests too deep") from None


def _to_pair(record: Record, shape: Shape, raw: bool) -> PreferencePair:
    fields = _parsed(record.fields, shape.written)
    if _shape_name(fields) != shape.name:
        raise _misfit(fields, shape)
    if media := next((name for name in MEDIA if fields.get(name)), None):
        raise DefectError("media", f"there is something in the column '{media}', and only text can be trained on")
    split = shape.split_raw if raw and shape.split_raw else shape.split
    prompt, chosen, rejected = split(fields)
    tools = read_tools(fields.get("tools"))
    for name, given in (("system", fields.get("system")), ("tools", tools)):
        if raw and given:
            raise DataError(
                f"{record.origin}: the column '{name}' has no place in plain text, and data.template is none. "
                "Use a chat template, or remove the column."
            )
    if fields.get("system"):
        prompt = _with_system(prompt, read_text(fields["system"], "system"))
    for name, turns in (("prompt", prompt), ("chosen", chosen), ("rejected", rejected)):
        if _is_empty(turns):
            raise DefectError("empty", f"'{name}' is empty")
    if chosen == rejected:
        raise DefectError("tie", "'chosen' equals 'rejected', so the pair has no gradient")
    return PreferencePair(prompt, chosen, rejected, tools, read_weight(fields.get("weight")), record.origin)


# --- detection ---------------------------------------------------------------------------------------


def _written_columns(records: Sequence[Record]) -> frozenset[str]:
    """The columns of a source that hold messages written as text: in most of these records, for one may be odd text.

    Raises DataError for a column that looks so and cannot be read.
    """
    found = set()
    for key in PARTS:
        texts = [record for record in records if isinstance(record.fields.get(key), str) and record.fields[key].strip()]
        written = [record for record in texts if is_written(record.fields[key])]
        if 2 * len(written) <= len(texts):
            continue
        unread = [record for record in written if parse_written(record.fields[key]) is None]
        if 2 * len(unread) > len(written):
            raise DataError(
                f"{unread[0].origin}: '{key}' looks like messages written as text, and is neither JSON nor what Python "
                f"prints: {shown(unread[0].fields[key])}. Write the file as JSONL or Parquet, where messages are lists."
            )
        found.add(key)
    return frozenset(found)


def _parsed(fields: Fields, written: frozenset[str]) -> Fields:
    """The fields, with those messages as lists that are written as text."""
    parsed = {}
    for key in written:
        text = fields.get(key)
        if isinstance(text, str) and text.strip():
            parsed[key] = parse_written(text)
            if parsed[key] is None:
                raise DefectError(
                    "shape", f"'{key}' is messages written as text in this source, here it is {shown(text)}"
                )
    return fields | parsed


def _shape_name(fields: Fields) -> str | None:
    """The one shape that fits the kinds of the columns, or None."""
    prompt, conversations, chosen, rejected = (kind(fields.get(key)) for key in PARTS)
    if chosen != rejected:
        return None
    match (conversations, prompt, chosen):
        case ("messages", "absent", "messages"):
            return "sharegpt"
        case ("absent", "absent", "messages"):
            return "conversations"
        case ("absent", "text", "messages"):
            whole = isinstance(fields["chosen"], list) and len(fields["chosen"]) > 1
            return "ultrafeedback" if whole else "messages"
        case ("absent", "messages", "messages" | "text"):
            return "messages"
        case ("absent", "text", "text"):
            return "hh" if is_transcript(fields["prompt"]) else "text"
        case ("absent", "absent", "text"):
            return "hh" if all(is_transcript(fields[key]) for key in SIDES) else None
    return None


def _refuse_conversations(records: Sequence[Record], written: frozenset[str], column: str) -> None:
    """Raise DataError where most records have a prompt and answers of several turns: none of them is a pair."""
    found = [record for record in records if _has_conversations(record, written)]
    if 2 * len(found) > len(records):
        raise DataError(
            f"{found[0].origin}: 'chosen' and 'rejected' hold several turns beside the column '{column}', where one "
            f"assistant turn each is expected. If they are whole conversations, remove the column '{column}' from the "
            "data; else keep only the last turn of each."
        )


def _has_conversations(record: Record, written: frozenset[str]) -> bool:
    try:
        fields = _parsed(record.fields, written)
    except DefectError:
        return False
    if _shape_name(fields) not in WITH_PROMPT:
        return False
    return all(isinstance(fields[side], list) and len(fields[side]) > 1 for side in SIDES)


def _renames(fields: Fields) -> dict[str, str]:
    """Which columns, given our names, would make a shape of the record, as far as their own names tell."""
    missing = [ours for ours in ALIASES if fields.get(ours) is None]
    renames = {ours: theirs for ours in missing if (theirs := _column_like(ours, fields))}
    rest = {key: value for key, value in fields.items() if key not in renames.values()}
    shape = _shape_name(rest | {ours: fields[theirs] for ours, theirs in renames.items()})
    return renames if shape else {}


def _column_like(ours: str, fields: Fields) -> str | None:
    """The column whose name says the same as ours."""
    names = {_plain(name): name for name, value in fields.items() if value is not None}
    return next((names[alias] for alias in (ours, *ALIASES[ours]) if alias in names), None)


def _plain(name: str) -> str:
    """A column's name in small letters, and chosen for chosen_response or response_chosen."""
    words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+|[^\W_]+", name)
    telling = [word.lower() for word in words if word.lower() not in OTHER_WORDS] or [name.lower()]
    return "_".join(telling)


def _quoted(name: str) -> str:
    """A name as YAML takes it."""
    return name if re.fullmatch(r"[^\W\d]([\w .-]*\w)?", name) else json.dumps(name, ensure_ascii=False)


def _misfit(fields: Fields, shape: Shape) -> DefectError:
    """Why a record is not of the shape its source has, the likeliest cause first."""
    for key in SIDES:
        if fields.get(key) is None:
            return DefectError("missing", f"'{key}' is missing")
    other = _shape_name(fields)
    if other:
        return DefectError("shape", f"shape '{other}' in a source of shape '{shape.name}' ({shape.looks})")
    for key in PARTS:
        if kind(fields.get(key)) not in ("absent", "text", "messages"):
            return DefectError("type", f"'{key}' is neither text nor messages but {shown(fields[key])}")
    found = {key: kind(fields.get(key)) for key in PARTS}
    reason = "missing" if found["prompt"] == found["conversations"] == "absent" else "shape"
    return DefectError(reason, f"the columns {found} do not make shape '{shape.name}' ({shape.looks})")


# --- shapes ------------------------------------------------------------------------------------------


def _split_explicit(fields: Fields) -> Parts:
    prompt = fields["prompt"]
    prompt = read_text(prompt, "prompt") if isinstance(prompt, str) else read_prompt(prompt, "prompt")
    chosen, rejected = (
        read_text(fields[key], key) if isinstance(fields[key], str) else read_answer(fields[key], key) for key in SIDES
    )
    return prompt, chosen, rejected


def _split_sharegpt(fields: Fields) -> Parts:
    chosen, rejected = (read_answer(fields[key], key) for key in SIDES)
    return read_prompt(fields["conversations"], "conversations"), chosen, rejected


def _split_conversations(fields: Fields) -> Parts:
    chosen, rejected = (read_messages(fields[key], key) for key in SIDES)
    if len(chosen) == 1 and (asked := _column_like("prompt", fields)):
        columns = f"data.columns={{prompt: {_quoted(asked)}}}"
        raise DefectError("empty", f"there is no prompt in 'chosen', and '{asked}' is not read ({columns} reads it)")
    return _split_whole(chosen, rejected)


def _split_ultrafeedback(fields: Fields) -> Parts:
    asked = read_text(fields["prompt"], "prompt")
    users = [turn for turn in read_messages(fields["chosen"], "chosen") if turn["role"] == "user"]
    if not users or users[0]["content"] != asked:
        raise DefectError("shape", "'prompt' is not the first user turn of 'chosen', as this shape has it")
    return _split_conversations(fields)


def _split_hh(fields: Fields) -> Parts:
    chosen, rejected = (read_transcript(_hh_text(fields, key)) for key in SIDES)
    return _split_whole(chosen, rejected)


def _split_hh_raw(fields: Fields) -> Parts:
    """As in the DPO authors' code: the prompt is all up to the last "Assistant:", as it stands."""
    texts = [_hh_text(fields, key) for key in SIDES]
    chosen, rejected = ([*HH_TURN.finditer(text)][-1] for text in texts)
    if texts[0][: chosen.end()] != texts[1][: rejected.end()]:
        raise DefectError("diverging", "'chosen' and 'rejected' differ before their last answer")
    if chosen[1] != "Assistant":
        raise DefectError("role", "the last turn is not the assistant's")
    return texts[0][: chosen.end()], texts[0][chosen.end() :], texts[1][rejected.end() :]


def _hh_text(fields: Fields, key: str) -> str:
    """A whole transcript. Some sets have the prompt apart, and of those some repeat it in each side."""
    text = read_text(fields[key], key)
    return text if is_transcript(text) else read_text(fields["prompt"], "prompt") + text


def _split_whole(chosen: list[Message], rejected: list[Message]) -> Parts:
    """Two whole conversations: what comes before the last turn is the prompt, and must be the same."""
    if chosen[:-1] != rejected[:-1]:
        raise DefectError("diverging", "'chosen' and 'rejected' differ before their last answer")
    return (
        read_prompt(chosen[:-1], "chosen"),
        read_answer(chosen[-1:], "chosen"),
        read_answer(rejected[-1:], "rejected"),
    )


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("text", "prompt, chosen, rejected: text", _split_explicit, _split_explicit),
        Shape("messages", "prompt: messages or text; chosen, rejected: one assistant turn", _split_explicit),
        Shape("conversations", "chosen, rejected: conversations, the same but for the end", _split_conversations),
        Shape("ultrafeedback", "prompt: text; chosen, rejected: conversations with it", _split_ultrafeedback),
        Shape("sharegpt", "conversations, chosen, rejected: turns with from and value", _split_sharegpt),
        Shape("hh", r"chosen, rejected: text, '\n\nHuman: ... \n\nAssistant: ...'", _split_hh, _split_hh_raw),
    )
}


def _with_system(prompt: Turns, system: str) -> list[Message]:
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if turns[0]["role"] in ("system", "developer"):
        raise DefectError("role", "there is a column 'system', and the prompt begins with a system turn too")
    return [{"role": "system", "content": system}, *turns]


def _is_empty(turns: Turns) -> bool:
    if isinstance(turns, str):
        return not turns.strip()
    return not any(turn["content"].strip() or turn.get("tool_calls") for turn in turns)
