"""run.loggers: the metrics of metrics.jsonl, elsewhere too."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from isopref.engine.callbacks.metrics_file import MetricsFileCallback
from support.project import Project

ReadMetrics = Callable[[Path], list[dict[str, float]]]

SHORT = ("optim.max_steps=4", "run.save_every=2", "data.eval=null", "run.export=false")


class PulledPlugError(Exception):
    """Stands for all that ends a run."""


def without_saving(line: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in line.items() if name != "step" and not name.startswith("checkpoint/")}


def read_events(folder: Path) -> dict[int, dict[str, float]]:
    """TensorBoard's own reading of its files: the metrics by step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    found: dict[int, dict[str, float]] = {}
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            assert name not in found.setdefault(event.step, {}), "a step that was logged twice"
            found[event.step][name] = event.value
    return {step: without_saving(line) for step, line in found.items()}


def test_tensorboard(project: Project, read_metrics: ReadMetrics) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install 'isopref[tensorboard]'")
    run = project.train("run", "run.loggers=[tensorboard]", *SHORT)
    lines = read_metrics(run)
    events = read_events(run / "tensorboard")
    assert sorted(events) == [1, 2, 3, 4]
    for line in lines:
        assert events[int(line["step"])] == pytest.approx(without_saving(line), rel=1e-6)


def test_tensorboard_of_a_resumed_run_has_every_step_once(
    project: Project, read_metrics: ReadMetrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install 'isopref[tensorboard]'")
    ours = MetricsFileCallback.log_metrics

    def fails_late(self: MetricsFileCallback, step: int, metrics: dict[str, float]) -> None:
        if step == 4:
            raise PulledPlugError
        ours(self, step, metrics)

    monkeypatch.setattr(MetricsFileCallback, "log_metrics", fails_late)
    with pytest.raises(PulledPlugError):
        project.train("run", "run.loggers=[tensorboard]", *SHORT)
    monkeypatch.undo()
    run = project.train("run", "run.loggers=[tensorboard]", *SHORT, "--resume")  # does step 3 again
    assert sorted(read_events(run / "tensorboard")) == [1, 2, 3, 4]


def test_wandb_without_a_network(project: Project) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed: pip install 'isopref[wandb]'")
    project.extra_env["WANDB_MODE"] = "offline"
    outcome = project.isopref("train", "my.yaml", "run.folder=run", "run.loggers=[wandb]", *SHORT)
    assert outcome.code == 0, outcome.err
    assert "wandb offline, in " in outcome.out
    (log,) = (project.folder / "run" / "wandb").glob("offline-run-*/run-*.wandb")
    content = log.read_bytes()
    assert content.count(b"train/margin") >= 4  # once a step
    assert b"batch_size" in content  # the config


NO_DATA = "data.train=nowhere.jsonl"  # what fails once a run gets there


@pytest.fixture
def logged_out(project: Project) -> Project:
    """A project of a user whom Weights & Biases does not know."""
    wandb = pytest.importorskip("wandb", reason="wandb is not installed: pip install 'isopref[wandb]'")
    wandb.teardown()  # it remembers its mode and its key as long as the process lives
    project.extra_env |= {"WANDB_MODE": "online", "WANDB_API_KEY": "", "NETRC": "", "HOME": str(project.folder)}
    return project


def test_wandb_without_a_login(logged_out: Project) -> None:
    message = logged_out.refused("run", "run.loggers=[wandb]", NO_DATA, *SHORT)
    assert message.startswith("run.loggers: wandb cannot start (")
    assert message.endswith("Log in with `wandb login`, or set WANDB_MODE=offline.")
    assert not (logged_out.folder / "run" / "config.yaml").exists()  # the folder is still free


@pytest.mark.parametrize(
    "env",
    [
        {"WANDB_API_KEY": "a" * 40},
        {"NETRC": "netrc"},
        *({"WANDB_MODE": mode} for mode in ("offline", "dryrun", "disabled")),
    ],
    ids=str,
)
def test_wandb_with_a_login_or_without_need_of_one(logged_out: Project, env: dict[str, str]) -> None:
    (logged_out.folder / "netrc").write_text(f"machine api.wandb.ai login user password {'b' * 40}\n")
    (logged_out.folder / "netrc").chmod(0o600)
    logged_out.extra_env |= env
    assert "nowhere.jsonl: no such file" in logged_out.refused("run", "run.loggers=[wandb]", NO_DATA, *SHORT)


class Experiment:
    """Stands in for Comet's, which cannot do without its service."""

    logged: dict[int, dict[str, float]]
    ended = False

    def __init__(self, **settings: Any):
        Experiment.logged, Experiment.ended, self.settings = {}, False, settings

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.logged.setdefault(step, {}).update(metrics)

    def log_parameters(self, config: dict[str, Any]) -> None:
        assert config["optim"]["max_steps"] == 4

    def get_key(self) -> str:
        return "key"

    def set_name(self, name: str) -> None:
        assert name == "run"

    def end(self) -> None:
        Experiment.ended = True


def test_comet(project: Project, read_metrics: ReadMetrics, monkeypatch: pytest.MonkeyPatch) -> None:
    comet = ModuleType("comet_ml")
    comet.Experiment = Experiment  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "comet_ml", comet)
    assert "COMET_API_KEY, which is not set" in project.refused("run", "run.loggers=[comet]", NO_DATA, *SHORT)
    project.extra_env["COMET_API_KEY"] = "secret"
    run = project.train("run", "run.loggers=[comet]", *SHORT)
    assert {step: without_saving(line) for step, line in Experiment.logged.items()} == {
        int(line["step"]): without_saving(line) for line in read_metrics(run)
    }
    assert Experiment.ended
    assert "secret" not in "".join(path.read_text() for path in run.glob("*.*l*") if path.is_file())


@pytest.mark.parametrize(
    ("name", "module"), [("tensorboard", "tensorboard"), ("wandb", "wandb"), ("comet", "comet_ml")]
)
def test_a_missing_package_is_named(project: Project, monkeypatch: pytest.MonkeyPatch, name: str, module: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    message = project.refused("run", f"run.loggers=[{name}]", NO_DATA, *SHORT)
    assert message.startswith(f"run.loggers names {name}, which needs the package '{module}'")
    assert message.endswith(f"Try: pip install 'isopref[{name}]'")
    assert not (project.folder / "run" / "config.yaml").exists()


def test_loggers_that_are_none(project: Project) -> None:
    assert "run.loggers: lists wandb twice." in project.refused("run", "run.loggers=[wandb,wandb]")
    message = project.refused("run", "run.loggers=[tensorbord]")
    assert message.endswith("run.loggers: must be a list, each one of tensorboard, wandb, comet; found [tensorbord].")
