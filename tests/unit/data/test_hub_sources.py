"""Data sets of the hub: what is asked of the library, and what is asked of something that is not on the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest

from isopref.build.data import pair_tables
from isopref.config.load import load_config
from isopref.data.sources import read_source
from isopref.engine.display import Display
from isopref.errors import ConfigError, DataError
from isopref.hub import ATTEMPTS
from isopref.testing.tokenizers import tiny_tokenizer
from support.offline_hub import hub, run_online

ROWS = [{"prompt": f"why {n}?", "chosen": "yes", "rejected": "no"} for n in range(3)]
STORED = datasets.Dataset.from_list(ROWS)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What load_dataset was called with: path, name, split, revision."""
    calls: list[Any] = []

    def load_dataset(path: str, name: str | None = None, *, split: str, revision: str | None) -> datasets.Dataset:
        calls.append((path, name, split, revision))
        return STORED

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return calls


@pytest.mark.parametrize(
    ("spec", "fields", "call", "name"),
    [
        ("owner/set", {}, ("owner/set", None, "train", None), "owner/set"),
        ("owner/set:prefs", {}, ("owner/set", None, "prefs", None), "owner/set:prefs"),
        ("owner/set:prefs[:100]", {}, ("owner/set", None, "prefs[:100]", None), "owner/set:prefs[:100]"),
        ("set", {}, ("set", None, "train", None), "set"),
        ("owner/set", {"name": "en"}, ("owner/set", "en", "train", None), "owner/set (en)"),
        ("o/s", {"split": "train[:10%]", "revision": "v1"}, ("o/s", None, "train[:10%]", "v1"), "o/s:train[:10%]"),
        ("o/s:dev", {"name": "en", "revision": "0a1b"}, ("o/s", "en", "dev", "0a1b"), "o/s:dev (en)"),
        ("o/s", {"name": "en", "split": "dev"}, ("o/s", "en", "dev", None), "o/s (en):dev"),
    ],
)
def test_a_hub_name_is_loaded(
    asked: list[Any], spec: str, fields: dict[str, Any], call: tuple[Any, ...], name: str
) -> None:
    source = read_source(spec, **fields)
    assert asked == [call]
    assert (source.format, source.digest()) == ("hub", STORED._fingerprint)
    assert [record.origin for record in source] == [f"{name}:row {number}" for number in range(3)]


def test_from_a_config_to_the_library(asked: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ISOPREF_CACHE", str(tmp_path / "cache"))
    source = {"path": "owner/set", "name": "en", "split": "prefs", "revision": "v1"}
    for train in (source, [source]):
        config = load_config({"model": {"path": "m"}, "data": {"train": train}, "optim": {"batch_size": 3}})
        tables = pair_tables(config, tiny_tokenizer("chatml"), Display(quiet=True))
        assert [(use.path, use.train) for use in tables.sources] == [("owner/set (en):prefs", 3)]
        assert tables.train.origin(2) == "owner/set (en):prefs:row 2"
    assert asked == [("owner/set", "en", "prefs", "v1")] * 2


def test_a_folder_without_a_script_is_loaded_by_the_library_itself(tmp_path: Path) -> None:
    """The call is one that the real load_dataset takes."""
    (tmp_path / "set").mkdir()
    STORED.to_parquet(tmp_path / "set" / "train.parquet")
    loaded = datasets.load_dataset(str(tmp_path / "set"), None, split="train", revision=None)
    assert list(loaded) == ROWS


def test_an_unreachable_hub_name_says_what_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*_: Any, **__: Any) -> None:
        raise ValueError("Config name is missing.\nPlease pick one among the available configs: ['en', 'de']\nExample")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(DataError) as caught:
        read_source("owner/set:dev", name="fr", revision="v1")
    assert str(caught.value) == (
        f"owner/set:dev (fr): there is no local path {Path('owner/set:dev').absolute()}, and the Hugging Face hub "
        "returned no data set 'owner/set' with split 'dev', config 'fr', revision 'v1' (ValueError: Config name is "
        "missing. Please pick one among the available configs: ['en', 'de']). Check the path or the name on the hub: "
        "data.train: {path: OWNER/NAME, name: CONFIG, split: SPLIT, revision: REVISION}."
    )


LOAD = """
from isopref.data.sources import read_source
from isopref.errors import DataError
try:
    read_source("nobody/nothing:dev")
except DataError as error:
    print(error)
"""


def test_without_a_network_nothing_is_asked_for() -> None:
    """The library would ask several times, with pauses of half a minute in all."""
    with hub(answers=False) as (endpoint, asked):
        message = run_online(LOAD, endpoint)
    assert message.startswith(f"nobody/nothing:dev: there is no local path {Path('nobody/nothing:dev').absolute()}, ")
    assert "'nobody/nothing' with split 'dev' is not in the local cache" in message
    assert f"the hub ({endpoint}) cannot be reached (RemoteProtocolError: " in message
    assert "datasets.load_dataset('nobody/nothing', split='dev').save_to_disk('FOLDER')" in message
    assert [one for one in asked if "nothing" in one[1]] == []
    assert asked.count(("HEAD", "/")) == ATTEMPTS


def test_a_hub_that_answers_is_asked() -> None:
    with hub(answers=True) as (endpoint, asked):
        message = run_online(LOAD, endpoint)
    assert "and the Hugging Face hub returned no data set 'nobody/nothing' with split 'dev' (" in message
    assert [one for one in asked if "nobody/nothing" in one[1]]


@pytest.mark.parametrize("field", ["name", "split", "revision"])
def test_what_only_the_hub_has_is_refused_of_files(
    asked: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text("{}\n")
    asked_for: dict[str, Any] = {field: "x"}
    kinds = {"a.jsonl": "a file", "*.jsonl": "a pattern for files", ".": "a folder of files"}
    kinds |= {"package:isopref/demo/train.jsonl": "a file"}
    for spec, kind in kinds.items():
        with pytest.raises(ConfigError) as caught:
            read_source(spec, **asked_for)
        assert str(caught.value) == (
            f"the source '{spec}': is {kind}, but {field}: x is for data sets of the hub. Remove {field}."
        )
    STORED.save_to_disk("saved")
    if field != "split":
        with pytest.raises(ConfigError, match="is a folder written by save_to_disk, but "):
            read_source("saved", **asked_for)
    assert asked == []


def test_two_splits_are_refused(asked: list[Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'owner/set:dev': its split is also set as split: test"):
        read_source("owner/set:dev", split="test")
    datasets.DatasetDict(train=STORED).save_to_disk(tmp_path / "saved")
    with pytest.raises(ConfigError, match=r"is the split 'train' of a folder, but split: test is for"):
        read_source(f"{tmp_path / 'saved'}:train", split="test")
