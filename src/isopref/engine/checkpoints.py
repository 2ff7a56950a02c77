"""Checkpoints: when they are saved, which are kept, and how a damaged one is known.

The engine writes them (beside their place, then renamed). A seal, the digests of all their files, comes last: a folder
without one, or with other bytes than its seal says, is not whole, and no run goes on from it. Weights that are not
finite are never saved.
"""

import hashlib
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch.distributed as dist
from olmo_core.train.callbacks import CheckpointerCallback
from torch.distributed.checkpoint.api import CheckpointException

from isopref.engine.callbacks import EvaluateCallback
from isopref.engine.together import Together
from isopref.errors import RunError, StartAgainError, is_echo
from isopref.models.finite import bad_weights
from isopref.models.parallel import unwrap
from isopref.places import write_whole
from isopref.ranks import num_ranks, own_rank

SEAL = "seal.json"
LAST_FILE = "last_checkpoint.json"  # in the run's folder: the step of the last one, which outlives the checkpoints
UNFINISHED = "it was not finished"
NAME = re.compile(r"step(\d+)")
CHUNK = 2**24

Found = TypeVar("Found")


@dataclass
class KeepingCheckpointerCallback(CheckpointerCallback):
    """Saves every so many steps or minutes, at the best evaluation, and when a signal asks the run to stop.

    It stands in for the engine's (3.0.0), which saves before the metrics of a step are complete, deletes an old
    checkpoint only a step after it wrote a new one, forgets what an earlier process wrote, and lets ranks learn of a
    signal at different steps. Saving is synchronous: the engine's asynchronous way can deadlock.

    :param minutes: save after so many minutes without a checkpoint too, by the first rank's clock.
    :param evaluate: keep the checkpoint of its best step besides the last ones.
    """

    minutes: float | None = None
    evaluate: EvaluateCallback | None = None
    stopped_by: signal.Signals | None = None  # as all ranks know it
    together: Together = field(default_factory=Together)
    clock: Callable[[], float] = time.monotonic  # not of the day: that may jump
    _saved_at: float = 0.0
    _asked: signal.Signals | None = None  # by this process
    _on_hangup: Any = signal.SIG_DFL

    def pre_train(self) -> None:
        for signum in (signal.SIGTERM, signal.SIGINT):  # the engine puts the old handlers back
            signal.signal(signum, self._note)
        self._on_hangup = signal.getsignal(signal.SIGHUP)
        if self._on_hangup is not signal.SIG_IGN:  # as under nohup
            signal.signal(signal.SIGHUP, self._note)
        self._saved_at = self.clock()
        found = [(number, path) for number, path in _numbered(Path(self.save_folder)) if number <= self.step]
        self._checkpoints = [str(path) for _, path in found]
        self._latest_checkpoint_step = found[-1][0] if found else -1

    def _note(self, signum: int, _frame: FrameType | None) -> None:
        if self._asked is not None:  # once is enough: the checkpoint is on its way
            return
        self._asked = signal.Signals(signum)
        if own_rank() == 0:
            os.write(2, f"\n{self._asked.name}: finishing this step and saving a checkpoint\n".encode())

    def post_train_batch(self) -> None:
        """Nothing yet: evaluation and metrics of the step come first."""

    def post_step(self) -> None:
        late = self.minutes is not None and self.clock() - self._saved_at >= 60 * self.minutes
        stop, is_late = self.together.most(self._asked or 0, late and own_rank() == 0)
        best = self.evaluate is not None and self.evaluate.best_step == self.step
        every = self.save_interval is not None and self.step % self.save_interval == 0
        if is_late or best or every or stop:  # while a second signal is still only noted
            self._save()
        if stop:
            self.stopped_by = signal.Signals(stop)
            self.trainer.cancel_run(f"{self.stopped_by.name} received", no_sync=True)

    def post_train(self) -> None:
        signal.signal(signal.SIGHUP, self._on_hangup)
        if self.step > max(0, self._latest_checkpoint_step):
            self._save()

    def on_error(self, exc: BaseException) -> None:
        signal.signal(signal.SIGHUP, self._on_hangup)
        if self._asked and isinstance(exc, StartAgainError):
            exc.at_once = False
        if is_echo(exc):  # another rank is gone: there is no step to finish when torchrun ends this one too
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if self._asked == signal.SIGTERM:
                os.kill(os.getpid(), signal.SIGTERM)

    def best(self) -> tuple[Path, str | None] | None:
        """The checkpoint of the best step, and what is wrong with it, if anything. All ranks call this together."""
        if self.evaluate is None or self.evaluate.best_step is None:
            return None
        path = Path(self.save_folder) / f"step{self.evaluate.best_step}"
        return path, damage(path)

    def check_weights(self) -> None:
        """Raise RunError if a trained weight is NaN or Inf. All ranks call this together."""
        module: Any = self.trainer.train_module
        bad = bad_weights(unwrap(module.model).model, trained_only=True)
        if bad:
            more = "" if len(bad) == 1 else f" and {len(bad) - 1} more tensors"
            raise self.refusal(f"the weights contain NaN or Inf ({bad[0]}{more})")

    def refusal(self, problem: str) -> RunError:
        """The error for weights that must not be saved."""
        earlier = [path for number, path in _numbered(Path(self.save_folder)) if number < self.step]
        sealed = [path for path in earlier if (path / SEAL).exists()]
        last = f"The last finite checkpoint is {sealed[-1]}." if sealed else "There is no earlier checkpoint."
        return RunError(
            f"step {self.step}: {problem}, so no checkpoint was written. {last} Start again in another run.folder with "
            "a lower optim.lr or optim.weight_decay, or with a wider model.dtype."
        )

    def _save(self) -> None:
        self.check_weights()
        folder = Path(self.save_folder)
        if not _from_first(Path.exists, folder.parent):  # the engine would make it again
            raise RunError(f"the checkpoint of step {self.step} cannot be written: {outlook(folder)}")
        with _refusing(folder, self.step):
            path = Path(self._save_checkpoint(save_async=False))
            seal(path)
            if own_rank() == 0:
                write_whole(folder.parent / LAST_FILE, json.dumps({"step": self.step}).encode())
        self._checkpoints.append(str(path))
        self._saved_at = self.clock()
        best = f"step{self.evaluate.best_step}" if self.evaluate is not None else None
        others = [old for old in self._checkpoints if Path(old).name != best]
        for old in others[: -(self.max_checkpoints or len(others))]:
            self._checkpoints.remove(old)
            if own_rank() == 0:
                remove(Path(old))


