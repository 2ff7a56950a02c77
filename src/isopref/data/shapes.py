"""Interprets records: which of the known shapes a source has, and the pair, list or labelled answer in a record.

Owns detection and the reasons why a record is refused. The shapes themselves are in known_shapes; messages.py parses
fields. Knows nothing about files (sources.py) or tokens (chat.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from isopref.data.columns import (
    ALIASES,
    GAPS,
    MARGIN,
    MEDIA,
    OPTIONAL,
    PROMPTS,
    SIDE_SCORES,
    SIDES,
    column_like,
    quoted,
)
from isopref.data.conversations import is_conversation, is_empty, part
from isopref.data.judged import BadPairError, LabelledAnswer, Preference, PreferencePair, RankedList
from isopref.data.known_shapes.labels import UNJUDGED
from isopref.data.known_shapes.registry import SHAPES
from isopref.data.known_shapes.shape import Fields, Shape
from isopref.data.messages import (
    DefectError,
    Message,
    Turns,
    WrongColumnError,
    is_written,
    kind,
    parse_written,
    read_number,
    read_subset,
    read_template_kwargs,
    read_text,
    read_tools,
    read_weight,
    shown,
)
from isopref.data.sources import Record
from isopref.errors import DataError

__all__ = ["COLUMNS", "SHAPES", "Shape", "detect_shape", "to_pair"]

PARTS = ("prompt", "conversations", *SIDES)  # columns that may hold messages
LABELLED_PARTS = ("completion", "messages")  # the same, for labelled answers
TELLING = (*PROMPTS, *SIDES)  # columns that distinguish shapes
COLUMNS = tuple(dict.fromkeys([*(name for shape in SHAPES.values() for name in shape.columns), *OPTIONAL, *GAPS]))
DETECT_RECORDS = 100  # how many records to search for the first one that has a shape


def detect_shape(records: Sequence[Record], *, raw: bool, columns: Mapping[str, str] | None = None) -> Shape:
    """The shape of the first record that has one, among the first records of a source.

    `raw`: there is no chat template, so only text shapes qualify. `columns` were renamed (ours: theirs). Raises
    DataError if none fits.
    """
    assert records, "a source without records raises earlier"
    written = _written_columns(records)
    first, shape = _first_shape(records, written)
    if shape is None:
        raise _no_shape(records[0], columns or {})
    if raw and not shape.has_raw:
        raise DataError(
            f"{first.origin}: records of shape '{shape.name}' are messages, which data.template: none cannot "
            "write. Use the tokenizer's chat template, or data.template: path.jinja."
        )
    if not raw and not shape.has_template:
        raise DataError(
            f"{first.origin}: records of shape '{shape.name}' are already templated, and the chat template would be "
            "applied again. Set data.template: none, or store them as messages."
        )
    _refuse_idle_columns(first, shape, columns or {})
    shape = replace(shape, written=written)
    _refuse_most(records, shape)
    return shape


def to_pair(record: Record, shape: Shape, *, raw: bool) -> Preference:
    """The pair, list or labelled answer in a record. Raises BadPairError, or DataError if its column is a wrong one."""
    try:
        return _to_pair(record, shape, raw)
    except WrongColumnError as defect:
        raise DataError(f"{record.origin}: {defect.args[-1]}.") from None
    except DefectError as defect:
        raise BadPairError(record.origin, *defect.args) from None
    except RecursionError:  # JSON nested a thousand deep can be parsed, but not compared or shown
        raise BadPairError(record.origin, "type", "the record is nested too deeply") from None


def _to_pair(record: Record, shape: Shape, raw: bool) -> Preference:
    fields = _parsed(record.fields, shape.written)
    if not shape.fits(fields):
        raise _misfit(fields, shape)
    if media := next((name for name in MEDIA if fields.get(name)), None):
        raise DefectError("media", f"the column '{media}' is not empty, but only text can be trained on")
    found = _with_common_turns(_judged(fields, shape, raw, record.origin))
    tools, kwargs = read_tools(fields.get("tools")), read_template_kwargs(fields.get("chat_template_kwargs"))
    history = not isinstance(found.prompt, str) and fields.get("history")  # in a shape that is otherwise text
    for name, given in [
        ("system", fields.get("system")),
        ("tools", tools),
        ("chat_template_kwargs", kwargs),
        ("history", history),
    ]:
        if raw and given:
            raise DataError(
                f"{record.origin}: the column '{name}' has no place in plain text (data.template: none). Use a chat "
                "template, or remove the column."
            )
    prompt = found.prompt
    if raw and not all(isinstance(turns, str) for turns in (prompt, *found.answers)):
        raise DefectError("shape", "there are messages, which data.template: none cannot write")
    if fields.get("system"):
        prompt = with_system(prompt, read_text(fields["system"], "system"))
    weight = read_weight(fields.get("weight"))
    subset = read_subset(fields.get("subset"))
    found = replace(found, prompt=prompt, tools=tools, weight=weight, template_kwargs=kwargs, subset=subset)
    for name, turns in (("prompt", prompt), *zip(found.names, found.answers, strict=True)):
        if is_empty(turns):
            raise DefectError("empty", f"'{name}' is empty")
    return found


def _judged(fields: Fields, shape: Shape, raw: bool, origin: str) -> Preference:
    """The prompt and the answers with their labels or scores, without the columns common to all shapes."""
    if (ranked := shape.read_list(fields)) is not None:
        return RankedList(ranked.prompt, ranked.answers, ranked.scores, None, 1.0, origin, ranked.left_out)
    if (labelled := shape.read_label(fields)) is not None:
        return LabelledAnswer(labelled.prompt, labelled.answer, labelled.is_good, None, 1.0, origin)
    prompt, chosen, rejected = (shape.split_raw if raw else shape.split)(fields)
    if chosen == rejected:
        raise DefectError("tie", "'chosen' equals 'rejected', so the pair has no gradient")
    return PreferencePair(prompt, chosen, rejected, None, 1.0, origin, _read_gap(fields))


def _read_gap(fields: Fields) -> float | None:
    """How much better chosen is than rejected; None if the record has no scores."""
    for names in SIDE_SCORES:
        chosen, rejected = (read_number(fields.get(name)) for name in names)
        if chosen is not None and rejected is not None:
            return chosen - rejected
    return read_number(fields.get(MARGIN))


def _with_common_turns(found: Preference) -> Preference:
    """The same, with the turns that all answers share moved to the prompt. Single-turn answers are unchanged."""
    conversations = [answer for answer in found.answers if not isinstance(answer, str)]
    if len(conversations) < max(2, len(found.answers)) or not any(map(is_conversation, found.answers)):
        return found
    turns = [{"role": "user", "content": found.prompt}] if isinstance(found.prompt, str) else found.prompt
    longer, rest = part(turns, conversations)
    return found if len(longer) == len(turns) else found.with_answers(longer, rest)


# --- detection ---------------------------------------------------------------------------------------


def _written_columns(records: Sequence[Record]) -> frozenset[str]:
    """The columns that hold messages stored as text in most of these records: a single one may be coincidence.

    Raises DataError for a column that looks like messages but cannot be parsed.
    """
    found = set()
    are_pairs = any(record.fields.get(side) is not None for record in records for side in SIDES)
    for key in PARTS if are_pairs else (*PARTS, *LABELLED_PARTS):
        texts = [record for record in records if isinstance(record.fields.get(key), str) and record.fields[key].strip()]
        written = [record for record in texts if is_written(record.fields[key])]
        if 2 * len(written) <= len(texts):
            continue
        unread = [record for record in written if parse_written(record.fields[key]) is None]
        if 2 * len(unread) > len(written):
            raise DataError(
                f"{unread[0].origin}: '{key}' looks like messages stored as text, but is neither JSON nor a printed "
                f"Python list: {shown(unread[0].fields[key])}. Write the file as JSONL or Parquet, where messages are "
                "lists."
            )
        found.add(key)
    return frozenset(found)


def _parsed(fields: Fields, written: frozenset[str]) -> Fields:
    """The fields, with messages stored as text parsed into lists."""
    parsed = {}
    for key in written:
        text = fields.get(key)
        if isinstance(text, str) and text.strip():
            parsed[key] = parse_written(text)
            if parsed[key] is None:
                raise DefectError(
                    "shape", f"'{key}' is messages written as text in this source, but here it is {shown(text)}"
                )
    return fields | parsed


def _shape_of(fields: Fields) -> Shape | None:
    """The one shape that fits a record, if any."""
    return next((shape for shape in SHAPES.values() if shape.fits(fields)), None)


def _first_shape(records: Sequence[Record], written: frozenset[str]) -> tuple[Record, Shape | None]:
    """The first record that has a shape, with that shape. A guess counts only if most records have no other shape."""
    found: list[tuple[Record, Shape]] = []
    for record in records:
        try:
            shape = _shape_of(_parsed(record.fields, written))
        except DefectError:
            continue
        if shape is not None:
            found.append((record, shape))
    guesses = [one for one in found if one[1].is_guess]
    proven = [one for one in found if not one[1].is_guess]
    candidates = guesses if len(guesses) > len(proven) else proven
    return candidates[0] if candidates else (records[0], None)


def _no_shape(first: Record, columns: Mapping[str, str]) -> DataError:
    """The error for a source without a shape: its columns, how to rename them, and the supported shapes."""
    found = ", ".join(f"{key} ({kind(value)})" for key, value in first.fields.items()) or "(none)"
    renames = _renames(first.fields)
    names = ", ".join(f"{ours}: {quoted(theirs)}" for ours, theirs in {**columns, **renames}.items())
    way_out = f"Set data.columns={{{names}}}" if renames else "Rename columns with data.columns (ours: theirs)"
    if not renames and SHAPES["label"].fits(first.fields | {"label": True}):
        way_out = UNJUDGED
    known = "".join(f"\n  {shape.name}: {shape.looks}" for shape in SHAPES.values())
    return DataError(f"{first.origin}: no shape fits the columns {found}. {way_out}. Supported shapes:{known}")


def _refuse_idle_columns(first: Record, shape: Shape, columns: Mapping[str, str]) -> None:
    """Raise DataError if data.columns names a column that the shape does not read."""
    for ours, theirs in columns.items():
        if ours in shape.reads:
            continue
        way_out = f"Remove {ours} from data.columns"
        if ours in SHAPES["alpaca"].columns:
            way_out += ", or read the prompt's column as instruction, which input and history belong to"
        raise DataError(
            f"{first.origin}: data.columns reads '{theirs}' as {ours}, but a source of shape '{shape.name}' has no "
            f"such column ({shape.looks}). {way_out}."
        )


def _refuse_most(records: Sequence[Record], shape: Shape) -> None:
    """Raise DataError if most records do not fit the shape: dropping them would drop nearly everything."""
    found = []
    for record in records:
        try:
            fields = _parsed(record.fields, shape.written)
        except DefectError:
            continue
        what = shape.objection(fields) if shape.fits(fields) else None
        if what is not None:
            found.append(f"{record.origin}: {what}")
    if 2 * len(found) > len(records):
        raise DataError(found[0])


def _renames(fields: Fields) -> dict[str, str]:
    """Which columns, renamed to ours, would give the record a shape, judging by their names."""
    missing = [ours for ours in ALIASES if fields.get(ours) is None]
    if fields.get("instruction") is not None and "prompt" in missing:
        missing.remove("prompt")  # Alpaca's name for the prompt
    renames = {ours: theirs for ours in missing if (theirs := column_like(ours, fields))}
    rest = {key: value for key, value in fields.items() if key not in renames.values()}
    renamed = rest | {ours: fields[theirs] for ours, theirs in renames.items()}
    return renames if _shape_of(renamed) else {}


def _misfit(fields: Fields, shape: Shape) -> DefectError:
    """Why a record does not have the shape of its source: the likeliest cause."""
    if lacks := shape.lacks(fields):
        return DefectError("missing", f"'{lacks}' is missing")
    other = _shape_of(fields)
    if other and not other.is_guess:
        return DefectError("shape", f"shape '{other.name}' in a source of shape '{shape.name}' ({shape.looks})")
    telling = (*TELLING, *(key for key in LABELLED_PARTS if key in shape.columns))
    for key in telling:
        if kind(fields.get(key)) not in ("absent", "text", "messages"):
            return DefectError("type", f"'{key}' is neither text nor messages but {shown(fields[key])}")
    found = {key: kind(fields.get(key)) for key in telling if key in shape.columns or fields.get(key) is not None}
    reason = "shape" if any(fields.get(key) is not None for key in PROMPTS) else "missing"
    return DefectError(reason, f"the columns {found} do not make shape '{shape.name}' ({shape.looks})")


def with_system(prompt: Turns, system: str) -> list[Message]:
    """A prompt after a system turn. Raises DefectError if it begins with one already."""
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if turns[0]["role"] in ("system", "developer"):
        raise DefectError("role", "there is a column 'system', but the prompt begins with a system turn, too")
    return [{"role": "system", "content": system}, *turns]
