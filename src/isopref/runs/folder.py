"""Folders of runs: where one lives, whether a folder holds one, and which ones there are."""

import os
from collections.abc import Iterator
from pathlib import Path

from isopref.config.schema import Config, run_id
from isopref.errors import RunError
from isopref.runs.files import (
    CHECKPOINTS_FOLDER,
    CONFIG_FILE,
    LOCK_FILE,
    LOG_FILE,
    METRICS_FILE,
    MICROBATCH_FILE,
    MODELS_FILE,
    STARTS_FILE,
    VALUES_FOLDER,
)

DEEPEST = 3  # folders below the one that is searched for runs

# What a start that fails, or is killed, leaves before the config: the folder is still free. The log comes before all
# but the lock, so without one these are somebody else's.
LEFTOVERS = (
    LOG_FILE,
    MODELS_FILE,
    VALUES_FOLDER,
    MICROBATCH_FILE,
    ".seen-*",
    "*.json.*.tmp",
    "*.yaml.*.tmp",
)
# What systems and tools put into folders that are empty to their owner.
SYSTEM_FILES = (".DS_Store", ".localized", "Thumbs.db", "desktop.ini", "lost+found", ".nfs*", ".gitkeep")


def run_folder(config: Config, name: str) -> Path:
    """Where a run of a config lives. `name` is the config file's, for the default. Raises RunError."""
    short = name.encode()[:200].decode(errors="ignore")  # a file name has at most 255 bytes
    folder = Path(config.run.folder or f"runs/{short}-{run_id(config)}").expanduser()
    try:
        folder.exists()
    except OSError as error:  # in a folder that may not be entered
        raise RunError(f"run.folder: cannot use {folder} ({error.strerror}). Set run.folder to another.") from error
    return folder


def holds_run(folder: Path) -> bool:
    """Whether a run has begun in a folder. A config.yaml alone may be anybody's."""
    begun = any((folder / name).exists() for name in (STARTS_FILE, METRICS_FILE, MODELS_FILE))
    return begun and (folder / CONFIG_FILE).exists()


def others_in(folder: Path) -> list[str]:
    """What is in a folder that neither a failed start nor the system left there: by name, in order."""
    if not folder.is_dir():
        return []
    leftovers = LEFTOVERS if (folder / LOG_FILE).exists() else ()
    passed = (LOCK_FILE, *leftovers, *SYSTEM_FILES)
    found = [path for path in folder.iterdir() if not any(path.match(pattern) for pattern in passed)]
    # The engine makes the folder of checkpoints ahead of time.
    return sorted(path.name for path in found if path.name != CHECKPOINTS_FOLDER or any(path.iterdir()))


def find_runs(folder: Path) -> Iterator[Path]:
    """The folders of runs in and below a folder, in order. Nothing is looked for inside a run."""
    for place, below, files in os.walk(folder):
        depth = len(Path(place).relative_to(folder).parts)
        if CONFIG_FILE in files and (METRICS_FILE in files or STARTS_FILE in files):
            yield Path(place)
            below.clear()
        elif depth == DEEPEST:
            below.clear()
        below.sort()
