"""Checkpoints on disk: how they are sealed, found, verified and removed.

The engine writes them to a temporary folder and renames it. The seal, with the digests of all files, is written last: a
folder without a seal, or with content that does not match it, is incomplete, and no run resumes from it.
callbacks/checkpointer.py decides when to save.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from isopref.errors import RunError, is_echo
from isopref.places import remove_partial, write_whole
from isopref.ranks import num_ranks, own_rank

SEAL = "seal.json"
LAST_FILE = "last_checkpoint.json"  # in the run folder: the step of the last checkpoint, which it outlives
UNFINISHED = "it was not finished"
NAME = re.compile(r"step(\d+)")
CHUNK = 2**24

Found = TypeVar("Found")


def remove(folder: Path) -> None:
    """Remove a checkpoint, seal first, so a partially removed one counts as incomplete."""
    (folder / SEAL).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def last_saved(folder: Path) -> int | None:
    """The step of the last checkpoint that a run ever sealed, even if it is gone now; None if there was none."""
    try:
        return int(json.loads((folder.parent / LAST_FILE).read_bytes())["step"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"{folder.parent / LAST_FILE} cannot be read ({error}). Remove it to resume from the checkpoints that "
            "remain."
        ) from error


def outlook(folder: Path) -> str:
    """What remains in the checkpoint folder of a run that could not write, and how to continue from there."""
    run = folder.parent
    if not run.exists():
        return (
            f"{run} was removed or renamed during the run, and its checkpoints with it. Put it back and "
            "use --resume, or start again."
        )
    sealed = [path for _, path in numbered(folder) if (path / SEAL).exists()]
    if not sealed and last_saved(folder) is not None:
        return (
            f"The earlier checkpoints were removed during the run. To start over, remove {run} or set a new run.folder."
        )
    left = f"Checkpoints up to {sealed[-1].name} are intact." if sealed else "There is no earlier checkpoint."
    return f"{left} Free disk space or make the folder writable, then run the same command with --resume."


def sweep(folder: Path) -> None:
    """Remove partial files that a dead process left next to the checkpoints in a folder."""
    for path in folder.glob("step*-tmp"):
        shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob("step*"):
        remove_partial(path)


def seal(folder: Path) -> None:
    """Write the digests of all files in a checkpoint. All ranks call this together and share the reading."""
    digests = _digests(folder, from_first(_files, folder))
    if own_rank() == 0:
        write_whole(folder / SEAL, json.dumps(digests, indent=1).encode())
    if dist.is_initialized():
        dist.barrier()


def damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint; None if it is intact. All ranks call this together and share the reading."""
    expected = from_first(_sealed, folder)
    if isinstance(expected, str):
        return expected
    found = _digests(folder, sorted(expected))
    changed = [name for name in sorted(expected) if found[name] != expected[name]]
    return f"{changed[0]} is damaged" if changed else None


def newest_intact(folder: Path) -> tuple[Path | None, dict[Path, str]]:
    """The last intact checkpoint in a folder, and what is wrong with later ones. All ranks call this together."""
    wrong: dict[Path, str] = {}
    for _, path in reversed(from_first(numbered, folder)):
        problem = damage(path)
        if problem is None:
            return path, wrong
        wrong[path] = problem
    return None, wrong


def numbered(folder: Path) -> list[tuple[int, Path]]:
    """Checkpoints in a folder with their steps, in order."""
    found = ((NAME.fullmatch(path.name), path) for path in folder.glob("step*"))
    return sorted((int(match[1]), path) for match, path in found if match)


def _sealed(folder: Path) -> dict[str, str] | str:
    """The digests that a checkpoint should have, or what is obviously wrong with it."""
    try:
        expected: dict[str, str] = dict(json.loads((folder / SEAL).read_bytes()))
    except FileNotFoundError:
        return UNFINISHED if folder.exists() else "it does not exist"
    except (OSError, ValueError, TypeError) as error:
        return f"{SEAL} cannot be read ({error})"
    missing = sorted(set(expected) - set(_files(folder)))
    return f"{missing[0]} is missing" if missing else expected


def _files(folder: Path) -> list[str]:
    names = (str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in names if name != SEAL)


def _digests(folder: Path, names: list[str]) -> dict[str, str]:
    """Digest of each file; each rank reads its share, and all get the full result."""
    size = num_ranks()
    mine = {name: _digest(folder / name) for name in names[own_rank() :: size]}
    every: list[Any] = [mine]
    if size > 1:
        every = [None] * size
        dist.all_gather_object(every, mine)
    return {name: digest for part in every for name, digest in part.items()}


def _digest(path: Path) -> str:
    """Digest of a file's content; "unreadable" if it cannot be read."""
    digest = hashlib.blake2b(digest_size=16)
    try:
        with path.open("rb") as file:
            while chunk := file.read(CHUNK):
                digest.update(chunk)
    except OSError:
        return "unreadable"
    return digest.hexdigest()


def from_first(look: Callable[[Path], Found], folder: Path) -> Found:
    """What the first rank sees, broadcast to all: others might look a moment earlier or later."""
    seen: list[Any] = [look(folder) if own_rank() == 0 else None]
    if num_ranks() > 1:
        dist.broadcast_object_list(seen)
    found: Found = seen[0]
    return found


@contextmanager
def refusing(folder: Path, step: int) -> Iterator[None]:
    """Turn a failed checkpoint write into a user error: the disk is full or the folder is gone."""
    try:
        yield
    except (OSError, RuntimeError, CheckpointException) as error:
        if is_echo(error):
            raise
        if own_rank() == 0:
            sweep(folder)
        text = str(error)  # for the engine's exceptions a traceback, with the cause first
        cause = next((line for line in text.splitlines() if re.match(r"\w+Error: ", line)), text)
        reason = " ".join(cause.split())[:300]
        raise RunError(
            f"the checkpoint of step {step} cannot be written to {folder} ({reason}). {outlook(folder)}"
        ) from error
