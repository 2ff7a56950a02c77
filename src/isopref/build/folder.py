"""The run folder: opened, locked and claimed, or refused because of its content."""

import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal

from isopref.build.run import Run, quiet_libraries
from isopref.config.load import dump_config, load_config, to_yaml
from isopref.config.schema import run_id
from isopref.errors import RunError, StartAgainError, UserError
from isopref.places import remove_partial, write_whole
from isopref.runs.files import CONFIG_FILE, LOG_FILE
from isopref.runs.folder import holds_run, others_in
from isopref.runs.lock import locked

Resume = Literal["no", "must", "auto"]  # auto: if the folder contains a run


def resumes(run: Run, resume: Resume) -> bool:
    """Whether a run resumes. A process restarted by its launcher does."""
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0 or StartAgainError.variable in os.environ
    if resume == "must":
        return True
    return (resume == "auto" or restarted) and holds_run(run.folder)


def is_finished(run: Run) -> bool:
    """Whether the folder already contains the result of this run. Raises RunError if it has another run's result."""
    if not (run.config.run.export and run.model_folder.exists() and holds_run(run.folder)):
        return False
    _refuse_other_math(run, ("model", "data", "objective", "optim"))
    return True


@contextmanager
def open_folder(run: Run, resume: bool) -> Iterator[None]:
    """Create the run folder, or refuse one with other content; lock it, and write the engine's log to it.

    A folder becomes a run with its config.yaml, which `claim_folder` writes. A run refused before that leaves no folder
    behind.
    """
    try:
        _refuse_folder(run, resume)
    except OSError as error:
        raise RunError(f"run.folder: cannot read {run.folder} ({error}). Choose another folder.") from error
    run.env.barrier()
    with _held_folder(run):
        yield


@contextmanager
def _removed_if_unused(folder: Path) -> Iterator[None]:
    """Remove a folder created for a run that is then refused. It is locked, so nobody else uses it."""
    try:
        yield
    except UserError:
        if not others_in(folder):
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _make(folder: Path) -> bool:
    """Create a folder; returns whether it is new."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.mkdir()
    except FileExistsError:
        return False
    return True


@contextmanager
def _held_folder(run: Run) -> Iterator[None]:
    with ExitStack() as stack:
        if run.env.is_first:
            try:
                made = _make(run.folder)
                stack.enter_context(locked(run.folder))
                if made:
                    stack.enter_context(_removed_if_unused(run.folder))
                stack.enter_context(_engine_log(run.folder / LOG_FILE))
            except OSError as error:
                raise RunError(f"run.folder: cannot write to {run.folder} ({error}). Choose another folder.") from error
        quiet_libraries()
        run.env.barrier()
        if apart := run.env.ranks_without(run.folder):
            raise RunError(
                f"run.folder: rank {apart[0]} does not see what rank 0 writes to {run.folder.absolute()}. Every rank "
                "writes part of a checkpoint. Set run.folder to a folder that all machines share."
            )
        ranks = f"{run.env.world_size} x {run.env.device.type}"
        run.display.say(f"run   {run.folder} (run id {run_id(run.config)}, {ranks})")
        yield


@contextmanager
def _engine_log(path: Path) -> Iterator[None]:
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger().addHandler(handler)
    for name in ("olmo_core", "isopref"):
        logging.getLogger(name).setLevel(logging.INFO)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        handler.close()


def claim_folder(run: Run) -> None:
    """Write the resolved config, and remove what a killed process left half-written: the folder now contains this run.

    Comes after all checks of config, data and model, so a failed start leaves the folder free, and a refused resume
    leaves it unchanged.
    """
    if run.env.is_first:
        notes = [
            f"{name} stands for {data.count} in-memory records that a script passed to isopref.train as {data.label}. "
            "They are not in any file: to resume or repeat this run, call isopref.train with the same records."
            for name, data in run.memory.items()
        ]
        remove_partial(run.folder)
        write_whole(run.folder / CONFIG_FILE, dump_config(run.config, notes).encode())


def _refuse_folder(run: Run, resume: bool) -> None:
    """Raise RunError if the folder's content does not match `resume`."""
    has_run = holds_run(run.folder)
    if has_run and run.config.run.export and run.model_folder.exists():
        raise RunError(
            f"{run.folder} contains a finished run. Set run.folder to start a new one, or remove that folder."
        )
    if has_run and not resume:
        raise RunError(
            f"{run.folder} already contains a run. Resume it with --resume, or set run.folder to start a new one."
        )
    if resume and not has_run:
        named = " Its name contains the run id, which changes with the math." if run.config.run.folder is None else ""
        raise RunError(f"--resume: {run.folder} holds no run.{named} Start it without --resume, or check run.folder.")
    if resume:
        _refuse_other_math(run)
    elif others := others_in(run.folder):
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        raise RunError(
            f"run.folder: {run.folder} is not an isopref run: it contains {', '.join(others[:3])}{more}. Set "
            "run.folder to a new or empty folder."
        )


def _refuse_other_math(run: Run, sections: Sequence[str] = ("model", "objective", "optim")) -> None:
    """Raise RunError if the run in the folder has a different model, objective or optimizer.

    Data may have moved: a resumed run compares the pairs themselves (ExampleLoader).
    """
    before, now = (one.model_dump(mode="json") for one in (load_config(run.folder / CONFIG_FILE), run.config))
    changed = [
        f"{section}.{name} was {to_yaml(before[section].get(name))}, is {to_yaml(now[section].get(name))}"
        for section in sections
        for name in {**before[section], **now[section]}  # a different loss may take different parameters
        if before[section].get(name) != now[section].get(name)
    ]
    if changed:
        raise RunError(
            f"--resume: the run in {run.folder} had another config: {'; '.join(changed)}. Only layout and run may "
            "change. Restore the original values, or start a new run in a different run.folder."
        )
