"""The run's folder: which one a run may take, and what is said when it, or its checkpoints, are gone."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from olmo_core.train.callbacks import Callback

from isopref.build import train as build_train
from isopref.build import trainer as build_trainer
from isopref.engine.callbacks.checkpointer import KeepingCheckpointerCallback
from support.forked import isopref_on_ranks, second_rank_elsewhere
from support.project import Project

SETTINGS = ("data.eval=null", "run.save_every=3")
AUTO = ("--resume", "auto")


def content(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


class KilledError(Exception):
    """Stands for all that ends a process without a warning."""


def killed(*_arguments: Any) -> None:
    raise KilledError


# --- which folder it takes -----------------------------------------------------------------------------


@pytest.mark.parametrize("resume", [(), AUTO])
def test_an_occupied_folder_is_refused(project: Project, resume: tuple[str, ...]) -> None:
    project.extra_env["HOME"] = str(project.folder / "home")
    for name in ("home/.ssh/key", "home/letters/one.txt", "home/config.yaml"):
        (project.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (project.folder / name).write_text("mine")
    before = content(project.folder / "home")
    message = project.refused('"~"', *SETTINGS, *resume)  # without quotes YAML reads null
    assert message == (
        f"run.folder: {project.folder / 'home'} is not an isopref run: it contains .ssh, config.yaml, letters. "
        "Set run.folder to a new or empty folder."
    )
    assert content(project.folder / "home") == before
    message = project.refused(".", *SETTINGS, *resume)
    assert message.startswith("run.folder: . is not an isopref run: it contains ")


@pytest.mark.parametrize("name", ["reference.json", "reference/mine.txt", "microbatch.json", "checkpoints/mine.txt"])
def test_files_with_our_names_are_somebody_elses_without_a_log(project: Project, name: str) -> None:
    """A start that failed leaves a log beside them."""
    mine = project.folder / "run" / name
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    message = project.refused("run", *SETTINGS)
    assert message.startswith(f"run.folder: run is not an isopref run: it contains {name.split('/')[0]}. ")
    assert content(project.folder / "run") == sorted({name, name.split("/")[0]})
    assert mine.read_text() == "mine"


def test_many_other_files_are_counted(project: Project) -> None:
    (project.folder / "full").mkdir()
    for number in range(10, 30):
        (project.folder / "full" / f"{number}.txt").write_text("")
    assert "it contains 10.txt, 11.txt, 12.txt and 17 more. Set" in project.refused("full", *SETTINGS)


def test_several_processes_refuse_it_with_one_message(project: Project) -> None:
    (project.folder / "mine").mkdir()
    (project.folder / "mine" / "notes.txt").write_text("")
    outcome = isopref_on_ranks(project, "train", "my.yaml", *SETTINGS, "run.folder=mine", *AUTO)
    assert outcome.code == 1
    assert outcome.err.count("error: run.folder: mine is not an isopref run: it contains notes.txt.") == 1
    assert content(project.folder / "mine") == ["notes.txt"]


def test_a_folder_that_the_processes_do_not_share_is_refused(project: Project) -> None:
    (project.folder / "second").mkdir()
    for name in ("my.yaml", "train.jsonl"):
        shutil.copy(project.folder / name, project.folder / "second")
    arguments = ("train", "my.yaml", *SETTINGS, "run.folder=run")
    outcome = isopref_on_ranks(project, *arguments, prepare=second_rank_elsewhere)
    assert outcome.code == 1
    assert "error: run.folder: rank 1 does not see what rank 0 writes to" in outcome.err
    assert not (project.folder / "run").exists()


@pytest.mark.parametrize("resume", [(), AUTO])
def test_what_a_start_that_failed_leaves_does_not_occupy_it(
    project: Project, monkeypatch: pytest.MonkeyPatch, resume: tuple[str, ...]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(build_train, "claim_folder", killed)
        with pytest.raises(KilledError):
            project.train("run", *SETTINGS)
    run = project.folder / "run"
    assert {"engine.log", "reference.json", "reference", "checkpoints"} <= set(content(run))
    for name in (".lock", ".seen-0a1b", "config.yaml.0a1b.tmp", "reference.json.0a1b.tmp", "microbatch.json"):
        (run / name).write_text("{}")
    project.train("run", *SETTINGS, *resume)
    assert (run / "model").exists()


def test_an_empty_folder_may_have_what_systems_put_there(project: Project) -> None:
    (project.folder / "run" / "lost+found").mkdir(parents=True)
    for name in (".DS_Store", ".gitkeep", ".nfs0001"):
        (project.folder / "run" / name).write_text("")
    project.train("run", *SETTINGS, "optim.max_steps=1")


# --- it is gone ----------------------------------------------------------------------------------------


@dataclass
class AtStep(Callback):
    """Does something after a step."""

    at: int = 0
    do: Callable[[], object] = field(default=lambda: None)

    def post_step(self) -> None:
        if self.step == self.at:
            self.do()


@pytest.fixture
def at_step(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Callable[[], object]], None]:
    """Has the next run do something after a step."""
    ours = build_trainer._callbacks

    def plan(step: int, do: Callable[[], object]) -> None:
        def callbacks(*arguments: Any) -> dict[str, Callback]:
            monkeypatch.setattr(build_trainer, "_callbacks", ours)
            return {**ours(*arguments), "at_step": AtStep(at=step, do=do)}

        monkeypatch.setattr(build_trainer, "_callbacks", callbacks)

    return plan


AtStepOf = Callable[[int, Callable[[], object]], None]


@pytest.mark.parametrize("resume", [("--resume",), AUTO])
def test_resume_without_the_checkpoints_there_were_is_refused(
    project: Project, at_step: AtStepOf, resume: tuple[str, ...]
) -> None:
    run = project.folder / "run"
    at_step(8, killed)
    with pytest.raises(KilledError):
        project.train("run", *SETTINGS)
    metrics = (run / "metrics.jsonl").read_bytes()
    (run / "checkpoints").rename(project.folder / "elsewhere")
    message = project.refused("run", *SETTINGS, *resume)
    assert message == (
        "--resume: run had a checkpoint of step 6, but run/checkpoints has none now, so the run would start from the "
        "first step. Put the checkpoints back; or, to start over, remove run or set a different run.folder."
    )
    assert (run / "metrics.jsonl").read_bytes() == metrics
    shutil.rmtree(run / "checkpoints", ignore_errors=True)
    (project.folder / "elsewhere").rename(run / "checkpoints")
    outcome = project.isopref("train", "my.yaml", "run.folder=run", *SETTINGS, *resume)
    assert outcome.code == 0, outcome.err
    assert "resume after step 6\n" in outcome.out


def test_a_run_that_was_killed_before_its_first_checkpoint_starts_again(project: Project, at_step: AtStepOf) -> None:
    at_step(3, killed)
    with pytest.raises(KilledError):
        project.train("run", "data.eval=null", "run.save_every=100")
    assert len((project.folder / "run" / "metrics.jsonl").read_text().splitlines()) == 2
    outcome = project.isopref("train", "my.yaml", "run.folder=run", "data.eval=null", "run.save_every=100", *AUTO)
    assert outcome.code == 0, outcome.err
    assert "resume from the first step: no checkpoint yet\n" in outcome.out


@pytest.mark.parametrize("log_every", [1, 100])
def test_a_folder_that_is_removed_while_the_run_uses_it(project: Project, at_step: AtStepOf, log_every: int) -> None:
    """Noticed when metrics are written, or a checkpoint. It is not made again."""
    at_step(4, lambda: shutil.rmtree("run"))
    message = project.refused("run", *SETTINGS, f"run.log_every={log_every}")
    assert message.endswith(
        "run was removed or renamed during the run, and its checkpoints with it. Put it back and use --resume, or "
        "start again."
    )
    assert not (project.folder / "run").exists()


def test_checkpoints_that_are_removed_during_a_run_are_not_said_to_be_there(
    project: Project, at_step: AtStepOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = KeepingCheckpointerCallback._save_checkpoint

    def full(self: Any, save_async: bool | None = None, ephemeral: bool = False) -> str:
        if self.step == 6:
            raise OSError("No space left on device")
        return ours(self, save_async, ephemeral)

    monkeypatch.setattr(KeepingCheckpointerCallback, "_save_checkpoint", full)
    at_step(4, lambda: shutil.rmtree("run/checkpoints"))
    message = project.refused("run", *SETTINGS)
    assert message == (
        "the checkpoint of step 6 cannot be written to run/checkpoints (No space left on device). The earlier "
        "checkpoints were removed during the run. To start over, remove run or set a new run.folder."
    )
    monkeypatch.undo()
    assert "had a checkpoint of step 3" in project.refused("run", *SETTINGS, *AUTO)


def test_checkpoints_that_are_removed_during_a_run_do_not_stop_it(project: Project, at_step: AtStepOf) -> None:
    at_step(4, lambda: shutil.rmtree("run/checkpoints"))
    run = project.train("run", *SETTINGS)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step10", "step9"]


def full_disk(*_arguments: Any, **_options: Any) -> str:
    raise OSError("No space left on device")


def test_no_room_before_the_first_checkpoint(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KeepingCheckpointerCallback, "_save_checkpoint", full_disk)
    message = project.refused("run", *SETTINGS)
    assert message == (
        "the checkpoint of step 3 cannot be written to run/checkpoints (No space left on device). There is no earlier "
        "checkpoint. Free disk space or make the folder writable, then run the same command with --resume."
    )


def test_a_run_whose_config_was_removed_is_not_removed_with_it(
    project: Project, at_step: AtStepOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start that is refused cleans up after itself. This one had begun."""
    monkeypatch.setattr(KeepingCheckpointerCallback, "_save_checkpoint", full_disk)
    at_step(2, lambda: Path("run/config.yaml").unlink())
    project.refused("run", *SETTINGS)
    assert (project.folder / "run" / "metrics.jsonl").exists()
