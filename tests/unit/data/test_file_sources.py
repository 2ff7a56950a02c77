"""Several files as one source: a folder, a pattern; and what does not belong together."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import datasets
import pytest

from isopref.data.sources import read_source
from isopref.errors import DataError


def rows(*prompts: str) -> str:
    return "".join(json.dumps({"prompt": prompt, "chosen": "a", "rejected": "b"}) + "\n" for prompt in prompts)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two files of lines in data/, with what else may lie there."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "2.jsonl").write_text(rows("c"))
    (folder / "10.jsonl").write_text(rows("a", "b"))
    (folder / "README.md").write_text("# pairs")
    (folder / ".10.jsonl").write_text("{")
    return folder


def test_a_name_that_is_not_utf_8(folder: Path) -> None:
    (folder / "10.jsonl").rename(folder / "1\udcff.jsonl")
    places = [record.origin for record in read_source("data")]
    assert places == [r"data/1\udcff.jsonl:1", r"data/1\udcff.jsonl:2", "data/2.jsonl:1"]


@pytest.mark.parametrize(
    "spec", ["data", "data/", "./data", "data/*.jsonl", "d?ta/*.jsonl", "data/[0-9]*", "**/*.jsonl"]
)
def test_files_are_read_in_the_order_of_their_names(folder: Path, spec: str) -> None:
    source = read_source(spec)
    assert (source.name, source.format, source.count()) == (spec, "2 files, jsonl", 3)
    start = "./data/" if spec.startswith(".") else "data/"
    for _ in range(2):  # a source can be read again
        assert [(record.fields["prompt"], record.origin) for record in source] == [
            ("a", f"{start}10.jsonl:1"),
            ("b", f"{start}10.jsonl:2"),
            ("c", f"{start}2.jsonl:1"),
        ]


def test_a_pattern_from_the_root_and_in_the_home_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    absolute = read_source(f"{folder}/*.jsonl")
    assert [record.origin for record in absolute] == [
        f"{folder}/{place}" for place in ("10.jsonl:1", "10.jsonl:2", "2.jsonl:1")
    ]
    monkeypatch.setenv("HOME", str(folder.parent))
    assert [record.origin for record in read_source("~/data/2*")] == ["~/data/2.jsonl:1"]
    assert read_source("~/data/2*").format == "jsonl"


def test_a_file_that_is_called_like_a_pattern_is_that_file(folder: Path) -> None:
    (folder / "[2].jsonl").write_text(rows("x"))
    assert [record.fields["prompt"] for record in read_source("data/[2].jsonl")] == ["x"]


def test_compressed_files_and_others_are_of_one_format(folder: Path) -> None:
    (folder / "3.jsonl.gz").write_bytes(gzip.compress(rows("d").encode()))
    source = read_source("data")
    assert (source.format, source.count()) == ("3 files, jsonl and jsonl.gz", None)
    assert [record.origin for record in source][-1] == "data/3.jsonl.gz:1"


def test_the_digest_follows_content_and_names_of_all_files(folder: Path) -> None:
    source = read_source("data")
    first = source.digest()
    assert read_source("data/*.jsonl").digest() == first
    (folder / "2.jsonl").write_text(rows("d"))
    other = source.digest()
    (folder / "2.jsonl").rename(folder / "3.jsonl")
    renamed = source.digest()
    (folder / "4.jsonl").write_text(rows("e"))
    assert len({first, other, renamed, source.digest()}) == 4
    folder.rename(folder.parent / "moved")
    (folder.parent / "moved" / "4.jsonl").unlink()
    assert read_source("moved").digest() == renamed


def test_a_broken_file_among_them_is_named(folder: Path) -> None:
    (folder / "3.jsonl").write_text(rows("x") + "{")
    with pytest.raises(DataError, match=r"^data/3\.jsonl:2: not valid JSON"):
        list(read_source("data"))
    (folder / "3.jsonl").write_text("")
    for spec in ("data", "data/*.jsonl"):
        with pytest.raises(DataError, match=r"^data/3\.jsonl: the file is empty"):
            read_source(spec)


def test_several_formats_are_refused_and_the_way_out_works(folder: Path) -> None:
    (folder / "metrics.csv").write_text("step,loss\n1,2\n")
    (folder / "info.json").write_text("{}")
    for spec in ("data", "data/[!R]*"):
        with pytest.raises(DataError) as caught:
            read_source(spec)
        assert str(caught.value) == (
            f"{spec}: files of several formats (jsonl: 10.jsonl, 2.jsonl; json: info.json; csv: metrics.csv), but a "
            "source must have one. Select one with a pattern, as in data/*.jsonl, or list each format as a separate "
            "source."
        )
    assert len(list(read_source("data/*.jsonl"))) == 3


def test_arrays_and_lines_in_json_files_are_one_format(folder: Path) -> None:
    (folder / "1.json").write_text(rows("a"))
    (folder / "2.json").write_text(json.dumps([{"prompt": "b"}]))
    assert [record.origin for record in read_source("data/*.json")] == ["data/1.json:1", "data/2.json:[0]"]


def test_files_of_several_splits_are_not_mixed_by_accident(folder: Path) -> None:
    for path in folder.glob("*.jsonl"):
        path.unlink()
    for name in ("train-00000.jsonl", "train-00001.jsonl", "trainer.jsonl", "test-00000.jsonl"):
        (folder / name).write_text(rows(name))
    with pytest.raises(
        DataError, match=r"^data: the folder has files of several splits \(test, train\)\. .* data/train\*"
    ):
        read_source("data")
    assert len(list(read_source("data/train-*"))) == 2
    assert len(list(read_source("data/*.jsonl"))) == 4  # as asked for


def test_a_pattern_that_matches_nothing_shows_what_is_there(folder: Path) -> None:
    with pytest.raises(DataError) as caught:
        read_source("data/*.parquet")
    assert str(caught.value) == (
        f"data/*.parquet: no file matches this pattern. {folder} contains .10.jsonl, 10.jsonl, 2.jsonl, README.md."
    )
    with pytest.raises(DataError) as caught:
        read_source("date/x/*.jsonl")
    assert str(caught.value) == (
        f"date/x/*.jsonl: no file matches this pattern. There is no folder date/x. {folder.parent} contains data/. "
        f"There are data files in {folder}."
    )
    for number in range(9):
        (folder / f"a{number}").write_text("")
    with pytest.raises(DataError, match=r"contains \.10\.jsonl, .* and 5 more\.$"):
        read_source("data/*.parquet")


def test_a_folder_without_data_files_shows_what_is_there(folder: Path) -> None:
    """A clone of a hub data set has them in data/."""
    with pytest.raises(DataError) as caught:
        read_source(".")
    assert str(caught.value) == (
        f".: the folder has no data files in it. {folder.parent} contains data/. There are data files in data."
    )
    (folder.parent / "empty").mkdir()
    with pytest.raises(DataError, match=r"^empty: the folder has no data files in it\. /.*/empty is empty\.$"):
        read_source("empty")


def test_a_folder_that_may_not_be_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(DataError, match=r"^data: cannot be listed \(Permission denied\)"):
        read_source("data")


def test_a_saved_data_set_is_still_read_as_such(folder: Path) -> None:
    datasets.Dataset.from_list([{"prompt": "s"}]).save_to_disk(folder / "saved")
    (folder / "saved" / "more.jsonl").write_text(rows("x"))
    source = read_source("data/saved")
    assert source.format == "saved data set"
    assert [record.origin for record in source] == ["data/saved:row 0"]
    with pytest.raises(DataError, match=r"^data:test: the folder has no splits written by save_to_disk\. .* contains"):
        read_source("data:test")
