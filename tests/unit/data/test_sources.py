"""Formats, places, digests, and one clear error for each way a source can be broken."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from isopref.data.sources import read_source
from isopref.errors import ConfigError, DataError

ROWS = [
    {"prompt": "Why?", "chosen": "Because.", "rejected": "No idea."},
    {"prompt": "U+2028 \u2028 is no line end", "chosen": "für\nzwei Zeilen", "rejected": "😀"},
    {"prompt": "c", "chosen": "d, with \"quotes\"", "rejected": "e"},
]  # fmt: skip


def jsonl(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def delimited(rows: list[dict[str, Any]], delimiter: str) -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def arrow(rows: list[dict[str, Any]], open_writer: Callable[..., Any]) -> bytes:
    table = pa.Table.from_pylist(rows)
    sink = pa.BufferOutputStream()
    with open_writer(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return bytes(sink.getvalue())


def parquet(rows: list[dict[str, Any]], kind: pa.DataType | None = None) -> bytes:
    """With `kind`, the type of all columns."""
    sink = pa.BufferOutputStream()
    schema = None if kind is None else pa.schema(dict.fromkeys(rows[0], kind))
    pq.write_table(pa.Table.from_pylist(rows, schema), sink, row_group_size=2)
    return bytes(sink.getvalue())


def twice() -> bytes:
    """A Parquet file with two columns of one name."""
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_arrays([pa.array(["b"]), pa.array(["c"])], ["a", "a"]), sink)
    return bytes(sink.getvalue())


FILES = [
    ("a.jsonl", jsonl(ROWS), "jsonl", [":1", ":2", ":3"]),
    ("a.ndjson", b"\xef\xbb\xbf\n" + jsonl(ROWS).replace(b"\n", b"\r\n\r\n"), "jsonl", [":2", ":4", ":6"]),
    ("a.json", json.dumps(ROWS, indent=1).encode(), "json", [":[0]", ":[1]", ":[2]"]),
    ("lines.json", jsonl(ROWS), "jsonl", [":1", ":2", ":3"]),
    ("no_suffix", b"  \n" + json.dumps(ROWS).encode(), "json", [":[0]", ":[1]", ":[2]"]),
    ("a.jsonl.gz", gzip.compress(jsonl(ROWS)), "jsonl.gz", [":1", ":2", ":3"]),
    ("a.json.gz", gzip.compress(json.dumps(ROWS).encode()), "json.gz", [":[0]", ":[1]", ":[2]"]),
    ("a.csv", delimited(ROWS, ","), "csv", [":2", ":3", ":5"]),  # the second record has two lines
    ("a.tsv", delimited(ROWS, "\t"), "tsv", [":2", ":3", ":5"]),
    ("a.csv.gz", gzip.compress(delimited(ROWS, ",")), "csv.gz", [":2", ":3", ":5"]),
    ("a.parquet", parquet(ROWS), "parquet", [":row 0", ":row 1", ":row 2"]),
    ("file.arrow", arrow(ROWS, pa.ipc.new_file), "arrow", [":row 0", ":row 1", ":row 2"]),
    ("stream.arrow", arrow(ROWS, pa.ipc.new_stream), "arrow", [":row 0", ":row 1", ":row 2"]),
]


@pytest.mark.parametrize(("name", "content", "kind", "places"), FILES, ids=[file[0] for file in FILES])
def test_reads_every_format(tmp_path: Path, name: str, content: bytes, kind: str, places: list[str]) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    source = read_source(str(path))
    assert source.format == kind
    for _ in range(2):  # a source can be read again
        records = list(source)
        assert [record.fields for record in records] == ROWS
        assert [record.origin for record in records] == [f"{path}{place}" for place in places]


GOOD = jsonl(ROWS)
BROKEN = [
    ("empty.jsonl", b"", "{path}: the file is empty"),
    ("blank.json", b" \n\t\n", "{path}: the file is empty"),
    ("array.json", b"[]", "source has no records"),
    ("header.csv", b"prompt,chosen\n", "{path}: this csv source has no records"),
    ("cut.jsonl", GOOD + b'{"prompt": "x', "{path}:4: not valid JSON"),
    ("list.jsonl", GOOD + b"[1, 2]\n", "{path}:4: a record must be a JSON object, but this is a list"),
    ("null.json", b'[{"a": 1},\n null]', "{path}:[1]: a record must be a JSON object, but this is a NoneType"),
    ("broken.json", b'[{"a": 1},\n {"a": }]', "{path}:2: not valid JSON"),
    ("one_line.json", b'[{"a": 1}, {"a": }]', "{path}:1: not valid JSON"),
    ("pretty.json", b'{\n "a": 1\n}', "An object over several lines is not read: put each on one line, or all into"),
    ("latin.jsonl", GOOD + "für".encode("latin-1"), "{path}:4: not UTF-8"),
    ("latin_too.jsonl", GOOD + "für".encode("latin-1"), "Convert it: iconv -f LATIN1 -t UTF-8"),
    ("excel.csv", delimited(ROWS, ",").decode().encode("utf-16"), "Convert it: iconv -f UTF-16 -t UTF-8"),
    ("latin.csv", b"a,b\n1,2\n\xff,3\n", "{path}:3: not UTF-8"),
    ("digits.jsonl", b'{"a": ' + b"1" * 5000 + b"}", "{path}:1: JSON that cannot be read"),
    ("deep.jsonl", b'{"a": ' + b"[" * 100_000 + b"}", "{path}:1: "),
    ("cut.jsonl.gz", gzip.compress(jsonl(ROWS * 5000))[:-300], ": read failed ("),
    ("cells.csv", b'a,b\n1,"2\n"\n1,2,3\n', "{path}:4: 3 cells, but the header names 2 columns"),
    ("quotes.csv", b'a,b\n1,2\n1,"2" 3\n', "{path}:3: not valid CSV"),
    ("twice.csv", b"a,a\n1,2\n", "{path}:1: duplicate column name in"),
    (
        "semicolons.csv",
        b"prompt;chosen\na;b, c\n",
        "{path}:1: the header has one column, 'prompt;chosen', which seems to be separated by semicolons.",
    ),
    ("tabs.csv", delimited(ROWS, "\t"), "by tabs. A .csv file is separated by commas, a .tsv file by tabs."),
    ("commas.tsv", delimited(ROWS, ","), "which seems to be separated by commas."),
    ("cut.parquet", parquet(ROWS)[:-9], "{path}: cannot be read"),
    ("cut.arrow", arrow(ROWS, pa.ipc.new_file)[:-9], "{path}:row 0: cannot be read"),
    ("twice.parquet", twice(), "{path}: duplicate column name in ['a', 'a']. Rename one of the columns."),
    ("late.parquet", parquet([{"a": 2**60}], pa.timestamp("ms")), "{path}:row 0: cannot be read"),
    ("zipped.parquet.gz", gzip.compress(parquet(ROWS)), "{path}: a gzipped .parquet file"),
    ("photo.bin", b"\x89PNG\r\n", "{path}: unknown format. Supported: JSONL"),
]


@pytest.mark.parametrize(("name", "content", "message"), BROKEN, ids=[file[0] for file in BROKEN])
def test_a_broken_file_is_one_clear_error(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        list(read_source(str(path)))
    assert message.format(path=path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_may_not_be_read_is_not_said_to_be_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, *_: Any) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    (tmp_path / "a.jsonl").write_bytes(GOOD)
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DataError, match=r"a\.jsonl: cannot be read \(Permission denied\)\. Check its permissions\.$"):
        read_source(str(tmp_path / "a.jsonl"))


def test_a_pipe_is_refused_before_it_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match=r"pipe: a pipe or a device.*Write the data to a file\.$"):
        read_source(str(tmp_path / "pipe"))


def test_broken_rows_come_after_the_good_ones(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(GOOD + b"{")
    records = iter(read_source(str(path)))
    assert [next(records).fields for _ in ROWS] == ROWS
    with pytest.raises(DataError, match=":4: not valid JSON"):
        next(records)


@pytest.mark.parametrize(
    "spec",
    [
        "missing.jsonl",
        "./missing",
        "/no/such/place/x",
        "a/b/c",
        "data/pairs.parquet",
        "0.2",
        "20%",
        "https://a.b/c/d?e",
    ],
)
def test_a_missing_file_is_not_asked_of_the_hub(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(DataError, match="no such file or folder") as caught:
        read_source(spec)
    assert str(Path(spec).absolute()) in str(caught.value)
    assert ("a number without quotes" in str(caught.value)) == spec.startswith(("0", "2"))
    assert ("download the file" in str(caught.value)) == spec.startswith("https")


def test_columns_are_renamed(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl([{"question": "q", "prompt": "not this", "chosen": "c", "bad": "r"}, {"chosen": "c"}]))
    records = read_source(str(path), columns={"prompt": "question", "rejected": "bad"})
    assert [record.fields for record in records] == [
        {"prompt": "q", "chosen": "c", "rejected": "r"},
        {"chosen": "c"},
    ]


def test_columns_can_be_swapped(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl([{"prompt": "p", "chosen": "bad", "rejected": "good"}]))
    (record,) = read_source(str(path), columns={"chosen": "rejected", "rejected": "chosen"})
    assert record.fields == {"prompt": "p", "chosen": "good", "rejected": "bad"}


def test_a_renamed_column_that_no_record_has_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(GOOD)
    with pytest.raises(DataError, match="wieght"):
        list(read_source(str(path), columns={"weight": "wieght"}))


def test_csv_cells_are_text_and_absence_is_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(delimited([{"chosen": '[{"role": "assistant"}]', "system": "", "prompt": "[{ no json"}], ","))
    (record,) = read_source(str(path))
    assert record.fields == {"chosen": '[{"role": "assistant"}]', "system": None, "prompt": "[{ no json"}


def test_a_long_csv_cell_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b"prompt\n" + b"x" * 200_000 + b"\n")
    (record,) = read_source(str(path))
    assert len(record.fields["prompt"]) == 200_000


def test_the_digest_follows_the_bytes_and_not_the_name(tmp_path: Path) -> None:
    first, second, third = (tmp_path / name for name in ("a.jsonl", "b.jsonl", "c.jsonl"))
    for path in (first, second):
        path.write_bytes(GOOD)
    third.write_bytes(GOOD.replace(b"Why", b"why"))
    digests = [read_source(str(path)).digest() for path in (first, second, third)]
    assert digests[0] == digests[1] != digests[2]


# --- columns of structs: every record has every key ----------------------------------------------------


def called(name: str, **arguments: Any) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    tool = {"name": name, "parameters": {"properties": {key: {"enum": ["a", None]} for key in arguments}}}
    return {"chosen": [{"role": "assistant", "content": "", "tool_calls": [call]}], "tools": [tool], "weight": None}


CALLS = [called("weather", city="Paris"), called("search", query="x", limit=3), called("now")]


CALL_FILES = {
    "a.jsonl": jsonl(CALLS),
    "a.parquet": parquet(CALLS),
    "file.arrow": arrow(CALLS, pa.ipc.new_file),
    "stream.arrow": arrow(CALLS, pa.ipc.new_stream),
}


@pytest.mark.parametrize("name", [*CALL_FILES, "saved"])
def test_keys_of_other_records_are_not_read(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name in CALL_FILES:
        path.write_bytes(CALL_FILES[name])
    else:
        datasets.Dataset.from_list(CALLS).save_to_disk(path)
    assert [record.fields for record in read_source(str(path))] == CALLS


@pytest.mark.skipif(not hasattr(datasets, "Json"), reason="datasets knows no JSON columns before 4.7")
def test_a_null_in_json_was_written_by_its_author(tmp_path: Path) -> None:
    rows = [called("search", query="x", limit=None), called("search", query=None, limit=3)]
    (tmp_path / "a.jsonl").write_bytes(jsonl(rows))
    (tmp_path / "a.json").write_text(json.dumps(rows))
    features = datasets.Features({"chosen": datasets.List(datasets.Json()), "tools": datasets.List(datasets.Json())})
    kept = [{key: row[key] for key in features} for row in rows]
    datasets.Dataset.from_list(kept, features=features).save_to_disk(tmp_path / "saved")
    for name, expected in (("a.jsonl", rows), ("a.json", rows), ("saved", kept)):
        assert [record.fields for record in read_source(str(tmp_path / name))] == expected


# --- saved data sets, packages ---------------------------------------------------------------------------


def test_a_saved_data_set_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    datasets.Dataset.from_list(ROWS).save_to_disk(folder)
    source = read_source(str(folder))
    assert (source.format, source.count()) == ("saved data set", 3)
    assert [(record.fields, record.origin) for record in source] == [
        (row, f"{folder}:row {number}") for number, row in enumerate(ROWS)
    ]
    copy = shutil.copytree(folder, tmp_path / "copy")
    assert read_source(str(copy)).digest() == source.digest()
    datasets.Dataset.from_list(ROWS[:2]).save_to_disk(tmp_path / "other")
    assert read_source(str(tmp_path / "other")).digest() != source.digest()


def test_a_split_of_a_saved_data_set_is_named_or_train(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    splits = {"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list(ROWS[:1])}
    datasets.DatasetDict(splits).save_to_disk(folder)
    assert len(list(read_source(str(folder)))) == 3
    (record,) = read_source(f"{folder}:test")
    assert record.origin == f"{folder}:test:row 0"
    assert list(read_source(str(folder), split="test")) == [record]
    with pytest.raises(DataError, match=r"no split 'dev'.*\['test', 'train'\]"):
        read_source(f"{folder}:dev")


def test_a_file_in_a_package_is_found_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "pairs_in_a_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "train.jsonl").write_bytes(GOOD)
    monkeypatch.syspath_prepend(tmp_path)
    spec = "package:pairs_in_a_package/train.jsonl"
    assert [record.origin for record in read_source(spec)] == [f"{spec}:{line}" for line in (1, 2, 3)]
    with pytest.raises(ConfigError, match=r"has no file 'dev\.jsonl'"):
        read_source("package:pairs_in_a_package/dev.jsonl")
    with pytest.raises(ConfigError, match="package 'no_such_package' is not installed"):
        read_source("package:no_such_package/x.jsonl")
