"""run.loggers: the metrics of metrics.jsonl, elsewhere too."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, get_args
from uuid import uuid4

import pytest

from isopref.build.loggers import MODULES
from isopref.config.schema import RunConfig
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


@pytest.fixture
def wandb_project(project: Project) -> Project:
    """A project in a process where wandb has not been used: it remembers its mode and its key."""
    wandb = pytest.importorskip("wandb", reason="wandb is not installed: pip install 'isopref[wandb]'")
    wandb.teardown()
    return project


def test_wandb_without_a_network(wandb_project: Project) -> None:
    project = wandb_project
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
def logged_out(wandb_project: Project) -> Project:
    """A project of a user whom Weights & Biases does not know."""
    ours = {"WANDB_MODE": "online", "WANDB_API_KEY": "", "NETRC": "", "HOME": str(wandb_project.folder)}
    wandb_project.extra_env |= ours
    return wandb_project


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


class Mlflow(ModuleType):
    """Stands in for MLflow, whose package is large: as much of its API as we use."""

    def __init__(self, *, fails: str = ""):
        super().__init__("mlflow")
        self.fails, self.entities = fails, SimpleNamespace(Metric=tuple_of, Param=tuple_of)
        self.logged: dict[int, dict[str, float]] = {}
        self.params: dict[str, str] = {}
        self.ended = self.uri = ""

    def MlflowClient(self, tracking_uri: str) -> Mlflow:  # noqa: N802
        self.uri = tracking_uri
        return self

    def get_experiment_by_name(self, name: str) -> None:
        if self.fails == "at the start":
            raise ConnectionError("no answer")
        assert name == "isopref"

    def create_experiment(self, name: str) -> str:
        return "7"

    def create_run(self, experiment_id: str, run_name: str) -> SimpleNamespace:
        assert (experiment_id, run_name) == ("7", "run")
        return SimpleNamespace(info=SimpleNamespace(run_id="r"))

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = (), synchronous: bool = True) -> Mlflow:
        assert synchronous == bool(params)
        self.params |= dict(params)
        for name, value, _, step in metrics:
            self.logged.setdefault(step, {})[name] = value
        return self

    def wait(self) -> None:
        if self.fails == "later":
            raise ConnectionError("gone")

    def set_terminated(self, run_id: str, status: str) -> None:
        self.ended = status


def tuple_of(*values: Any) -> tuple[Any, ...]:
    return values


def steps_of(lines: list[dict[str, float]]) -> dict[int, dict[str, float]]:
    return {int(line["step"]): without_saving(line) for line in lines}


def test_mlflow(project: Project, read_metrics: ReadMetrics, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = Mlflow()
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    run = project.train("run", "run.loggers=[mlflow]", *SHORT)
    assert mlflow.uri == f"sqlite:///{run.resolve() / 'mlflow.db'}"
    assert {step: without_saving(line) for step, line in mlflow.logged.items()} == steps_of(read_metrics(run))
    assert mlflow.params["optim.max_steps"] == "4"
    assert mlflow.ended == "FINISHED"


def test_mlflow_without_an_answer(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    project.extra_env["MLFLOW_TRACKING_URI"] = "http://127.0.0.1:9"
    monkeypatch.setitem(sys.modules, "mlflow", Mlflow(fails="at the start"))
    message = project.refused("run", "run.loggers=[mlflow]", *SHORT)
    assert message.startswith("run.loggers: mlflow cannot start at http://127.0.0.1:9 (no answer). Set")
    monkeypatch.setitem(sys.modules, "mlflow", Mlflow(fails="later"))
    outcome = project.isopref("train", "my.yaml", "run.folder=late/run", "run.loggers=[mlflow]", *SHORT)
    assert outcome.code == 0
    assert "warning: mlflow: not all metrics were sent (gone). metrics.jsonl has them." in outcome.out


class Trackio(ModuleType):
    """Stands in for Trackio."""

    def __init__(self) -> None:
        super().__init__("trackio")
        self.logged: dict[int, dict[str, float]] = {}
        self.ended = False

    def init(self, *, project: str, name: str, config: dict[str, Any], **_: bool) -> Trackio:
        assert (project, name, config["optim"]["max_steps"]) == ("isopref", "run", 4)
        print("* Created new run")  # noqa: T201
        return self

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.logged.setdefault(step, {}).update(metrics)
        metrics.clear()

    def finish(self) -> None:
        self.ended = True


def test_trackio(project: Project, read_metrics: ReadMetrics, monkeypatch: pytest.MonkeyPatch) -> None:
    trackio = Trackio()
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    run = project.train("run", "run.loggers=[trackio]", *SHORT)
    assert {step: without_saving(line) for step, line in trackio.logged.items()} == steps_of(read_metrics(run))
    assert trackio.ended


def test_mlflow_itself(project: Project, read_metrics: ReadMetrics) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed: pip install 'isopref[mlflow]'")
    run = project.train("run", "run.loggers=[mlflow]", *SHORT)
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{run / 'mlflow.db'}")
    (found,) = client.search_runs([client.get_experiment_by_name("isopref").experiment_id])
    assert (found.info.status, found.info.run_name, found.data.params["optim.max_steps"]) == ("FINISHED", "run", "4")
    logged = client.get_metric_history(found.info.run_id, "train/loss")
    losses = {step: line["train/loss"] for step, line in steps_of(read_metrics(run)).items()}
    assert {one.step: one.value for one in logged} == pytest.approx(losses)


def test_trackio_itself(project: Project, read_metrics: ReadMetrics) -> None:
    trackio = pytest.importorskip("trackio", reason="trackio is not installed: pip install 'isopref[trackio]'")
    project.extra_env["TRACKIO_PROJECT"] = name = f"isopref-{uuid4().hex}"  # its folder is fixed when it is imported
    run = project.train("run", "run.loggers=[trackio]", *SHORT)
    (found,) = trackio.Api().runs(name)
    lines = import_module("trackio.sqlite_storage").SQLiteStorage.get_logs(name, "run")
    logged = {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}
    assert logged == pytest.approx({step: line["train/loss"] for step, line in steps_of(read_metrics(run)).items()})
    assert found.config["optim"]["max_steps"] == 4


@pytest.mark.parametrize(
    ("name", "module"),
    [(name, MODULES[name]) for name in get_args(get_args(RunConfig.model_fields["loggers"].annotation)[0])],
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
    assert message.endswith(
        "run.loggers: must be a list, each one of tensorboard, wandb, comet, mlflow, trackio; found [tensorbord]."
    )
