"""Messages that a CSV file or another writer turned into text are read as the messages they were."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isopref.data.judged import BadPairError, PreferencePair
from isopref.data.pairs import SourceSpec, TokenizeOptions, build_table
from isopref.data.shapes import SHAPES, detect_shape, to_pair
from isopref.data.sources import Record
from isopref.errors import DataError
from isopref.testing.tokenizers import tiny_tokenizer
from support.records import BAD, GOOD, SHAPED, TEXT, ULTRAFEEDBACK, assistant, pair_of, user


def printed_by_numpy(value: Any) -> str:
    """What pandas writes to CSV for a column of lists that came from Parquet."""
    return str(np.array(value, dtype=object)) if isinstance(value, list) else str(value)


TRICKY = user("He said \"it's } {\"\n in C: {} {}, [{'role': 'user'}] and \\n")
WRITERS: list[Callable[[Any], str]] = [json.dumps, str, printed_by_numpy, lambda value: json.dumps(value, indent=1)]


def as_text(fields: dict[str, Any], write: Callable[[Any], str]) -> dict[str, Any]:
    return {key: value if isinstance(value, str | float) else write(value) for key, value in fields.items()}


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize(
    ("name", "fields", "prompt", "chosen", "rejected"),
    [case for case in SHAPED if not SHAPES[case[0]].has_raw],
)
def test_messages_written_as_text_are_read(
    name: str, fields: dict[str, Any], prompt: Any, chosen: Any, rejected: Any, write: Callable[[Any], str]
) -> None:
    text = as_text(fields, write)
    assert isinstance(text["chosen"], str)
    assert detect_shape([Record(text, "f:1")], raw=False).name == name
    assert pair_of(text) == PreferencePair(prompt, chosen, rejected, None, 1.0, "file:7")


@pytest.mark.parametrize("write", WRITERS)
def test_characters_in_messages_written_as_text_are_kept(write: Callable[[Any], str]) -> None:
    long = assistant("because } { " * 20)
    pair = pair_of(as_text({"chosen": [TRICKY, long], "rejected": [TRICKY, BAD]}, write))
    assert (pair.prompt, pair.chosen, pair.rejected) == ([TRICKY], [long], [BAD])


def test_one_odd_text_decides_nothing() -> None:
    odd = TEXT | {side: json.dumps([message]) for side, message in (("chosen", GOOD), ("rejected", BAD))}
    records = [Record(odd, "f:1"), Record(TEXT, "f:2"), Record(TEXT, "f:3")]
    shape = detect_shape(records, raw=False)
    assert shape.name == "text"
    assert to_pair(records[0], shape, raw=False).answers[0] == odd["chosen"]

    records = [Record(TEXT, "f:1"), Record(odd, "f:2"), Record(odd, "f:3")]
    shape = detect_shape(records, raw=False)
    assert shape.name == "messages"
    assert to_pair(records[1], shape, raw=False).answers[0] == [GOOD]
    with pytest.raises(BadPairError, match=r"f:1: '\w+' is messages written as text in this source, but here it is"):
        to_pair(records[0], shape, raw=False)
    cut = odd | {"chosen": odd["chosen"][:-9]}
    with pytest.raises(BadPairError, match=r"f:4: 'chosen' is messages written as text in this source"):
        to_pair(Record(cut, "f:4"), shape, raw=False)


def test_messages_written_in_another_way_are_refused() -> None:
    text = f"[{{'role': 'user', 'content': array(['why?'], dtype=object)}} {GOOD}]"
    with pytest.raises(DataError, match=r"f:1: 'chosen' looks like messages.*Write the file as JSONL or Parquet"):
        detect_shape([Record({"chosen": text, "rejected": text}, "f:1")], raw=False)


@pytest.mark.parametrize("text", ['{"from": "a", "to": "b"}', '[{"value": 3}]', "[{'role': 'x'}]", "{content: 'a'}"])
def test_objects_that_are_no_messages_stay_text(text: str) -> None:
    assert pair_of(TEXT | {"prompt": text, "chosen": text}).chosen == text


def test_conversations_that_pandas_wrote_to_csv(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(ULTRAFEEDBACK))
        writer.writeheader()
        writer.writerows([as_text(ULTRAFEEDBACK, printed_by_numpy)] * 3)
    tokenizer = tiny_tokenizer("chatml")
    options = TokenizeOptions(template=None, max_length=None, truncation="drop", on_bad="error")
    table = build_table([SourceSpec(str(path))], tokenizer, folder=tmp_path, options=options)
    assert table.stats.sources[0].shape == "ultrafeedback"
    tokens = table.example(0)
    assert tokenizer.decode(tokens.prompt) == "<|im_start|>user\nwhy?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(tokens.answers[0]) == "because<|im_end|>"
