"""`isopref.train` with data in memory: the run that a file gives, a folder that says what the data was, resuming."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import datasets
import pytest
import torch
import yaml

import isopref
from isopref.config.load import load_config
from isopref.errors import RunError
from support.project import Project, Weights

Rows = list[dict[str, Any]]


@pytest.fixture
def inside(project: Project) -> Iterator[Project]:
    """A project whose folder and cache are this process's."""
    with contextlib.chdir(project.folder), mock.patch.dict(os.environ, project.env, clear=True):
        yield project


def rows(name: str) -> Rows:
    return [json.loads(line) for line in Path(name).read_text().splitlines()]


def settings(train: Any, held_out: Any, **run: Any) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(Path("my.yaml").read_text())
    return {**found, "data": {"train": train, "eval": held_out}, "run": {**found["run"], **run}}


def test_a_run_is_that_of_a_file_and_its_folder_says_what_the_data_was(
    inside: Project, load_weights: Callable[[Path], Weights], capfd: pytest.CaptureFixture[str]
) -> None:
    from_file = isopref.train("my.yaml", ["run.folder=file"])
    capfd.readouterr()
    train, held_out = datasets.Dataset.from_list(rows("train.jsonl")), rows("eval.jsonl")
    config = settings(train, held_out, folder="memory")
    run = isopref.train(config)
    assert config["data"] == {"train": train, "eval": held_out}
    assert run.status == "finished"
    assert from_file.model_folder is not None
    assert run.model_folder is not None
    ours, theirs = load_weights(run.model_folder), load_weights(from_file.model_folder)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    out = capfd.readouterr().out.splitlines()
    assert "data  data.train: 23 pairs (in memory, text)" in out
    assert "data  data.eval: 8 pairs (in memory, text)" in out

    trained, held = run.start("in_memory")
    assert (trained["field"], trained["records"], held["field"], held["records"]) == ("data.train", 23, "data.eval", 8)
    assert "in_memory" not in from_file.starts[0]
    text = Path("memory/config.yaml").read_text()
    assert " ".join(line.removeprefix("# ") for line in text.splitlines() if line.startswith("#")) == " ".join(
        f"memory:{one['digest']} stands for {one['records']} in-memory records that a script passed to isopref.train "
        f"as {one['field']}. They are not in any file: to resume or repeat this run, call isopref.train with the same "
        "records."
        for one in (trained, held)
    )
    written = load_config(Path("memory/config.yaml")).data
    assert (written.train, written.eval) == (f"memory:{trained['digest']}", f"memory:{held['digest']}")
    outcome = inside.isopref("train", "memory/config.yaml", "run.folder=again")
    assert outcome.code == 1
    assert f"memory:{trained['digest']}: this data was passed to isopref.train by a script" in outcome.err
    assert not Path("again").exists()


def stopped_run(config: dict[str, Any]) -> Any:
    """A run that is interrupted after a few steps."""

    def interrupt() -> None:
        while not Path("run/metrics.jsonl").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    run = isopref.train(config, ["optim.epochs=12"])
    thread.join()
    return run


def test_a_run_is_resumed_with_the_same_records_only(inside: Project, load_weights: Callable[[Path], Weights]) -> None:
    train, held_out = rows("train.jsonl"), rows("eval.jsonl")
    stopped = stopped_run(settings(train, held_out, folder="run"))
    assert stopped.status.startswith("stopped at step ")
    other = [*train[:-1], {**train[-1], "chosen": "yes, of course"}]
    with pytest.raises(RunError, match=r"the checkpoint was trained with data \w+, this run has \w+\."):
        isopref.train(settings(other, held_out, folder="run"), ["optim.epochs=12"], resume="must")
    same = datasets.Dataset.from_list(rows("train.jsonl"))
    resumed = isopref.train(settings(same, held_out, folder="run"), ["optim.epochs=12"], resume="must")
    assert (resumed.status, resumed.last_step) == ("finished", 60)
    assert [start["in_memory"] for start in resumed.starts] == [resumed.starts[0]["in_memory"]] * 2
    again = isopref.train(settings(train, held_out, folder="run"), ["optim.epochs=12"], resume="auto")
    assert again.metrics == resumed.metrics
    with pytest.raises(RunError, match=r"data\.train was memory:\w+, is"):
        isopref.train(settings(other, held_out, folder="run"), ["optim.epochs=12"], resume="auto")
    whole = isopref.train(settings(train, held_out, folder="whole"), ["optim.epochs=12"])
    assert resumed.model_folder is not None
    assert whole.model_folder is not None
    ours, theirs = load_weights(resumed.model_folder), load_weights(whole.model_folder)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_without_a_folder_the_records_decide_it(inside: Project) -> None:
    train = rows("train.jsonl")
    first = isopref.train(settings(train, None, export=False), ["optim.max_steps=1"])
    other = isopref.train(settings(train[:-1], None, export=False), ["optim.max_steps=1"])
    assert first.folder.parent == other.folder.parent == Path("runs")
    assert first.folder != other.folder


def test_several_processes_are_refused(inside: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        RunError, match=r"2 were started \(WORLD_SIZE\)\. To use several, put the data in files and run the command"
    ):
        isopref.train(settings(rows("train.jsonl"), None))
