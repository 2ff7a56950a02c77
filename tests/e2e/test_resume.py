"""Runs that stop in the middle and go on: in the same weights as if nothing had happened, or not at all."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from olmo_core.train.callbacks import Callback

from isopref.build import trainer as build_trainer
from isopref.engine import checkpoints as checkpoint_files
from isopref.engine.callbacks import checkpointer
from isopref.runs.read import read_run
from isopref.testing import oracle
from support.project import MakeProject, Project, Weights

STEPS = 10
SAVE = ("run.save_every=3", "data.eval=null")
Stop = Callable[[int, Callable[[], None]], None]
Pulled = Callable[..., Path]
ReadMetrics = Callable[[Path], list[dict[str, float]]]
LoadWeights = Callable[[Path], "Weights"]


class PulledPlugError(Exception):
    """Stands for all that ends a process without a warning."""


def pull_plug() -> None:
    raise PulledPlugError


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def press_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def hang_up() -> None:
    os.kill(os.getpid(), signal.SIGHUP)


@dataclass
class StopCallback(Callback):
    at: int = 0
    how: Callable[[], None] = pull_plug

    def post_step(self) -> None:
        if self.step == self.at:
            self.how()


@pytest.fixture
def stop(monkeypatch: pytest.MonkeyPatch) -> Stop:
    """Has the next run stop after a step, in some way."""
    ours = build_trainer._callbacks

    def stop_next(step: int, how: Callable[[], None]) -> None:
        def callbacks(*arguments: Any) -> dict[str, Callback]:
            monkeypatch.undo()
            return {**ours(*arguments), "stop": StopCallback(at=step, how=how)}

        monkeypatch.setattr(build_trainer, "_callbacks", callbacks)

    return stop_next


@pytest.fixture
def pulled(project: Project, stop: Stop) -> Pulled:
    """Trains until the power goes after a step, and gives the run's folder."""

    def pull(step: int, *arguments: str) -> Path:
        stop(step, pull_plug)
        with pytest.raises(PulledPlugError):
            project.train("run", *arguments)
        return project.folder / "run"

    return pull


@pytest.fixture(scope="module")
def whole(make_project: MakeProject) -> Path:
    """A run that nothing stopped."""
    return make_project().train("whole", *SAVE)


def same(metrics: list[dict[str, float]]) -> list[dict[str, float]]:
    """What a run computed, without how long it took."""
    return [{k: v for k, v in line.items() if not k.startswith(("speed/", "checkpoint/"))} for line in metrics]


