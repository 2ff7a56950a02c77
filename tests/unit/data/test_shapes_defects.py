"""Every defect of a record is a named error, and never a changed pair."""

from __future__ import annotations

import copy
import json
import pickle
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isopref.data.chat import PairEncoder
from isopref.data.judged import BadPairError
from isopref.data.pairs import SourceSpec, TokenizeOptions, build_table
from isopref.data.shapes import Shape, detect_shape, to_pair
from isopref.data.sources import Record, read_source
from isopref.errors import DataError
from isopref.testing.tokenizers import tiny_tokenizer
from support.records import (
    ALPACA,
    BAD,
    COMMON_START,
    COMPLETIONS,
    GOOD,
    HH,
    HH_PROMPT,
    LABELLED,
    LABELLED_CHAT,
    RESPONSES,
    SHAREGPT,
    SYSTEM,
    TEXT,
    TRANSCRIPT,
    ULTRAFEEDBACK,
    Q,
    assistant,
    user,
)

# base record, what is changed in it (None: removed), reason
MESSAGES: dict[str, Any] = {"prompt": [Q], "chosen": [GOOD], "rejected": [BAD]}
CONVERSATIONS = {"chosen": [Q, GOOD], "rejected": [Q, BAD]}
DEFECTS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (TEXT, {"rejected": "because"}, "tie"),
    (TEXT, {"chosen": ""}, "empty"),
    (TEXT, {"images": ["a.png"]}, "media"),
    (TEXT, {"image": {"bytes": b"", "path": "a.png"}}, "media"),
    (TEXT, {"rejected": " \n"}, "empty"),
    (TEXT, {"prompt": ""}, "empty"),
    (TEXT, {"chosen": None}, "missing"),
    (TEXT, {"prompt": None}, "missing"),
    (TEXT, {"prompt": 3}, "type"),
    (TEXT, {"chosen": ["a", "b"]}, "type"),
    (TEXT, {"chosen": "half \ud800"}, "type"),
    (TEXT, {"chosen": [GOOD]}, "shape"),
    (TEXT, {"prompt": [Q]}, "shape"),
    (TEXT, {"system": 3}, "type"),
    (TEXT, {"weight": 0}, "weight"),
    (TEXT, {"weight": -1.0}, "weight"),
    (TEXT, {"weight": float("nan")}, "weight"),
    (TEXT, {"weight": float("inf")}, "weight"),
    (TEXT, {"weight": 10**400}, "weight"),
    (TEXT, {"weight": True}, "weight"),
    (TEXT, {"weight": "heavy"}, "weight"),
    (TEXT, {"weight": [1]}, "weight"),
    (TEXT, {"tools": "not json"}, "tools"),
    (TEXT, {"tools": '{"a": 1}'}, "tools"),
    (TEXT, {"tools": [1]}, "tools"),
    (MESSAGES, {"prompt": []}, "empty"),
    (MESSAGES, {"prompt": [Q, GOOD]}, "role"),
    (MESSAGES, {"prompt": [{"role": "robot", "content": "x"}]}, "role"),
    (MESSAGES, {"prompt": [{"role": ["user"], "content": "x"}]}, "role"),
    (MESSAGES, {"prompt": [{"role": "user", "content": None}]}, "type"),
    (MESSAGES, {"prompt": [{"role": "user", "content": []}]}, "type"),
    (MESSAGES, {"prompt": [{"role": "user"}]}, "type"),
    (MESSAGES, {"prompt": [SYSTEM, Q], "system": "be long"}, "role"),
    (MESSAGES, {"chosen": [user("x")]}, "role"),
    (MESSAGES, {"chosen": [Q, GOOD]}, "role"),
    (MESSAGES, {"chosen": [GOOD | {"weight": -1}]}, "weight"),
    (MESSAGES, {"chosen": [GOOD | {"weight": "much"}]}, "weight"),
    (MESSAGES, {"chosen": [GOOD | {"train": "no"}]}, "weight"),
    (MESSAGES, {"chosen": [GOOD, Q | {"train": True}, GOOD]}, "weight"),
    (MESSAGES, {"chosen": [GOOD, Q | {"weight": 0.5}, GOOD]}, "weight"),
    (MESSAGES, {"chosen": [GOOD, Q, GOOD], "rejected": [GOOD]}, "diverging"),
    (MESSAGES, {"chat_template_kwargs": "not json"}, "type"),
    (MESSAGES, {"chat_template_kwargs": [1]}, "type"),
    (MESSAGES, {"chat_template_kwargs": {"tokenize": True}}, "type"),
    (MESSAGES, {"chosen": []}, "role"),
    (MESSAGES, {"chosen": [assistant(" ")]}, "empty"),
    (MESSAGES, {"chosen": [{"role": "assistant", "content": "", "tool_calls": "add"}]}, "tools"),
    (CONVERSATIONS, {"chosen": [user("other"), GOOD]}, "diverging"),
    (CONVERSATIONS, {"chosen": [Q, GOOD, Q, GOOD], "rejected": [Q, GOOD]}, "diverging"),
    (CONVERSATIONS, {"chosen": [Q, GOOD, Q], "rejected": [Q, GOOD, Q, BAD]}, "diverging"),
    (CONVERSATIONS, {"chosen": [GOOD], "rejected": [BAD]}, "empty"),
    (CONVERSATIONS, {"chosen": [Q, Q]}, "role"),
    (ULTRAFEEDBACK, {"prompt": "something else"}, "shape"),
    (SHAREGPT, {"chosen": {"from": "bard", "value": "x"}}, "role"),
    (SHAREGPT, {"chosen": {"from": 3, "value": "x"}}, "role"),
    (SHAREGPT, {"chosen": {"from": "gpt"}}, "type"),
    (SHAREGPT, {"chosen": {"from": "function_call", "value": "add(1)"}}, "tools"),
    (SHAREGPT, {"chosen": {"from": "function_call", "value": "[]"}}, "tools"),
    (SHAREGPT, {"conversations": None}, "shape"),
    (HH, {"chosen": "\n\nHuman: other\n\nAssistant: because"}, "diverging"),
    (HH, {"chosen": HH["chosen"] + "\n\nHuman: thanks", "rejected": HH["chosen"] + "\n\nHuman: ok"}, "role"),
    (HH, {"chosen": HH_PROMPT}, "empty"),
    (HH, {"chosen": "because"}, "missing"),
]


