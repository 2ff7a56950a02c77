"""A run in one call, for scripts and notebooks. It restores the process's state, and raises where the command exits.

isopref.build is imported when a run starts, as in the command, because some of its dependencies print on import.
"""

import gc
import logging
import multiprocessing
import os
import random
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from transformers.utils import logging as transformers_logging

from isopref.config.in_memory import still_named, take_records
from isopref.config.load import load_config
from isopref.engine.quiet import quiet_engine
from isopref.errors import ConfigError, RunError
from isopref.runs.read import RunRecord, read_run

if TYPE_CHECKING:
    from isopref.build.folder import Resume

# The loggers that a run reconfigures.
LOGGERS = ("", "isopref", "olmo_core", "torch.distributed.tensor", "torch.utils._pytree", "torchao")


def train(
    config: str | os.PathLike[str] | Mapping[str, Any], overrides: Sequence[str] = (), *, resume: "Resume" = "no"
) -> RunRecord:
    """Run `isopref train` in this process, and return the contents of its run folder.

    `config` is a YAML file or a mapping with the same sections; `overrides` are as on the command line; `resume` is
    "no", "must" (like --resume) or "auto". After Ctrl-C, the run finishes the step, saves a checkpoint and returns;
    `status` says so. In a mapping, data.train and data.eval also accept the records themselves: a list of dicts, or a
    `datasets.Dataset`. Raises UserError.
    """
    _check_process()
    if isinstance(overrides, str):
        raise ConfigError(f"overrides: expected a list, found a string. Write [{overrides!r}].")
    for one in overrides:
        if not isinstance(one, str):
            raise ConfigError(f"overrides: expected strings such as 'optim.lr=1e-6', found {one!r}.")
    if resume not in ("no", "must", "auto"):
        raise ConfigError(f"resume: must be one of no, must, auto; found {resume!r}.")
    if isinstance(config, Mapping):
        name = "run"
        content, memory = take_records(config)
        settings = load_config(content, overrides)
        memory = still_named(memory, settings)
    else:
        path = Path(config).expanduser()
        name, memory = path.stem, {}
        settings = load_config(path, overrides)
    with untouched_process():
        quiet_engine()
        from isopref.build.train import train as train_run
        from isopref.runs.folder import run_folder

        train_run(settings, name=name, resume=resume, memory=memory)
    gc.collect()  # GPU memory still held by a model and its trainer would be missing in the next run
    torch.cuda.empty_cache()
    return read_run(run_folder(settings, name))


def _check_process() -> None:
    """Raise RunError if a run could not have this process to itself."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # the check that multiprocessing itself uses
        raise RunError(
            "isopref.train: called in a worker process that tokenises data and has imported this script. Put the call "
            "under `if __name__ == '__main__':`, so that only the main process trains."
        )
    if threading.current_thread() is not threading.main_thread():
        raise RunError(
            "isopref.train: called outside the main thread, the only one that can handle Ctrl-C by saving a "
            "checkpoint. Call it in the main thread."
        )
    if (started := os.environ.get("WORLD_SIZE", "1")) != "1":
        raise RunError(
            f"isopref.train: runs in one process, but {started} were started (WORLD_SIZE). To use several, put the "
            "data in files and run the command: isopref train my.yaml --nproc N, or torchrun ... -m isopref train "
            "my.yaml."
        )
    if dist.is_initialized():
        raise RunError(
            "isopref.train: a process group already exists, but a run creates its own. Call "
            "torch.distributed.destroy_process_group() first."
        )


@contextmanager
def untouched_process() -> Iterator[None]:
    """Restore what a run changes in its process: loggers, warnings, progress bars, random states, environment."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [(list(one.handlers), one.level) for one in loggers]
    show, bars = warnings.showwarning, transformers_logging.is_progress_bar_enabled()
    python, numpy, variables = random.getstate(), np.random.get_state(), dict(os.environ)
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        for name in os.environ.keys() - variables.keys():
            del os.environ[name]
        os.environ.update(variables)
        if warnings.showwarning is not show:
            logging.captureWarnings(False)
        if bars:
            transformers_logging.enable_progress_bar()
        for one, (handlers, level) in zip(loggers, before, strict=True):
            for handler in set(one.handlers) - set(handlers):
                handler.close()
            one.handlers[:] = handlers
            one.setLevel(level)
