"""Cache locations (everything in them can be recomputed), and atomic file writes."""

import os
import re
import uuid
from pathlib import Path


def cache_folder() -> Path:
    """The cache folder: ISOPREF_CACHE, or ~/.cache/isopref."""
    return Path(os.environ.get("ISOPREF_CACHE") or "~/.cache/isopref").expanduser()


def reference_folder() -> Path:
    """Stores of reference log-probabilities, one folder each."""
    return cache_folder() / "reference"


def table_folder() -> Path:
    """Token tables, one file each."""
    return cache_folder() / "tables"


PARTIAL = re.compile(r".+\.[0-9a-f]{32}\.tmp")  # the names of unfinished files, as `write_whole` makes them


def write_whole(path: Path, content: bytes) -> None:
    """Write a file atomically: after a crash it is either complete or absent."""
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def remove_partial(folder: Path) -> None:
    """Remove files left by a `write_whole` that was killed. Nothing may be writing to the folder."""
    for path in folder.glob("*.tmp"):
        if PARTIAL.fullmatch(path.name):
            path.unlink(missing_ok=True)