def checkpoints(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").glob("step*"))


# --- it goes on --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stopped", "saved"), [(3, 3), (4, 3), (5, 3), (8, 6)])
def test_after_a_crash_the_weights_are_bit_identical(
    project: Project,
    whole: Path,
    pulled: Pulled,
    read_metrics: ReadMetrics,
    load_weights: LoadWeights,
    stopped: int,
    saved: int,
) -> None:
    """Stopped at a checkpoint, inside an epoch, at the end of the first epoch, inside the second."""
    run = pulled(stopped, *SAVE)
    assert not (run / "model").exists()
    # The step it stopped in had not been logged; those between the checkpoint and that are done again.
    assert [line["step"] for line in read_metrics(run)][-1] == max(stopped - 1, saved)

    outcome = project.isopref("train", "my.yaml", "run.folder=run", *SAVE, "--resume")
    assert outcome.code == 0, outcome.err
    assert f"resume after step {saved}\n" in outcome.out
    assert f"step {saved + 1}/{STEPS} " in outcome.out
    assert f"step {saved}/{STEPS} " not in outcome.out
    found, expected = load_weights(run / "model"), load_weights(whole / "model")
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    # Every step once, as if nothing had happened.
    assert same(read_metrics(run)) == same(read_metrics(whole))
    assert checkpoints(run) == checkpoints(whole) == ["step10", "step9"]


@pytest.mark.parametrize("setting", ["objective.loss=bco_pair", "objective.reference_moves=[2, 0.6]"])
def test_what_an_objective_remembers_is_in_the_checkpoint(
    project: Project, pulled: Pulled, read_metrics: ReadMetrics, load_weights: LoadWeights, setting: str
) -> None:
    """bco_pair shifts rewards by their mean since the first step; a moving reference is somewhere on its way."""
    told = (*SAVE, setting, "objective.beta=1.0")
    pulled(4, *told)
    outcome = project.isopref("train", "my.yaml", "run.folder=run", *told, "--resume")
    assert outcome.code == 0, outcome.err
    run, whole = project.folder / "run", project.train("whole", *told)
    found, expected = load_weights(run / "model"), load_weights(whole / "model")
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert same(read_metrics(run)) == same(read_metrics(whole))


@pytest.mark.parametrize(
    "layout",
    [
        ["layout.rows=padded", "layout.microbatch_tokens=90"],
        ["layout.rows=packed", "layout.microbatch_tokens=200", "layout.parallel=fsdp"],
    ],
    ids=" ".join,
)
def test_on_another_layout_the_weights_are_the_same_to_rounding(
    project: Project, whole: Path, pulled: Pulled, load_weights: LoadWeights, layout: list[str]
) -> None:
    pulled(5, *SAVE)
    run = project.train("run", *SAVE, *layout, "--resume")
    assert oracle.relative_error(load_weights(run / "model"), load_weights(whole / "model")) <= 1e-8
    assert f"rows: {layout[0].removeprefix('layout.rows=')}" in (run / "config.yaml").read_text()


@pytest.mark.parametrize(
    ("how", "name", "code"), [(terminate, "SIGTERM", 143), (press_ctrl_c, "SIGINT", 130), (hang_up, "SIGHUP", 129)]
)
def test_a_signal_saves_and_says_how_to_go_on(
    request: pytest.FixtureRequest,
    project: Project,
    whole: Path,
    stop: Stop,
    read_metrics: ReadMetrics,
    load_weights: LoadWeights,
    how: Callable[[], None],
    name: str,
    code: int,
) -> None:
    hang_up_before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it would be ignored, and rightly so
    request.addfinalizer(lambda: signal.signal(signal.SIGHUP, hang_up_before))
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGHUP)
    stop(4, how)  # at its very end: it is noticed at the end of the next step

    def seal(folder: Path) -> None:
        if folder.name == "step5":  # an impatient user, while the checkpoint is written
            press_ctrl_c()
        ours(folder)

    ours = checkpoint_files.seal
    with mock.patch.object(checkpointer, "seal", seal):
        outcome = project.isopref("train", "my.yaml", "run.folder=run", *SAVE)
    assert outcome.code == code, outcome.err
    assert outcome.out.endswith(
        f"\nStopped by {name} after step 5 of 10; checkpoint saved. To resume, run the same command with --resume.\n"
    )
    run = project.folder / "run"
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGHUP)) == before
    assert checkpoints(run) == ["step3", "step5"]
    assert not (run / "model").exists()
    assert read_run(run).status == "stopped at step 5"
    project.train("run", *SAVE, "--resume")
    found, expected = load_weights(run / "model"), load_weights(whole / "model")
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert same(read_metrics(run)) == same(read_metrics(whole))
    assert read_run(run).status == "finished"
    assert [start["after_step"] for start in read_run(run).starts] == [0, 5]


def test_twice(
    project: Project, whole: Path, pulled: Pulled, read_metrics: ReadMetrics, load_weights: LoadWeights
) -> None:
    run = project.folder / "run"
    for step, resume in ((5, []), (8, ["--resume"])):
        pulled(step, *SAVE, *resume)
    project.train("run", *SAVE, "--resume")
    found, expected = load_weights(run / "model"), load_weights(whole / "model")
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert same(read_metrics(run)) == same(read_metrics(whole))
    assert checkpoints(run) == ["step10", "step9"]


