"""Run folders: where a run lives, whether a folder contains one, and how to find them."""

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

DEEPEST = 3  # levels below a folder at which `find_runs` looks for runs

# What a failed or killed start leaves before writing the config: the folder is still free. The log is written before
# everything except the lock, so without a log these files belong to someone else.
LEFTOVERS = (
    LOG_FILE,
    MODELS_FILE,
    VALUES_FOLDER,
    MICROBATCH_FILE,
    ".seen-*",
    "*.json.*.tmp",
    "*.yaml.*.tmp",
)
# Files that systems and tools put into folders that look empty.
SYSTEM_FILES = (".DS_Store", ".localized", "Thumbs.db", "desktop.ini", "lost+found", ".nfs*", ".gitkeep")


def run_folder(config: Config, name: str) -> Path:
    """The run folder of a config. `name` is the config file's name, for the default folder. Raises RunError."""
    short = name.encode()[:200].decode(errors="ignore")  # a file name has at most 255 bytes
    folder = Path(config.run.folder or f"runs/{short}-{run_id(config)}").expanduser()
    try:
        folder.exists()
    except OSError as error:  # in a folder without access
        raise RunError(
            f"run.folder: cannot use {folder} ({error.strerror}). Set run.folder to another folder."
        ) from error
    return folder


def holds_run(folder: Path) -> bool:
    """Whether a folder contains a run. A config.yaml alone is not enough."""
    begun = any((folder / name).exists() for name in (STARTS_FILE, METRICS_FILE, MODELS_FILE))
    return begun and (folder / CONFIG_FILE).exists()


def others_in(folder: Path) -> list[str]:
    """The names of files in a folder that neither a failed start nor the system left there, sorted."""
    if not folder.is_dir():
        return []
    leftovers = LEFTOVERS if (folder / LOG_FILE).exists() else ()
    passed = (LOCK_FILE, *leftovers, *SYSTEM_FILES)
    found = [path for path in folder.iterdir() if not any(path.match(pattern) for pattern in passed)]
    # The engine creates the checkpoint folder ahead of time.
    return sorted(path.name for path in found if path.name != CHECKPOINTS_FOLDER or any(path.iterdir()))


def find_runs(folder: Path) -> Iterator[Path]:
    """The run folders in and below a folder, sorted. Does not search inside a run."""
    for place, below, files in os.walk(folder):
        depth = len(Path(place).relative_to(folder).parts)
        if CONFIG_FILE in files and (METRICS_FILE in files or STARTS_FILE in files):
            yield Path(place)
            below.clear()
        elif depth == DEEPEST:
            below.clear()
        below.sort()
