"""The state of a run, in a file in its folder: written by the run, read by the other commands.

The run holds a lock on the file until its process ends, however it ends. This distinguishes a killed run from one in
progress.
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from isopref.locks import FileLock
from isopref.runs.files import STATE_FILE

Outcome = Literal["running", "finished", "stopped", "failed"]


@dataclass(frozen=True)
class State:
    """Progress of a run, `step` of `steps` at the time of writing, and why it failed, if it did."""

    outcome: Outcome
    step: int
    steps: int
    seconds: float = 0.0  # since this process began to train
    error: str = ""


@contextmanager
def held_state(folder: Path) -> Iterator[Callable[[State], None]]:
    """Lock the folder's state file. Yields a function that writes the state."""
    file = os.open(folder / STATE_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        # Some file systems have no locks; there, a killed run looks like one in progress.
        with suppress(OSError):
            FileLock(file).take()

        def write(state: State) -> None:
            content = json.dumps(asdict(state), ensure_ascii=False).encode() + b"\n"
            os.pwrite(file, content, 0)
            os.ftruncate(file, len(content))

        yield write
    finally:
        os.close(file)


def read_state(folder: Path) -> State | None:
    """The state of the run in a folder; None if none was written."""
    try:
        with (folder / STATE_FILE).open("rb") as file:
            content = json.loads(file.read())
            state = State(**content)
            return _killed(state) if state.outcome == "running" and not FileLock(file.fileno()).is_taken() else state
    except (OSError, ValueError, TypeError):
        return None


def _killed(state: State) -> State:
    return State(
        "failed",
        state.step,
        state.steps,
        state.seconds,
        "its process died without an error message (killed or crashed)",
    )
