"""Where isopref keeps what it may need again (it can all be computed anew), and how it writes a file whole."""

import os
import uuid
from pathlib import Path


def cache_folder() -> Path:
    """The folder for what is kept between runs: ISOPREF_CACHE, or ~/.cache/isopref."""
    return Path(os.environ.get("ISOPREF_CACHE") or "~/.cache/isopref").expanduser()


def reference_folder() -> Path:
    """Where the stores of reference log-probabilities are, one folder for each."""
    return cache_folder() / "reference"


def table_folder() -> Path:
    """Where token tables are, one file for each."""
    return cache_folder() / "tables"


def write_whole(path: Path, content: bytes) -> None:
    """Give a file this content: after a crash it is there whole, or not there."""
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
