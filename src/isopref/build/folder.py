"""The folder of a run: opened, held and claimed, or refused for what it holds."""

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
from isopref.places import write_whole
from isopref.runs.files import CONFIG_FILE, LOG_FILE
from isopref.runs.folder import holds_run, others_in
from isopref.runs.lock import locked

Resume = Literal["no", "must", "auto"]  # auto: if the folder holds a run


def goes_on(run: Run, resume: Resume) -> bool:
    """Whether a run begins with a checkpoint rather than anew. A process that its launcher started again goes on."""
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0 or StartAgainError.variable in os.environ
    if resume == "must":
        return True
    return (resume == "auto" or restarted) and holds_run(run.folder)


def is_finished(run: Run) -> bool:
    """Whether the folder holds the result of the run already. Raises RunError where it is that of another."""
    if not (run.config.run.export and run.model_folder.exists() and holds_run(run.folder)):
        return False
    _refuse_other_math(run, ("model", "data", "objective", "optim"))
    return True


@contextmanager
def open_folder(run: Run, resume: bool) -> Iterator[None]:
    """Make the run's folder, or refuse one that holds anything else; hold it, and send the engine's log into it.

    What makes a folder a run is its config.yaml, which `claim_folder` writes. A run that is refused before that leaves
    no folder behind.
    """
    _refuse_folder(run, resume)
    made = run.env.is_first and not run.folder.exists()
    run.env.barrier()
    try:
        with _held_folder(run):
            yield
    except UserError:
        if made and not others_in(run.folder):
            shutil.rmtree(run.folder, ignore_errors=True)
        raise


@contextmanager
def _held_folder(run: Run) -> Iterator[None]:
    with ExitStack() as stack:
        if run.env.is_first:
            try:
                run.folder.mkdir(parents=True, exist_ok=True)
                stack.enter_context(locked(run.folder))
                stack.enter_context(_engine_log(run.folder / LOG_FILE))
            except OSError as error:
                raise RunError(f"run.folder: cannot write to {run.folder} ({error}). Choose another.") from error
        quiet_libraries()
        run.env.barrier()
        if apart := run.env.ranks_without(run.folder):
            raise RunError(
                f"run.folder: rank {apart[0]} does not see what rank 0 writes to {run.folder.absolute()}. Checkpoints "
                "have parts from every rank: set run.folder to a folder that all machines share."
            )
        ranks = f"{run.env.world_size} x {run.env.device.type}"
        run.display.say(f"run   {run.folder} (run id {run_id(run.config)}, {ranks})")
        yield


@contextmanager
def _engine_log(path: Path) -> Iterator[None]:
    handler = logging.FileHandler(path)
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
    """Write the resolved config: the folder holds this run from here on.

    Comes after all that can be wrong with config, data and model, so that a start that fails leaves the folder free,
    and a resume that is refused leaves it as it was.
    """
    if run.env.is_first:
        write_whole(run.folder / CONFIG_FILE, dump_config(run.config).encode())


def _refuse_folder(run: Run, resume: bool) -> None:
    """Raise RunError where the folder's content and `resume` do not go together."""
    has_run = holds_run(run.folder)
    if has_run and run.config.run.export and run.model_folder.exists():
        raise RunError(
            f"{run.folder} holds a finished run. Start in another folder: set run.folder, or remove that one."
        )
    if has_run and not resume:
        raise RunError(
            f"{run.folder} holds a run already. Go on with it: --resume. Or start another: set run.folder, or remove "
            "that one."
        )
    if resume and not has_run:
        named = " Its name has the run id, which changes with the math." if run.config.run.folder is None else ""
        raise RunError(f"--resume: {run.folder} holds no run.{named} Start it without --resume, or check run.folder.")
    if resume:
        _refuse_other_math(run)
    elif others := others_in(run.folder):
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        raise RunError(
            f"run.folder: {run.folder} holds no run of isopref, but other files: {', '.join(others[:3])}{more}. Choose "
            "a folder that is new or empty."
        )


def _refuse_other_math(run: Run, sections: Sequence[str] = ("model", "objective", "optim")) -> None:
    """Raise RunError where the run in the folder has another model, objective or optimizer.

    Data may have moved: a run that goes on compares the pairs themselves (PairLoader).
    """
    before, now = (one.model_dump(mode="json") for one in (load_config(run.folder / CONFIG_FILE), run.config))
    changed = [
        f"{section}.{name} was {to_yaml(value)}, is {to_yaml(now[section][name])}"
        for section in sections
        for name, value in before[section].items()
        if now[section][name] != value
    ]
    if changed:
        raise RunError(
            f"--resume: the run in {run.folder} had another config: {'; '.join(changed)}. Only layout and run may "
            "change. Use the first values, or start anew in another run.folder."
        )
