"""Folders, disks and checkpoints that fail: one message, nothing lost, no hang."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from isopref.build import trainer as build_trainer
from isopref.engine.callbacks.checkpointer import KeepingCheckpointerCallback
from isopref.engine.callbacks.evaluation import EvaluateCallback
from isopref.engine.callbacks.metrics_file import MetricsFileCallback
from isopref.errors import RunError
from isopref.runs.files import LOCK_FILE
from isopref.runs.lock import locked
from isopref.testing import oracle
from support.project import MakeProject, Project, Weights

SETTINGS = ("data.eval=null", "run.save_every=3")
LoadWeights = Callable[[Path], "Weights"]


@pytest.fixture(scope="module")
def whole(make_project: MakeProject) -> Path:
    return make_project().train("run", *SETTINGS)


@contextmanager
def small_files(size: int) -> Iterator[None]:
    """No file of this process may grow beyond a size, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


def checkpoints(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def equal(one: Weights, other: Weights) -> bool:
    return all(torch.equal(one[name], other[name]) for name in other)


def test_a_disk_that_fills_up_while_a_checkpoint_is_written(
    project: Project, whole: Path, monkeypatch: pytest.MonkeyPatch, load_weights: LoadWeights
) -> None:
    """The second one does not fit; the first is as it was, and a run with room again goes on from there."""
    ours = KeepingCheckpointerCallback._save

    def save(self: KeepingCheckpointerCallback) -> None:
        if self.step == 3:
            return ours(self)
        with small_files(2**15):
            return ours(self)

    monkeypatch.setattr(KeepingCheckpointerCallback, "_save", save)
    message = project.refused("run", *SETTINGS)
    assert message.startswith("the checkpoint of step 6 cannot be written to run/checkpoints (OSError: ")
    assert "File too large" in message
    assert "Traceback" not in message
    assert message.endswith(
        "Checkpoints up to step3 are intact. Free disk space or make the folder writable, then run the same "
        "command with --resume."
    )
    run = project.folder / "run"
    assert checkpoints(run) == ["step3"]
    monkeypatch.undo()
    outcome = project.isopref("train", "my.yaml", "run.folder=run", *SETTINGS, "--resume")
    assert outcome.code == 0, outcome.err
    assert "resume after step 3\n" in outcome.out
    assert equal(load_weights(run / "model"), load_weights(whole / "model"))


def test_a_disk_that_fills_up_while_metrics_are_written(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = MetricsFileCallback.log_metrics

    def full(self: MetricsFileCallback, step: int, metrics: dict[str, float]) -> None:
        if step == 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        ours(self, step, metrics)

    monkeypatch.setattr(MetricsFileCallback, "log_metrics", full)
    message = project.refused("run", *SETTINGS)
    assert message.startswith("step 5: run cannot be written (No space left on device).")
    assert "--resume" in message


def test_a_place_that_is_not_a_folder(project: Project) -> None:
    (project.folder / "file").write_text("")
    message = project.refused("file/run", *SETTINGS)
    assert message.startswith("run.folder: cannot write to file/run (")
    assert message.endswith("Choose another folder.")


@pytest.mark.parametrize("harm", ["flip", "cut", "lose", "unseal"])
def test_a_damaged_checkpoint_is_skipped_by_name(
    project: Project, whole: Path, load_weights: LoadWeights, harm: str
) -> None:
    run = project.folder / "run"
    shutil.copytree(whole, run)
    shutil.rmtree(run / "model")
    assert checkpoints(run) == ["step10", "step9"]
    file = next((run / "checkpoints" / "step10" / "model_and_optim").glob("*.distcp"))
    content = bytearray(file.read_bytes())
    match harm:
        case "flip":
            content[len(content) // 2] ^= 1
            file.write_bytes(content)
        case "cut":
            file.write_bytes(content[:-100])
        case "lose":
            file.unlink()
        case "unseal":
            (run / "checkpoints" / "step10" / "seal.json").unlink()
    what = {"lose": f"model_and_optim/{file.name} is missing", "unseal": "it was not finished"}
    outcome = project.isopref("train", "my.yaml", "run.folder=run", *SETTINGS, "--resume", "auto")
    assert outcome.code == 0, outcome.err
    problem = what.get(harm, f"model_and_optim/{file.name} is damaged")
    assert f"resume: skipping run/checkpoints/step10: {problem}\nresume after step 9\n" in outcome.out
    assert equal(load_weights(run / "model"), load_weights(whole / "model"))


def test_no_whole_checkpoint_is_said_not_overwritten(project: Project, whole: Path) -> None:
    run = project.folder / "run"
    shutil.copytree(whole, run)
    shutil.rmtree(run / "model")
    for name in checkpoints(run):
        (run / "checkpoints" / name / "seal.json").write_text("{")
    message = project.refused("run", *SETTINGS, "--resume")
    assert message.startswith("--resume: no intact checkpoint in run/checkpoints.")
    assert checkpoints(run) == ["step10", "step9"]


class Evil:
    """What a checkpoint from a stranger may hold."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("evil was here",)


@pytest.mark.parametrize("file", ["model_and_optim/.metadata", "train/rank0.pt"])
def test_a_checkpoint_that_holds_code_is_refused(project: Project, whole: Path, file: str) -> None:
    run = project.folder / "run"
    shutil.copytree(whole, run)
    shutil.rmtree(run / "model")
    shutil.rmtree(run / "checkpoints" / "step9")
    folder = run / "checkpoints" / "step10"
    if file.endswith(".pt"):
        torch.save({"data_loader": Evil()}, folder / file)
    else:
        (folder / file).write_bytes(pickle.dumps(Evil()))
    seal = json.loads((folder / "seal.json").read_text())
    seal[file] = hashlib.blake2b((folder / file).read_bytes(), digest_size=16).hexdigest()
    (folder / "seal.json").write_text(json.dumps(seal))
    message = project.refused("run", *SETTINGS, "--resume")
    assert message.startswith("run/checkpoints/step10: holds more than plain data (")
    assert not list(project.folder.rglob("evil was here"))


def test_two_runs_in_one_folder(project: Project) -> None:
    folder = project.folder / "run"
    folder.mkdir()
    with locked(folder):
        message = project.refused("run", *SETTINGS)
    assert message.startswith(f"run.folder: run is in use by another run (process {os.getpid()} on ")
    assert [path.name for path in folder.iterdir()] == []
    project.train("run", *SETTINGS)
    assert not (folder / LOCK_FILE).exists()


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from isopref.runs.lock import locked\n"
        "with locked(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(RunError, match=f"in use by another run \\(process {holder.pid} on "), locked(tmp_path):
        pass
    holder.kill()
    holder.communicate()
    with locked(tmp_path):
        assert (tmp_path / LOCK_FILE).read_text().startswith(f"process {os.getpid()} on ")


def test_saves_by_minutes_follow_no_clock_that_jumps(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that only runs forward a step takes 10 s, and a save 10 s more. The time of day jumps by years."""
    ours, save, saved, now = build_trainer._callbacks, KeepingCheckpointerCallback._save, [], [0.0]

    def clock() -> float:
        now[0] += 10.0
        return now[0]

    def callbacks(*arguments: Any) -> dict[str, Any]:
        made = ours(*arguments)
        vars(made["checkpointer"])["clock"] = clock
        return made

    def noted(self: KeepingCheckpointerCallback) -> None:
        saved.append(self.step)
        save(self)

    monkeypatch.setattr(time, "time", lambda: 1e9 + 1e8 * (-1) ** len(saved))
    monkeypatch.setattr(build_trainer, "_callbacks", callbacks)
    monkeypatch.setattr(KeepingCheckpointerCallback, "_save", noted)
    project.train("run", "data.eval=null", "run.save_minutes=0.5", "run.keep=10")
    # Half a minute is full at the third reading after the last save's; and the end is always saved.
    assert saved == [3, 6, 9, 10]


LOSSES = {2: 0.6, 4: 0.5, 6: 0.7, 8: 0.8, 10: 0.9}
OFTEN = ("run.eval_every=2", "run.keep=1", "run.save_every=5", "run.folder=run")


def found_losses(monkeypatch: pytest.MonkeyPatch, losses: dict[int, float]) -> None:
    """Evaluations find these held-out losses, by step."""
    ours = EvaluateCallback
    monkeypatch.setattr(
        build_trainer,
        "EvaluateCallback",
        lambda **given: ours(**{**given, "evaluate": lambda step: {"eval/loss": losses[step]}}),
    )


@pytest.mark.parametrize("layout", ["single", "fsdp"])
def test_the_best_model_is_kept_besides_the_last(
    project: Project, monkeypatch: pytest.MonkeyPatch, load_weights: LoadWeights, layout: str
) -> None:
    """Held-out loss falls up to step 4 and rises from there; the run stops in between and goes on."""
    at_4 = project.train("short", "optim.max_steps=4", "optim.schedule=constant", f"layout.parallel={layout}")
    found_losses(monkeypatch, LOSSES)
    settings = (*OFTEN, "run.keep_best=true", "optim.schedule=constant", f"layout.parallel={layout}")
    run = project.folder / "run"
    outcome = project.isopref("train", "my.yaml", *settings)
    assert outcome.code == 0, outcome.err
    assert checkpoints(run) == ["step10", "step4"]
    assert "best  step4 has the lowest eval/loss; exporting it to run/model_best\n" in outcome.out
    best, last, wanted = (load_weights(one) for one in (run / "model_best", run / "model", at_4 / "model"))
    assert oracle.relative_error(best, wanted) == 0
    assert oracle.relative_error(last, wanted) > 0.001
    (run / "model").rename(project.folder / "model")
    shutil.rmtree(run / "checkpoints" / "step10")
    outcome = project.isopref("train", "my.yaml", *settings, "--resume")
    assert outcome.code == 0, outcome.err
    assert "resume after step 4\n" in outcome.out
    assert checkpoints(run) == ["step10", "step4"]
    assert oracle.relative_error(load_weights(run / "model_best"), wanted) == 0
    assert oracle.relative_error(load_weights(run / "model"), last) == 0


def test_a_best_step_that_was_not_kept_is_forgotten(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is asked to keep the best only when it goes on after step 5. Step 4 is gone by then; after it, 8 is."""
    found_losses(monkeypatch, {**LOSSES, 8: 0.55})
    run = project.train("run", *OFTEN, "run.keep=2")
    (run / "model").rename(project.folder / "model")
    shutil.rmtree(run / "checkpoints" / "step10")
    outcome = project.isopref("train", "my.yaml", *OFTEN, "run.keep_best=true", "--resume")
    assert outcome.code == 0, outcome.err
    place = Path("run/checkpoints")
    expected = (
        f"warning: run.keep_best: the lowest eval/loss so far is that of {place / 'step4'}, but it does not exist."
    )
    assert f"{expected} The best checkpoint from here on will be kept.\n" in outcome.out
    assert "best  step8 has the lowest eval/loss; exporting it to run/model_best\n" in outcome.out
    assert checkpoints(run) == ["step10", "step8"]


def test_a_damaged_best_model_is_not_exported(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    found_losses(monkeypatch, LOSSES)
    ours = KeepingCheckpointerCallback._save

    def save_and_damage(self: Any) -> None:
        ours(self)
        if self.step == 10:
            file = next((project.folder / "run/checkpoints/step4/model_and_optim").glob("*.distcp"))
            file.write_bytes(bytes(file.stat().st_size))

    monkeypatch.setattr(KeepingCheckpointerCallback, "_save", save_and_damage)
    outcome = project.isopref("train", "my.yaml", *OFTEN, "run.keep_best=true")
    assert outcome.code == 0, outcome.err
    assert "warning: run.keep_best: run/checkpoints/step4 has the lowest eval/loss, but model_and_optim/" in outcome.out
    assert " is damaged; not writing run/model_best\n" in outcome.out
    assert sorted(path.name for path in (project.folder / "run").glob("model*")) == ["model"]


def test_auto_starts_goes_on_and_has_nothing_to_do(project: Project) -> None:
    for said in ("train 10 steps", "run already contains this run, finished; nothing to do\n"):
        outcome = project.isopref("train", "my.yaml", "run.folder=run", *SETTINGS, "--resume", "auto")
        assert outcome.code == 0, outcome.err
        assert said in outcome.out


def test_auto_does_not_take_another_finished_run_for_this_one(project: Project) -> None:
    project.train("run", *SETTINGS)
    for change, told in {
        "optim.lr=2e-3": "optim.lr was 0.001, is 0.002",
        "data.train=eval.jsonl": "data.train was train.jsonl, is eval.jsonl",
    }.items():
        message = project.refused("run", *SETTINGS, change, "--resume", "auto")
        assert message.startswith(f"--resume: the run in run had another config: {told}")


def test_a_run_that_is_refused_leaves_no_folder(project: Project) -> None:
    project.refused("refused", *SETTINGS, "model.path=nowhere")
    assert not (project.folder / "refused").exists()
    (project.folder / "mine").mkdir()
    project.refused("mine", *SETTINGS, "model.path=nowhere")
    assert (project.folder / "mine").exists()  # it was there before
    project.train("run", *SETTINGS)
    (project.folder / "run" / "model").rename(project.folder / "model")
    project.refused("run", *SETTINGS, "data.train=eval.jsonl", "data.eval=null", "--resume")
    assert (project.folder / "run" / "checkpoints").exists()


def test_secrets_of_the_environment_are_written_nowhere(project: Project) -> None:
    names = ("HF_TOKEN", "WANDB_API_KEY", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY")
    secrets = {name: f"secret-of-{name.lower()}-{number}" for number, name in enumerate(names)}
    project.extra_env.update(secrets)
    outcome = project.isopref("train", "my.yaml", "run.folder=run", "run.save_every=3", "optim.max_steps=4")
    assert outcome.code == 0, outcome.err
    files = [path for folder in ("run", "cache") for path in (project.folder / folder).rglob("*") if path.is_file()]
    assert len(files) > 10
    for secret in secrets.values():
        assert secret not in outcome.out + outcome.err
        assert [path for path in files if secret.encode() in path.read_bytes()] == []
