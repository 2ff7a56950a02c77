"""run.loggers -> engine callbacks. A logger that cannot start is refused before any work is done."""

import io
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from typing import Any

from olmo_core.train.callbacks import Callback, CometCallback

from isopref.build.run import Run
from isopref.engine.callbacks.mlflow import MlflowCallback
from isopref.engine.callbacks.tensorboard import TensorBoardCallback
from isopref.engine.callbacks.trackio import TrackioCallback
from isopref.engine.callbacks.wandb import WandbCallback
from isopref.errors import ConfigError
from isopref.optional import require
from isopref.runs.files import MLFLOW_FILE, TENSORBOARD_FOLDER

PROJECT = "isopref"
MOST_LETTERS = 500  # maximum length of a parameter that all MLflow servers accept
MODULES = {
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "comet": "comet_ml",
    "mlflow": "mlflow",
    "trackio": "trackio",
}


def check_loggers(run: Run) -> None:
    """Raise ConfigError if a logger could not start: its package or, on the first rank, its login is missing.

    Does not contact any service.
    """
    packages = _packages(run)
    if run.env.is_first and "wandb" in packages:
        _check_wandb(packages["wandb"])
    if run.env.is_first and "comet" in packages and "COMET_API_KEY" not in os.environ:
        raise ConfigError(
            "run.loggers: comet needs the environment variable COMET_API_KEY, which is not set. Set it or remove comet."
        )


def logger_callbacks(run: Run) -> dict[str, Callback]:
    """The loggers of the first rank. Raises ConfigError if one cannot start."""
    open_logger = {
        "tensorboard": _tensorboard,
        "wandb": _wandb,
        "comet": _comet,
        "mlflow": _mlflow,
        "trackio": _trackio,
    }
    return {name: open_logger[name](run, package) for name, package in _packages(run).items() if run.env.is_first}


def _packages(run: Run) -> dict[str, Any]:
    return {
        name: require(MODULES[name], extra=name, why=f"run.loggers names {name}") for name in run.config.run.loggers
    }


def _tensorboard(run: Run, _package: Any) -> Callback:
    return TensorBoardCallback(folder=run.folder / TENSORBOARD_FOLDER)


def _check_wandb(wandb: Any) -> None:
    wandb.setup(settings=wandb.Settings(silent=True))  # also keeps it from prompting for a key
    with _named_faults(wandb):
        wandb.login(verify=False)


@contextmanager
def _named_faults(wandb: Any) -> Iterator[None]:
    try:
        yield
    except wandb.Error as error:
        raise ConfigError(
            f"run.loggers: wandb cannot start ({' '.join(str(error).split())}). Log in with `wandb login`, or set "
            "WANDB_MODE=offline."
        ) from error


def _wandb(run: Run, wandb: Any) -> Callback:
    with _named_faults(wandb):
        opened = wandb.init(
            dir=str(run.folder),
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run.folder.name,
            config=run.config.model_dump(mode="json"),
            settings=wandb.Settings(console="off", silent=True),
        )
    run.display.say(f"wandb {f'offline, in {opened.dir}' if opened.offline else opened.url}")
    return WandbCallback(run=opened)


def _comet(run: Run, _package: Any) -> Callback:
    return CometCallback(
        name=run.folder.name,
        project=os.environ.get("COMET_PROJECT_NAME", PROJECT),
        config=run.config.model_dump(mode="json"),
        cancel_tags=None,
    )


def _mlflow(run: Run, mlflow: Any) -> Callback:
    uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(run.folder / MLFLOW_FILE).resolve()}"
    where = without_password(uri)
    try:
        client = mlflow.MlflowClient(tracking_uri=uri)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = client.get_experiment_by_name(name)
        experiment_id = client.create_experiment(name) if experiment is None else experiment.experiment_id
        run_id = client.create_run(experiment_id, run_name=run.folder.name).info.run_id
        params = [mlflow.entities.Param(*field) for field in _fields(run.config.model_dump(mode="json"))]
        client.log_batch(run_id, params=params)
    except Exception as error:  # whatever the server, the connection or a missing database driver raises
        why = without_password(" ".join(str(error).split()))
        raise ConfigError(
            f"run.loggers: mlflow cannot start at {where} ({why}). Set MLFLOW_TRACKING_URI to a server that answers, "
            "or unset it to write to the run folder, for which you need: pip install 'isopref[mlflow]'"
        ) from error
    run.display.say(f"mlflow {where}, experiment {name}")
    return MlflowCallback(package=mlflow, client=client, run_id=run_id, display=run.display)


def without_password(text: str) -> str:
    """A text without the user and password of the URLs in it."""
    return re.sub(r"://[^/\s]*@", "://***@", text)


def _fields(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The config as MLflow's parameters, which are short texts."""
    for section, values in config.items():
        for name, value in values.items():
            yield f"{section}.{name}", str(value)[:MOST_LETTERS]


def _trackio(run: Run, trackio: Any) -> Callback:
    project = os.environ.get("TRACKIO_PROJECT", PROJECT)
    try:
        with redirect_stdout(io.StringIO()):
            opened = trackio.init(
                project=project,
                name=run.folder.name,
                config=run.config.model_dump(mode="json"),
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
    except Exception as error:  # whatever the Space or the connection raises
        raise ConfigError(
            f"run.loggers: trackio cannot start ({' '.join(str(error).split())}). Unset TRACKIO_SPACE_ID and "
            "TRACKIO_SERVER_URL to log to this machine."
        ) from error
    run.display.say(f"trackio project {project}; to see it: trackio show --project {project}")
    return TrackioCallback(package=trackio, run=opened)
