"""`isopref data` on every kind of source and on shapes whose prompt has to be found: what a user sees of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from support.project import Project

SIDES = ("chosen", "rejected")
PROMPT = "<|im_start|>user\nwhy?<|im_end|>\n<|im_start|>assistant\n"
GUESS = "warning: train.jsonl: there is no column 'prompt', so the prompt is guessed: the text that 'chosen' and "


def shown(project: Project, *arguments: str) -> str:
    outcome = project.isopref("data", "my.yaml", "data.eval=null", "optim.batch_size=1", *arguments)
    assert (outcome.code, outcome.err) == (0, "")
    return outcome.out


def line(out: str, name: str) -> str:
    """What stands behind a name in the part about the source."""
    (found,) = (row for row in out.splitlines() if row.startswith(f"  {name} "))
    return found.removeprefix(f"  {name}").strip()


@pytest.mark.parametrize(
    ("record", "shape", "prompt", "arguments"),
    [
        (
            {"instruction": "why?", "input": "", "history": []},
            "alpaca",
            "the columns 'instruction' and 'input', after the turns of 'history'",
            (),
        ),
        (
            {side: f"User: why?\nAssistant: {side}" for side in SIDES},
            "transcript",
            "all up to the last mark of the assistant, as in 'Assistant:'",
            (),
        ),
        (
            {side: f"{PROMPT}{side}" for side in SIDES},
            "templated",
            "all up to the last mark of the assistant, as in '<|im_start|>assistant'",
            ("data.template=none",),
        ),
        (
            {side: f"why?\n{side}" for side in SIDES},
            "common_start",
            "what chosen and rejected both begin with, to the end of a line or else a sentence; a guess",
            (),
        ),
    ],
)
def test_what_was_taken_to_be_the_prompt(
    project: Project, record: dict[str, Any], shape: str, prompt: str, arguments: tuple[str, ...]
) -> None:
    project.write_pairs("train.jsonl", [{"chosen": "chosen", "rejected": "rejected", **record}])
    out = shown(project, *arguments)
    assert line(out, "format") == f"jsonl, shape {shape}"
    assert line(out, "prompt") == prompt
    assert "columns not used" not in out
    assert f"\n[[prompt]]{PROMPT}[[chosen]]chosen<|im_end|>\n[[rejected]]rejected<|im_end|>\n" in out
    assert (GUESS in out) == (shape == "common_start")


@pytest.mark.parametrize("source", ["shards", "shards/*.jsonl"])
def test_several_files(project: Project, source: str) -> None:
    (project.folder / "shards").mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        (project.folder / "train.jsonl").rename(project.folder / "shards" / name)
        project.write_pairs("train.jsonl", [{"prompt": "who?", "chosen": "you", "rejected": "me " * 40}])
    out = shown(project, f"data.train={source}")
    assert f"\ndata.train  {source}\n" in out
    assert line(out, "format") == "2 files, jsonl, shape text"
    assert line(out, "records") == "24 read"
    assert "\n  longest: shards/b.jsonl:1 (" in out


def test_a_hub_data_set(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [json.loads(row) for row in (project.folder / "train.jsonl").read_text().splitlines()]
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.Dataset.from_list(rows))
    out = shown(project, "data.train={path: owner/set, name: en, revision: v1}", "data.train.split=prefs")
    assert "\ndata.train  owner/set (en):prefs\n" in out
    assert line(out, "format") == "hub, shape text"


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        (
            "data.train=*.parquet",
            "*.parquet: no file matches this pattern. {folder} contains eval.jsonl, my.yaml, train.jsonl.",
        ),
        (
            "data.train=.",
            ".: the folder has files of several splits (eval, train). Select one with a pattern, as in ./train*.",
        ),
        (
            "data.train={path: train.jsonl, revision: v1}",
            "the source 'train.jsonl': is a file, but revision: v1 is for data sets of the hub. Remove revision.",
        ),
        (
            "data.train=memory:0a",
            "memory:0a: this data was passed to isopref.train by a script, in memory, and is in no",
        ),
    ],
)
def test_a_mistake_is_one_message(project: Project, argument: str, says: str) -> None:
    outcome = project.isopref("data", "my.yaml", argument)
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err.startswith(f"error: {says.format(folder=Path(project.folder))}")
    assert outcome.err.count("\n") == 1