def test_metrics_between_two_logs_go_on(
    make_project: MakeProject, project: Project, pulled: Pulled, read_metrics: ReadMetrics
) -> None:
    """A checkpoint after step 6 holds two of the four steps that the line of step 8 is the mean of."""
    settings = (*SAVE, "run.log_every=4")
    expected = same(read_metrics(make_project().train("whole", *settings)))
    assert [line["step"] for line in expected] == [1, 4, 8, 10]
    pulled(7, *settings)
    found = same(read_metrics(project.train("run", *settings, "--resume")))
    assert [line["step"] for line in found] == [1, 4, 8, 10]
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-6)


def test_before_the_first_checkpoint_it_starts_again(
    project: Project, whole: Path, pulled: Pulled, read_metrics: ReadMetrics, load_weights: LoadWeights
) -> None:
    pulled(2, *SAVE)
    outcome = project.isopref("train", "my.yaml", "run.folder=run", *SAVE, "--resume")
    assert outcome.code == 0, outcome.err
    assert "resume from the first step: no checkpoint yet\n" in outcome.out
    run = project.folder / "run"
    found, expected = load_weights(run / "model"), load_weights(whole / "model")
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert same(read_metrics(run)) == same(read_metrics(whole))


def test_what_was_half_written_is_not_trusted(
    project: Project, whole: Path, pulled: Pulled, read_metrics: ReadMetrics, load_weights: LoadWeights
) -> None:
    """A power cut while a checkpoint, a line of metrics and small files were written. Files of the user stay."""
    run = pulled(8, *SAVE)
    (run / "checkpoints" / "step6" / ".metadata.json").unlink()
    partial = f"{'0f' * 16}.tmp"
    for name in (f"last_checkpoint.json.{partial}", f"checkpoints/step3/seal.json.{partial}", "notes.tmp"):
        (run / name).write_text("{")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "train/lo')
    outcome = project.isopref("train", "my.yaml", "run.folder=run", *SAVE, "--resume")
    assert outcome.code == 0, outcome.err
    assert "resume after step 3\n" in outcome.out
    found, expected = load_weights(run / "model"), load_weights(whole / "model")
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert same(read_metrics(run)) == same(read_metrics(whole))
    assert [path.name for path in run.rglob("*.tmp")] == ["notes.tmp"]


def test_damaged_lines_of_metrics_are_dropped_by_name(
    project: Project, whole: Path, pulled: Pulled, read_metrics: ReadMetrics, load_weights: LoadWeights
) -> None:
    """A full disk, or a crash of the machine, left other bytes in lines 2 to 5."""
    run = pulled(8, *SAVE)
    first, *_four, sixth, seventh = (run / "metrics.jsonl").read_bytes().splitlines()
    damage = (b"\0" * 40, b'{"step": 3, "train/lo', b'{"train/loss": 0.5}', b"4")
    (run / "metrics.jsonl").write_bytes(b"\n".join([first, *damage, sixth, seventh, b""]))
    outcome = project.isopref("train", "my.yaml", "run.folder=run", *SAVE, "--resume")
    assert outcome.code == 0, outcome.err
    warned = re.findall(r"warning: run/metrics\.jsonl:(\d) is damaged; dropping it", outcome.out)
    assert warned == ["2", "3", "4", "5"]
    kept = [line for line in same(read_metrics(whole)) if line["step"] not in (2, 3, 4, 5)]
    assert same(read_metrics(run)) == kept
    found, expected = load_weights(run / "model"), load_weights(whole / "model")
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_data_that_moved_is_the_same_data(
    project: Project, whole: Path, pulled: Pulled, load_weights: LoadWeights
) -> None:
    pulled(5, *SAVE)
    (project.folder / "train.jsonl").rename(project.folder / "moved.jsonl")
    run = project.train("run", *SAVE, "data.train=moved.jsonl", "--resume")
    found, expected = load_weights(run / "model"), load_weights(whole / "model")
    assert all(torch.equal(found[name], expected[name]) for name in expected)