@pytest.mark.parametrize(("base", "change", "reason"), DEFECTS)
def test_every_defect_is_named_with_its_origin_and_the_way_out(
    base: dict[str, Any], change: dict[str, Any], reason: str
) -> None:
    shape = detect_shape([Record(base, "f:1")], raw=False)
    fields = {key: value for key, value in (base | change).items() if value is not None}
    with pytest.raises(BadPairError) as caught:
        to_pair(Record(fields, "f:2"), shape, raw=False)
    assert caught.value.reason == reason
    assert str(caught.value).startswith("f:2: ")
    assert str(caught.value).endswith("Remove it, or set data.on_bad: drop.")
    again = pickle.loads(pickle.dumps(caught.value))  # it has to come back from worker processes
    assert (str(again), again.reason) == (str(caught.value), reason)


# --- fuzz -----------------------------------------------------------------------------------------------


def junk(rng: random.Random) -> Any:
    deep: Any = "x"
    for _ in range(rng.choice([3, 400])):
        deep = [deep]
    values = [None, "", " ", 0, -1, 1.5, True, float("nan"), 10**400, [], {}, [[]], [{}], "\ud800", "\x00", deep]
    values += [{"role": "assistant"}, {"from": "gpt", "value": "x"}, [{"role": "user", "content": 3}], [GOOD, Q]]
    return copy.deepcopy(rng.choice(values))  # a later fault may reach into it


