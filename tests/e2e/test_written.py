"""What a run writes: its folder, checkpoints, metrics, and the terminal."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from isopref.config.load import load_config
from isopref.config.schema import run_id
from support.project import TIMEOUT_S, Project


def test_default_folder_has_the_run_id(project: Project) -> None:
    outcome = project.isopref("train", "my.yaml", "optim.max_steps=1")
    assert outcome.code == 0, outcome.err
    (folder,) = (project.folder / "runs").iterdir()
    assert folder.name == f"my-{run_id(load_config(project.folder / 'my.yaml', ['optim.max_steps=1']))}"
    assert f"run   runs/{folder.name} " in outcome.out


def test_what_is_not_asked_for_is_not_written(project: Project) -> None:
    run = project.train("run", "data.eval=null", "run.export=false", "optim.max_steps=1")
    assert {path.name for path in run.iterdir()} == {
        "config.yaml", "reference.json", "reference", "starts.jsonl", "state.json", "engine.log", "metrics.jsonl",
        "report.html", "checkpoints", "last_checkpoint.json",
    }  # fmt: skip


def test_log_every(project: Project, read_metrics: Callable[[Path], list[dict[str, float]]]) -> None:
    every, some = project.train("every", "data.eval=null"), project.train("some", "data.eval=null", "run.log_every=4")
    each, third = read_metrics(every), read_metrics(some)
    assert [line["step"] for line in third] == [1, 4, 8, 10]
    # What a line says is the mean over the steps since the last one.
    means = [np.mean([line["train/loss"] for line in each[a:b]]) for a, b in ((0, 1), (1, 4), (4, 8), (8, 10))]
    assert [line["train/loss"] for line in third] == pytest.approx(means, rel=1e-6)


def test_no_more_checkpoints_than_asked_for(project: Project) -> None:
    run = project.train("run", "data.eval=null", "run.save_every=2", "run.keep=2")
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step10", "step8"]


def test_one_is_not_many(project: Project) -> None:
    project.write_pairs("one.jsonl", [{"prompt": "a?", "chosen": "yes b", "rejected": "no"}])
    outcome = project.isopref("train", "my.yaml", "run.folder=run", "data.train=one.jsonl", "optim.epochs=1")
    assert "train 1 step: 1 pair, 5 per step, 1 epoch\n" in outcome.out


def test_output(project: Project) -> None:
    """What a first-time user sees in a file or a pipe: where, what was found, every step, the effect, what next."""
    outcome = project.isopref("train", "my.yaml", "run.folder=run", "optim.max_steps=2")
    assert outcome.code == 0
    assert outcome.err == ""
    lines = outcome.out.splitlines()
    assert lines[0].startswith("run   run (run id ")
    assert lines[1:3] == [
        "data  train.jsonl: 23 pairs (jsonl, text)",
        "data  eval.jsonl: 8 pairs (jsonl, text)",
    ]
    for line, name, count in ((lines[3], "training", 23), (lines[4], "held-out", 8)):
        assert line.startswith(f"cache 0 of {count} {name} pairs have their reference (store ")
    assert [line.split("  ")[0] for line in lines if line.startswith("step ")] == ["step 1/2", "step 2/2"]
    assert lines[5] == "train 2 steps of 10 (optim.max_steps): 23 pairs, 5 per step, 2 epochs"
    assert lines[6].startswith("step 1/2  loss 0.6931  accuracy 0.50  margin ")
    assert "preference accuracy" in outcome.out
    assert "AutoModelForCausalLM.from_pretrained('run/model')" in outcome.out


@pytest.mark.parametrize("width", [80, 140])
def test_output_on_a_terminal(project: Project, width: int) -> None:
    """A bar for each part of the work, inside the window; evaluating inside the training is a bar inside a bar."""
    project.extra_env |= {"FORCE_COLOR": "1", "COLUMNS": str(width)}  # rich takes it for a terminal
    outcome = project.isopref("train", "my.yaml", "run.folder=run", "run.eval_every=2", "run.save_every=4")
    assert outcome.code == 0, outcome.err
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", outcome.out).replace("\r", "\n").splitlines()
    for pattern in (
        r"score training ━+ 46/46 [\d:]+ < 0:00:00",
        r"score held-out ━+ 16/16 [\d:]+ < 0:00:00",
        r"train ━+ 10/10 [\d:]+ < 0:00:00",
        r" +loss \d\.\d+  accuracy \d",
    ):
        assert any(re.match(pattern, line) for line in lines), pattern
    assert all(len(line) <= width for line in lines if line.startswith(("train", "score")))
    assert not any(line.startswith("step ") for line in lines)


def test_a_reader_that_goes_away_does_not_end_the_run(project: Project) -> None:
    command = [sys.executable, "-m", "isopref", "train", "my.yaml", "run.folder=run"]
    process = subprocess.Popen(command, cwd=project.folder, env=project.env, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(TIMEOUT_S) == 0
    assert (project.folder / "run" / "model" / "config.json").exists()