# --- it is refused -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stopped(make_project: MakeProject) -> Project:
    """A project with a run that stopped after its fifth step, for tests that change nothing."""
    project = make_project()
    with pytest.MonkeyPatch.context() as patch:
        ours = build_trainer._callbacks
        patch.setattr(build_trainer, "_callbacks", lambda *a: {**ours(*a), "stop": StopCallback(at=5)})
        with pytest.raises(PulledPlugError):
            project.train("run", *SAVE)
    return project


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file of a run but the engine's log."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "engine.log")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_resume_without_a_run(stopped: Project) -> None:
    message = stopped.refused("nowhere", "--resume")
    assert message == "--resume: nowhere holds no run. Start it without --resume, or check run.folder."
    assert not (stopped.folder / "nowhere").exists()


def test_resume_where_the_run_id_names_the_folder(stopped: Project) -> None:
    """Another value in the config is another folder, which the message has to say."""
    outcome = stopped.isopref("train", "my.yaml", "optim.lr=1e-5", "--resume")
    assert outcome.code == 1
    assert "holds no run. Its name contains the run id, which changes with the math." in outcome.err


def test_a_second_run_in_the_folder(stopped: Project) -> None:
    before = snapshot(stopped.folder / "run")
    message = stopped.refused("run", *SAVE)
    assert message == ("run already contains a run. Resume it with --resume, or set run.folder to start a new one.")
    assert snapshot(stopped.folder / "run") == before


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("optim.seed=1", "optim.seed was 0, is 1"),
        ("optim.batch_size=4", "optim.batch_size was 5, is 4"),
        ("optim.lr=2e-3", "optim.lr was 0.001, is 0.002"),
        ("optim.epochs=3", "optim.epochs was 2, is 3"),
        ("objective.beta=0.2", "objective.beta was null, is 0.2"),
        ("objective.loss=hinge", "objective.loss was sigmoid, is hinge"),
        ("model.dtype=float32", "model.dtype was float64, is float32"),
    ],
)
def test_resume_with_other_math(stopped: Project, override: str, says: str) -> None:
    before = snapshot(stopped.folder / "run")
    message = stopped.refused("run", *SAVE, override, "--resume")
    assert f"the run in run had another config: {says}." in message
    assert "Restore the original values, or start a new run in a different run.folder." in message
    assert snapshot(stopped.folder / "run") == before


@pytest.mark.parametrize("change", ["order", "weight", "template", "count", "mix", "split"])
def test_resume_with_other_data(stopped: Project, change: str) -> None:
    records = [json.loads(line) for line in (stopped.folder / "train.jsonl").read_text().splitlines()]
    arguments = ["data.train=other.jsonl"]
    match change:
        case "order":
            records.reverse()
        case "weight":
            records[0]["weight"] = 7
        case "template":
            arguments.append("data.template=none")
        case "count":
            arguments = ["data.train=[{path: other.jsonl, count: 22}]"]
        case "mix":
            arguments = ["data.train=[{path: other.jsonl, weight: 1}, {path: eval.jsonl, weight: 1}]"]
        case "split":
            arguments.append("data.eval=0.2")
    stopped.write_pairs("other.jsonl", records)
    before = snapshot(stopped.folder / "run")
    message = stopped.refused("run", *SAVE, *arguments, "--resume")
    assert re.search(r"the checkpoint was trained with (data|pairs) ", message)
    assert "Resume with the data and settings of the first run, or start a new run in another folder." in message
    assert snapshot(stopped.folder / "run") == before


@pytest.mark.parametrize("arguments", [[], ["--resume"]], ids=["again", "resume"])
def test_a_finished_run(whole: Path, project: Project, arguments: list[str]) -> None:
    shutil.copytree(whole, project.folder / "run")
    before = snapshot(project.folder / "run")
    message = project.refused("run", *SAVE, *arguments)
    assert message == "run contains a finished run. Set run.folder to start a new one, or remove that folder."
    assert snapshot(project.folder / "run") == before


def test_a_place_that_the_export_would_need(project: Project) -> None:
    """Better said now than after the training."""
    (project.folder / "run" / "model").mkdir(parents=True)
    message = project.refused("run")
    assert message.startswith("run.folder: run is not an isopref run: it contains model.")