def remove(folder: Path) -> None:
    """Remove a checkpoint, its seal first: a half-removed one is not whole."""
    (folder / SEAL).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def last_saved(folder: Path) -> int | None:
    """The step of the last checkpoint that a run ever sealed, wherever it is now; None if there was none."""
    try:
        return int(json.loads((folder.parent / LAST_FILE).read_bytes())["step"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"{folder.parent / LAST_FILE} cannot be read ({error}). Remove it to resume from the checkpoints there are."
        ) from error


def outlook(folder: Path) -> str:
    """What a run that could not write has in its folder of checkpoints, and how to continue from there."""
    run = folder.parent
    if not run.exists():
        return (
            f"{run} is gone, and its checkpoints with it: it was removed or renamed during the run. Put it back and "
            "use --resume, or start again."
        )
    sealed = [path for _, path in _numbered(folder) if (path / SEAL).exists()]
    if not sealed and last_saved(folder) is not None:
        return (
            f"The earlier checkpoints were removed during the run. Start over: remove {run}, or set another run.folder."
        )
    left = f"Checkpoints up to {sealed[-1].name} are as they were." if sealed else "There is no earlier checkpoint."
    return f"{left} Free space, or make it writable, then start the same command again with --resume."


def sweep(folder: Path) -> None:
    """Remove what a process that died left half-written beside the checkpoints of a folder."""
    for path in folder.glob("step*-tmp"):
        shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob("step*/*.tmp"):
        path.unlink(missing_ok=True)


def seal(folder: Path) -> None:
    """Write the digests of all files of a checkpoint. All ranks call this together and share the reading."""
    digests = _digests(folder, _from_first(_files, folder))
    if own_rank() == 0:
        write_whole(folder / SEAL, json.dumps(digests, indent=1).encode())
    if dist.is_initialized():
        dist.barrier()


def damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint; None for a whole one. All ranks call this together and share the reading."""
    expected = _from_first(_sealed, folder)
    if isinstance(expected, str):
        return expected
    found = _digests(folder, sorted(expected))
    changed = [name for name in sorted(expected) if found[name] != expected[name]]
    return f"{changed[0]} is damaged" if changed else None


def newest_whole(folder: Path) -> tuple[Path | None, dict[Path, str]]:
    """The last whole checkpoint in a folder, and what is wrong with those after it. All ranks call this together."""
    wrong: dict[Path, str] = {}
    for _, path in reversed(_from_first(_numbered, folder)):
        problem = damage(path)
        if problem is None:
            return path, wrong
        wrong[path] = problem
    return None, wrong


def _numbered(folder: Path) -> list[tuple[int, Path]]:
    """Checkpoints of a folder with their steps, in their order."""
    found = ((NAME.fullmatch(path.name), path) for path in folder.glob("step*"))
    return sorted((int(match[1]), path) for match, path in found if match)


def _sealed(folder: Path) -> dict[str, str] | str:
    """The digests that a checkpoint should have, or what is wrong with it at first sight."""
    try:
        expected: dict[str, str] = dict(json.loads((folder / SEAL).read_bytes()))
    except FileNotFoundError:
        return UNFINISHED if folder.exists() else "it is not there"
    except (OSError, ValueError, TypeError) as error:
        return f"{SEAL} cannot be read ({error})"
    missing = sorted(set(expected) - set(_files(folder)))
    return f"{missing[0]} is missing" if missing else expected


def _files(folder: Path) -> list[str]:
    names = (str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in names if name != SEAL)


def _digests(folder: Path, names: list[str]) -> dict[str, str]:
    """Digest of each file; each rank reads its share, all get the whole."""
    size = num_ranks()
    mine = {name: _digest(folder / name) for name in names[own_rank() :: size]}
    every: list[Any] = [mine]
    if size > 1:
        every = [None] * size
        dist.all_gather_object(every, mine)
    return {name: digest for part in every for name, digest in part.items()}


def _digest(path: Path) -> str:
    """Of a file's content; "unreadable" where it cannot be read."""
    digest = hashlib.blake2b(digest_size=16)
    try:
        with path.open("rb") as file:
            while chunk := file.read(CHUNK):
                digest.update(chunk)
    except OSError:
        return "unreadable"
    return digest.hexdigest()


def _from_first(look: Callable[[Path], Found], folder: Path) -> Found:
    """What the first rank sees, for all: others may look a moment earlier or later."""
    seen: list[Any] = [look(folder) if own_rank() == 0 else None]
    if num_ranks() > 1:
        dist.broadcast_object_list(seen)
    found: Found = seen[0]
    return found


@contextmanager
def _refusing(folder: Path, step: int) -> Iterator[None]:
    """A checkpoint that cannot be written is a user's matter: the disk is full, the folder is gone."""
    try:
        yield
    except (OSError, RuntimeError, CheckpointException) as error:
        if is_echo(error):
            raise
        if own_rank() == 0:
            sweep(folder)
        text = str(error)  # of the engine's exceptions a traceback, in which the cause comes first
        cause = next((line for line in text.splitlines() if re.match(r"\w+Error: ", line)), text)
        reason = " ".join(cause.split())[:300]
        raise RunError(
            f"the checkpoint of step {step} cannot be written to {folder} ({reason}). {outlook(folder)}"
        ) from error
