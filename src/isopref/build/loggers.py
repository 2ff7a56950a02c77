"""run.loggers -> engine callbacks. A logger that cannot start is refused before any work is done."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from olmo_core.train.callbacks import Callback, CometCallback

from isopref.build.run import Run
from isopref.engine.callbacks.tensorboard import TensorBoardCallback
from isopref.engine.callbacks.wandb import WandbCallback
from isopref.errors import ConfigError
from isopref.optional import require
from isopref.runs.files import TENSORBOARD_FOLDER

PROJECT = "isopref"
MODULES = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}


def check_loggers(run: Run) -> None:
    """Raise ConfigError if a logger could not start: its package or, on the first rank, its login is missing.

    Does not contact any service.
    """
    packages = _packages(run)
    if run.env.is_first and "wandb" in packages:
        _check_wandb(packages["wandb"])
    if run.env.is_first and "comet" in packages and "COMET_API_KEY" not in os.environ:
        raise ConfigError("run.loggers: comet needs the environment variable COMET_API_KEY, which is not set.")


def logger_callbacks(run: Run) -> dict[str, Callback]:
    """The loggers of the first rank. Raises ConfigError if one cannot start."""
    open_logger = {"tensorboard": _tensorboard, "wandb": _wandb, "comet": _comet}
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
