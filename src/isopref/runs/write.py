"""Writes the files that reports and other commands use; read.py reads them.

N: held-out pairs.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from isopref.errors import ConfigError
from isopref.runs.files import REWARDS_FILE, SAMPLES_FILE, STARTS_FILE
from isopref.types import FloatArray, IntArray


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error}). Choose another location.") from error


def make_folder(setting: str, folder: Path) -> None:
    """Create a folder unless it exists. Raises ConfigError naming the setting that names it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{setting}: cannot create the folder {folder} ({error}). Choose another one.") from error


def write_rewards(folder: Path, tokens_N2: IntArray, before_N2: FloatArray, after_N2: FloatArray) -> None:
    """Keep the rewards of held-out pairs for the report."""
    np.savez_compressed(
        folder / REWARDS_FILE,
        tokens=tokens_N2.astype(np.int32),
        before=before_N2.astype(np.float32),
        after=after_N2.astype(np.float32),
    )


def write_samples(folder: Path, samples: Iterable[Mapping[str, str]]) -> None:
    """Write answers before and after training, one line per prompt."""
    with (folder / SAMPLES_FILE).open("w", encoding="utf-8") as file:
        for sample in samples:
            file.write(_line(sample))


def add_start(folder: Path, start: Mapping[str, Any]) -> None:
    """Append a record of a start."""
    with (folder / STARTS_FILE).open("a", encoding="utf-8") as file:
        file.write(_line(start))


def _line(content: Mapping[str, Any]) -> str:
    return json.dumps(content, ensure_ascii=False) + "\n"
