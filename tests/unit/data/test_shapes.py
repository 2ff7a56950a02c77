"""Every shape of record is found by itself and split into a prompt and two answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from isopref.data.judged import BadPairError, PreferencePair
from isopref.data.shapes import SHAPES, detect_shape, to_pair
from isopref.data.sources import Record, read_source
from isopref.errors import DataError
from support.records import (
    BAD,
    GOOD,
    HH,
    HH_PROMPT,
    HH_TURNS,
    SHAPED,
    SHAREGPT,
    SYSTEM,
    TEXT,
    Q,
    assistant,
    pair_of,
    user,
)

SHARED = Path(__file__).parents[4] / "shared" / "data" / "dpo_en_demo.json"  # beside the checkout, where it is


@pytest.mark.parametrize(("name", "fields", "prompt", "chosen", "rejected"), SHAPED)
def test_every_shape_is_found_and_split(
    name: str, fields: dict[str, Any], prompt: Any, chosen: Any, rejected: Any
) -> None:
    assert detect_shape([Record(fields, "f:1")], raw=False).name == name
    assert [shape.name for shape in SHAPES.values() if shape.fits(fields)] == [name], "no two shapes fit a record"
    assert pair_of(fields) == PreferencePair(prompt, chosen, rejected, None, 1.0, "file:7")


def test_hh_without_a_template_keeps_the_text_as_it_stands() -> None:
    for fields in (HH, {"prompt": HH_PROMPT, "chosen": " because", "rejected": " dunno"}):
        pair = pair_of(fields, raw=True)
        assert (pair.prompt, pair.chosen, pair.rejected) == (HH_PROMPT, " because", " dunno")


def test_messages_without_a_template_are_refused_by_name() -> None:
    with pytest.raises(DataError, match=r"f:1: records of shape 'sharegpt'.*data\.template: path\.jinja"):
        detect_shape([Record(SHAREGPT, "f:1")], raw=True)


def test_optional_columns() -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    pair = pair_of(TEXT | {"system": "be brief", "tools": json.dumps(tools), "weight": "2.5"})
    assert (pair.prompt, pair.tools, pair.weight) == ([SYSTEM, Q], tools, 2.5)
    assert pair_of(TEXT | {"system": "", "tools": [], "weight": None}) == pair_of(TEXT)
    assert pair_of(HH | {"system": "be brief"}).prompt == [SYSTEM, *HH_TURNS]


@pytest.mark.parametrize(("column", "value"), [("system", "be brief"), ("tools", '[{"name": "add"}]')])
def test_columns_that_have_no_place_in_raw_text(column: str, value: str) -> None:
    assert pair_of(TEXT | {"tools": "[]"}, raw=True).tools is None
    with pytest.raises(DataError, match=f"file:7: the column '{column}'") as caught:
        pair_of(TEXT | {column: value}, raw=True)
    assert not isinstance(caught.value, BadPairError)  # the config is wrong, not the record


def test_sharegpt_tool_roles_are_mapped() -> None:
    call = {"name": "add", "arguments": {"a": 1}}
    turns = [
        {"from": "human", "value": "1+1?"},
        {"from": "function_call", "value": json.dumps(call)},
        {"from": "observation", "value": "2"},
    ]
    assert pair_of(SHAREGPT | {"conversations": turns}).prompt == [
        user("1+1?"),
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "content": "2"},
    ]


def test_keys_of_a_message_that_hold_none_are_left_out() -> None:
    turn = {"role": "user", "content": "why?", "tool_calls": None, "name": None}
    assert pair_of({"prompt": [turn], "chosen": [GOOD], "rejected": [BAD]}).prompt == [Q]


def test_text_in_parts_is_joined() -> None:
    parts = [{"type": "text", "text": "wh"}, {"type": "text", "text": "y?"}]
    pair = pair_of({"prompt": [{"role": "user", "content": parts}], "chosen": [GOOD], "rejected": [BAD]})
    assert pair.prompt == [Q]


@pytest.mark.parametrize(
    ("part", "what"),
    [
        ({"type": "image_url", "image_url": {"url": "x.png"}}, "has a part of type 'image_url'"),
        ({"text": "why?"}, "has a part of type None"),
        ({"type": "text", "text": 3}, "is not text but int 3"),
        ("why?", "is not text but list"),
    ],
)
def test_other_parts_are_refused_by_their_type(part: Any, what: str) -> None:
    turn = {"role": "user", "content": [{"type": "text", "text": "see"}, part]}
    with pytest.raises(BadPairError, match=rf"file:7: .?prompt\[0\].? {what}") as caught:
        pair_of({"prompt": [turn], "chosen": [GOOD], "rejected": [BAD]})
    assert caught.value.reason == "type"


UNKNOWN: list[dict[str, Any]] = [
    {"question": "why?", "chosen": "because", "rejected": "dunno"},
    {"instruction": "why?", "output": ["because", "dunno"]},
    SHAREGPT | {"prompt": "why?"},  # two prompts: which?
    {"prompt": "why?", "chosen": "because", "rejected": [BAD]},
    {},
]


@pytest.mark.parametrize("fields", UNKNOWN)
def test_an_unknown_shape_lists_columns_shapes_and_the_way_out(fields: dict[str, Any]) -> None:
    with pytest.raises(DataError) as caught:
        detect_shape([Record(fields, "f:1")], raw=False)
    for part in ("f:1: ", "data.columns", "sharegpt", "ultrafeedback", "hh", "text", *fields):
        assert part in str(caught.value)


RENAMED: list[tuple[dict[str, Any], str]] = [
    ({"question": "why?", "chosen": "a", "rejected": "b"}, "{prompt: question}"),
    ({"Prompt": "why?", "Chosen": "a", "Rejected": "b"}, "{prompt: Prompt, chosen: Chosen, rejected: Rejected}"),
    (
        {"prompt": "why?", "chosen_response": "a", "rejected_response": "b", "id": 1},
        "{chosen: chosen_response, rejected: rejected_response}",
    ),
    ({"messages": [Q], "chosen": "a", "rejected": "b"}, "{prompt: messages}"),
    (
        {"instruction": "why?", "input": "", "accepted": "a", "output_reject": "b"},
        "{chosen: accepted, rejected: output_reject}",
    ),
    (
        {"query": "why?", "answerGood": "a", "bad answer:": "b"},
        '{prompt: query, chosen: answerGood, rejected: "bad answer:"}',
    ),
    ({"prompt": None, "problem": "why?", "chosen": "a", "rejected": "b"}, "{prompt: problem}"),
    ({"CHOSEN": HH["chosen"], "REJECTED": HH["rejected"]}, "{chosen: CHOSEN, rejected: REJECTED}"),
]


@pytest.mark.parametrize(("fields", "columns"), RENAMED)
def test_columns_of_other_names_are_suggested_as_they_work(
    fields: dict[str, Any], columns: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError) as caught:
        detect_shape([Record(fields, "f:1")], raw=False)
    assert f" Set data.columns={columns}. Supported shapes:" in str(caught.value)
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(fields))
    assert detect_shape(list(read_source(str(path), columns=yaml.safe_load(columns))), raw=False)


def test_a_suggestion_keeps_the_columns_that_are_set_and_only_names_what_would_do() -> None:
    first = Record({"question": "why?", "chosen": "a", "rejected": "b"}, "f:1")
    with pytest.raises(DataError, match=r"Set data\.columns=\{chosen: good, prompt: question\}\. "):
        detect_shape([first], raw=False, columns={"chosen": "good", "prompt": "qestion"})
    with pytest.raises(DataError, match=r"Rename columns with data\.columns \(ours: theirs\)\. "):
        detect_shape([Record({"question": 3, "chosen": "a", "rejected": "b"}, "f:1")], raw=False)


def test_answers_alone_name_the_column_that_may_be_the_prompt() -> None:
    with pytest.raises(BadPairError, match=r"'messages' is not read \(data\.columns=\{prompt: messages\} reads it\)"):
        pair_of({"messages": [Q], "chosen": [GOOD], "rejected": [BAD]})


def test_the_first_record_with_a_shape_decides_for_the_source() -> None:
    records = [Record({"prompt": "p"}, "f:1"), Record(TEXT, "f:2"), Record(HH, "f:3")]
    shape = detect_shape(records, raw=False)
    assert shape.name == "text"
    with pytest.raises(BadPairError, match="f:1: 'chosen' is missing"):
        to_pair(records[0], shape, raw=False)
    with pytest.raises(BadPairError, match="f:3: shape 'hh' in a source of shape 'text'"):
        to_pair(records[2], shape, raw=False)


@pytest.mark.skipif(not SHARED.exists(), reason="needs the shared data folder")
def test_a_real_sharegpt_file_reads_whole() -> None:
    source = read_source(str(SHARED))
    records = list(source)
    shape = detect_shape(records, raw=False)
    assert (source.format, shape.name) == ("json", "sharegpt")
    for record in records:
        pair = to_pair(record, shape, raw=False)
        assert [turn["content"] for turn in pair.prompt if isinstance(turn, dict)] == [
            turn["value"] for turn in record.fields["conversations"]
        ]
        assert pair.answers[0] == [assistant(record.fields["chosen"]["value"])]
        assert pair.answers[1] == [assistant(record.fields["rejected"]["value"])]
