"""Alpaca's records: what is joined to the instruction, earlier turns, and what is refused."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from isopref.data.judged import BadPairError
from isopref.data.pairs import ExampleTable, SourceSpec, TokenizeOptions, build_table
from isopref.data.shapes import detect_shape, to_pair
from isopref.data.sources import Record
from isopref.errors import ConfigError, DataError
from isopref.testing.tokenizers import tiny_tokenizer
from support.records import ALPACA, HH, HISTORY, SYSTEM, Q, assistant, pair_of, user

EARLIER = [user("hi"), assistant("hello")]


def build(path: Path, template: str | None = None, columns: dict[str, str] | None = None) -> ExampleTable:
    options = TokenizeOptions(template=template, max_length=None, truncation="drop", on_bad="error")
    return build_table([SourceSpec(str(path), columns)], tiny_tokenizer("chatml"), folder=path.parent, options=options)


@pytest.mark.parametrize(
    ("change", "prompt"),
    [
        ({}, "why?"),
        ({"input": None}, "why?"),
        ({"input": "a text"}, "why?\na text"),
        ({"instruction": "", "input": "a text"}, "a text"),
        ({"history": ""}, "why?"),
        ({"history": HISTORY, "input": "a text"}, [*EARLIER, user("why?\na text")]),
        ({"history": HISTORY * 2}, [*EARLIER, *EARLIER, Q]),
        ({"history": [("hi", "hello")]}, [*EARLIER, Q]),
        ({"history": json.dumps(HISTORY)}, [*EARLIER, Q]),  # as a CSV file has it
        ({"history": str(HISTORY)}, [*EARLIER, Q]),
        ({"system": "be brief"}, [SYSTEM, Q]),
        ({"system": "be brief", "history": HISTORY}, [SYSTEM, *EARLIER, Q]),
    ],
)
def test_parts_are_joined_as_llama_factory_does(change: dict[str, Any], prompt: Any) -> None:
    pair = pair_of(ALPACA | change)
    assert (pair.prompt, pair.chosen, pair.rejected) == (prompt, "because", "dunno")


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"input": 3}, "'input' is not text but int 3"),
        ({"instruction": "", "input": ""}, "'prompt' is empty"),
        ({"instruction": 3}, "'instruction' is neither text nor messages but int 3"),
        ({"instruction": None}, "the columns {'instruction': 'absent', 'chosen': 'text', 'rejected': 'text'} do not"),
        ({"history": "hi"}, r"'history' is not a list of [user, assistant] turns but str 'hi'"),
        ({"history": {"hi": "hello"}}, "'history' is not a list of [user, assistant] turns but dict {'hi'"),
        ({"history": ["hi", "hello"]}, "'history[0]' is not a [user, assistant] turn but str 'hi'"),
        ({"history": [*HISTORY, ["hi"]]}, "'history[1]' is not a [user, assistant] turn but list ['hi']"),
        ({"history": [["hi", None]]}, "'history[0]' is not text but NoneType None"),
        ({"rejected": "because"}, "'chosen' equals 'rejected'"),
    ],
)
def test_what_gives_no_pair(change: dict[str, Any], what: str) -> None:
    shape = detect_shape([Record(ALPACA, "f:1")], raw=False)
    with pytest.raises(BadPairError) as caught:
        to_pair(Record(ALPACA | change, "f:2"), shape, raw=False)
    assert str(caught.value).startswith(f"f:2: {what}")


def test_a_prompt_or_a_transcript_is_not_joined_with_anything() -> None:
    assert pair_of(ALPACA | {"prompt": "what?"}).prompt == "what?"
    assert detect_shape([Record(ALPACA | HH, "f:1")], raw=False).name == "hh"


def test_without_a_template_earlier_turns_have_no_place() -> None:
    assert pair_of(ALPACA | {"input": "a text", "history": []}, raw=True).prompt == "why?\na text"
    with pytest.raises(DataError, match="file:7: the column 'history' has no place in plain text") as caught:
        pair_of(ALPACA | {"history": HISTORY}, raw=True)
    assert not isinstance(caught.value, BadPairError)


def test_columns_of_other_names(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    record = {"question": "why?", "context": "a text", "chosen": "because", "rejected": "dunno"}
    path.write_text(json.dumps(record) + "\n")
    table = build(path, "none", {"instruction": "question", "input": "context"})
    assert tiny_tokenizer("chatml").decode(table.example(0).prompt) == "why?\na text"
    with pytest.raises(DataError) as caught:
        build(path, columns={"prompt": "question", "input": "context"})
    assert str(caught.value) == (
        f"{path}:1: data.columns reads 'context' as input, but a source of shape 'text' has no such column (prompt, "
        "chosen, rejected: text). Remove input from data.columns, or read the prompt's column as instruction, which "
        "input and history belong to."
    )
    with pytest.raises(ConfigError, match="the column 'chosen' is read as instruction, so nothing is read as chosen"):
        build(path, columns={"instruction": "chosen"})


def test_a_csv_file_as_a_whole(tmp_path: Path) -> None:
    """Tokens as worked out by hand; every column is used."""
    path = tmp_path / "a.csv"
    rows = [
        {"instruction": "why?", "input": "a text", "history": str(HISTORY), "system": "be brief"},
        {"instruction": "who?", "input": "", "history": "", "system": ""},
    ]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], "chosen", "rejected"])
        writer.writeheader()
        writer.writerows({**row, "chosen": "because", "rejected": "dunno"} for row in rows)
    table = build(path)
    (found,) = table.stats.sources
    assert (found.shape, found.unused_columns, found.unused_inputs) == ("alpaca", (), 0)
    decode = tiny_tokenizer("chatml").decode
    assert decode(table.example(0).prompt) == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\nhello<|im_end|>\n"
        "<|im_start|>user\nwhy?\na text<|im_end|>\n<|im_start|>assistant\n"
    )
    assert decode(table.example(1).prompt) == "<|im_start|>user\nwho?<|im_end|>\n<|im_start|>assistant\n"
