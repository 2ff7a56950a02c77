"""run.loggers -> callbacks of the engine. What cannot start says so before the run has its folder."""

import os
from typing import Any

from olmo_core.train.callbacks import Callback, CometCallback

from isopref.build.run import Run
from isopref.engine.loggers import TensorBoardCallback, WandbCallback
from isopref.errors import ConfigError
from isopref.optional import require

PROJECT = "isopref"


def logger_callbacks(run: Run) -> dict[str, Callback]:
    """The loggers of the first rank. Raises ConfigError on every rank where a package is missing."""
    open_logger = {"tensorboard": _tensorboard, "wandb": _wandb, "comet": _comet}
    modules = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}
    packages = {
        name: require(modules[name], extra=name, why=f"run.loggers names {name}") for name in run.config.run.loggers
    }
    return {name: open_logger[name](run, package) for name, package in packages.items() if run.env.is_first}


def _tensorboard(run: Run, _package: Any) -> Callback:
    return TensorBoardCallback(folder=run.folder / "tensorboard")


def _wandb(run: Run, wandb: Any) -> Callback:
    try:
        opened = wandb.init(
            dir=str(run.folder),
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run.folder.name,
            config=run.config.model_dump(mode="json"),
            settings=wandb.Settings(console="off", silent=True),
        )
    except wandb.Error as error:
        raise ConfigError(
            f"run.loggers: wandb cannot start ({' '.join(str(error).split())}). Log in with `wandb login`, or set "
            "WANDB_MODE=offline."
        ) from error
    run.display.say(f"wandb {f'offline, in {opened.dir}' if opened.offline else opened.url}")
    return WandbCallback(run=opened)


def _comet(run: Run, _package: Any) -> Callback:
    if "COMET_API_KEY" not in os.environ:
        raise ConfigError("run.loggers: comet needs the environment variable COMET_API_KEY, which is not set.")
    return CometCallback(
        name=run.folder.name,
        project=os.environ.get("COMET_PROJECT_NAME", PROJECT),
        config=run.config.model_dump(mode="json"),
        cancel_tags=None,
    )