def broken(base: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """A copy of `base` with one to three faults, at the top or inside messages. Some are harmless."""
    record: dict[str, Any] = json.loads(json.dumps(base))
    for _ in range(rng.randint(1, 3)):
        places: list[tuple[Any, Any]] = [(record, key) for key in [*record, "weight", "system", "tools"]]
        for value in record.values():
            for turn in value if isinstance(value, list) else [value]:
                if isinstance(turn, dict):
                    places += [(turn, key) for key in turn]
        holder, key = rng.choice(places)
        if rng.random() < 0.3:
            holder.pop(key, None)
        elif rng.random() < 0.3 and "chosen" in record:
            record["rejected"] = record["chosen"]
        else:
            holder[key] = junk(rng)
    return record


BASES: dict[str, tuple[dict[str, Any], str | None]] = {
    "text": (TEXT, "none"),
    "alpaca": (ALPACA, "none"),
    "hh": (HH, "none"),
    "transcript": (TRANSCRIPT, "none"),
    "common_start": (COMMON_START, "none"),
    "messages": (MESSAGES, None),
    "conversations": (CONVERSATIONS, None),
    "sharegpt": (SHAREGPT, None),
    "label": (LABELLED, "none"),
    "label_chat": (LABELLED_CHAT, None),
    "list": (RESPONSES, "none"),
    "completions": (COMPLETIONS, "none"),
}


def oracle(shape: str, fields: dict[str, Any]) -> tuple[str, ...]:
    """What the sequences must say: straight from the record, without a check."""
    if shape == "label":
        return (fields["prompt"] + fields["completion"] + "</s>",)
    if shape == "label_chat":
        system = [{"role": "system", "content": fields["system"]}] if fields.get("system") else []
        return (chatml([*system, *fields["messages"]]),)
    if shape in ("list", "completions"):
        asked = fields.get("prompt") or fields["instruction"]
        return tuple(asked + answer + "</s>" for answer in scored_answers(fields))
    sides = (fields["chosen"], fields["rejected"])
    if shape == "text":
        return tuple(fields["prompt"] + side + "</s>" for side in sides)
    if shape == "alpaca":
        asked = "\n".join(part for part in (fields["instruction"], fields.get("input")) if part)
        return tuple(asked + side + "</s>" for side in sides)
    if shape in ("transcript", "common_start"):
        return tuple(side + "</s>" for side in sides)
    if shape == "hh":
        before = fields.get("prompt") or ""
        return tuple((side if side.startswith("\n\nHuman:") else before + side) + "</s>" for side in sides)
    system = [{"role": "system", "content": fields["system"]}] if fields.get("system") else []
    before = [*system, fields.get("prompt"), fields.get("conversations")]
    return tuple(chatml([*before, up_to_the_last_answer(side)]) for side in sides)


def up_to_the_last_answer(side: Any) -> Any:
    """Turns after the last one that is trained change nothing, and are not kept."""
    turns = list(side) if isinstance(side, list) else side
    while isinstance(turns, list) and turns and (turns[-1].get("role") or turns[-1].get("from")) in ("user", "human"):
        turns.pop()
    return turns


def scored_answers(fields: dict[str, Any]) -> list[str]:
    """The different answers of a list that have a score."""
    if "responses" in fields:
        scored = list(zip(fields["responses"], fields["scores"], strict=True))
    else:
        names = ("overall_score", "score", "rating")
        scored = [
            (one["response"], next((one[name] for name in names if one.get(name) is not None), None))
            for one in fields["completions"]
        ]
    unknown = (None, "", " ")
    return list(dict.fromkeys(answer for answer, score in scored if score not in unknown and score == score))


def chatml(turns: list[Any]) -> str:
    text = ""
    for turn in turns:
        if isinstance(turn, list):
            text += chatml(turn) + "\n" * bool(turn)
        elif turn is not None:
            role = "user" if isinstance(turn, str) else turn.get("role") or turn["from"]
            said = turn if isinstance(turn, str) else turn["content"] if "role" in turn else turn["value"]
            text += f"<|im_start|>{ {'human': 'user', 'gpt': 'assistant'}.get(role, role) }\n{said}<|im_end|>\n"
    return text.removesuffix("\n")


def refusal(record: Record, shape: Shape, encoder: PairEncoder) -> BadPairError:
    try:
        pair = to_pair(record, shape, raw=encoder.options.raw)
    except BadPairError as bad:
        return bad
    assert pair.tools, "of good records ChatML leaves out nothing else"
    (result,) = encoder.encode([pair])
    assert isinstance(result, BadPairError)
    return result


@pytest.mark.parametrize("shape", BASES)
def test_broken_records_are_errors_or_dropped_and_never_changed(shape: str, tmp_path: Path) -> None:
    rng = random.Random(f"fuzz {shape}")
    base, template = BASES[shape]
    records = [base, *(broken(base, rng) for _ in range(2000))]
    if template == "none":  # a system prompt or tools in raw text are an error of the config, whatever on_bad says
        for fields in records:
            fields.pop("system", None)
            fields.pop("tools", None)
    for fields in records:  # a rating among labels stops the run, too: see test_labels
        if type(fields.get("label")) in (int, float) and fields["label"] not in (0, 1):
            fields["label"] = "?"
    path = tmp_path / "fuzz.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    tokenizer = tiny_tokenizer("chatml")
    options = TokenizeOptions(template=template, max_length=None, truncation="drop", on_bad="drop")
    table = build_table([SourceSpec(str(path))], tokenizer, folder=tmp_path, options=options)
    assert table.stats.read == len(records) == len(table) + sum(table.stats.dropped.values())
    assert 50 < len(table) < 1500, "the fuzz must produce both kinds"

    kept = {}
    for index in range(len(table)):
        example = table.example(index)
        sequences = (np.concatenate([example.prompt, answer]) for answer in example.answers)
        kept[table.origin(index)] = tuple(tokenizer.decode(sequence) for sequence in sequences)
    reasons: Counter[str] = Counter()
    encoder = PairEncoder(tokenizer, options)
    found = detect_shape([Record(base, "")], raw=template == "none")
    for record in read_source(str(path)):
        if record.origin in kept:
            assert kept[record.origin] == oracle(shape, record.fields)
            continue
        bad = refusal(record, found, encoder)
        assert str(bad).startswith(f"{record.origin}: ")
        reasons[bad.reason] += 1
    assert reasons == table.stats.dropped


@pytest.mark.parametrize("column", ["prompt", "conversations"])
@pytest.mark.parametrize("on_bad", ["error", "drop"])
def test_whole_conversations_beside_a_prompt_are_told_once_for_the_source(
    tmp_path: Path, column: str, on_bad: Any
) -> None:
    """Not record by record: to drop those would drop all of them. The way out that is named works."""
    options = TokenizeOptions(template=None, max_length=None, truncation="drop", on_bad=on_bad)
    path = tmp_path / "a.jsonl"

    def build(records: list[dict[str, Any]]) -> int:
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        tokenizer = tiny_tokenizer("chatml")
        return len(build_table([SourceSpec(str(path))], tokenizer, folder=tmp_path, options=options))

    whole = [{column: [Q], **CONVERSATIONS} for _ in range(3)]
    with pytest.raises(DataError) as raised:
        build(whole)
    assert str(raised.value) == (
        f"{path}:1: 'chosen' and 'rejected' are whole conversations, but next to the column '{column}' they must begin "
        f"with the assistant turn after it. Remove the column '{column}' from the data, or the turns before the "
        "answers."
    )
    assert build([{key: value for key, value in record.items() if key != column} for record in whole]) == 3
    assert build([{column: [Q], "chosen": [GOOD], "rejected": [BAD]} for _ in range(3)]) == 3


def test_a_few_whole_conversations_beside_a_prompt_are_records_to_drop() -> None:
    records = [Record({"prompt": [Q], **CONVERSATIONS}, "a:1"), Record(MESSAGES, "a:2"), Record(MESSAGES, "a:3")]
    shape = detect_shape(records, raw=False)
    assert shape.name == "messages"
    with pytest.raises(BadPairError, match="'chosen' must begin with the assistant turn"):
        to_pair(records[0], shape, raw=False)
