"""Reads a run folder into a RunRecord.

N: held-out pairs.
"""

import json
import math
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from isopref.config.load import read_values
from isopref.errors import RunError
from isopref.runs.files import (
    CONFIG_FILE,
    EVALUATION_FILE,
    METRICS_FILE,
    MODEL_FOLDER,
    REWARDS_FILE,
    SAMPLES_FILE,
    SPOT_CHECKS_FILE,
    STARTS_FILE,
)
from isopref.runs.state import State, read_state
from isopref.types import FloatArray, IntArray

Values = dict[str, Any]


@dataclass(frozen=True)
class Series:
    """A metric over the steps at which it was logged."""

    steps: list[int]
    values: list[float]


@dataclass(frozen=True)
class Rewards:
    """Implicit rewards and tokens of the chosen and the rejected answers of held-out pairs, each N, 2."""

    tokens: IntArray
    before: FloatArray
    after: FloatArray


@dataclass(frozen=True)
class RunRecord:
    """What a run has written to its folder so far."""

    folder: Path
    config: dict[str, Values]
    metrics: dict[str, Series]
    state: State | None
    starts: list[Values]
    evaluation: dict[str, Values]  # before, after; empty without held-out pairs
    rewards: Rewards | None
    samples: list[dict[str, str]]
    spot_checks: dict[str, Any]  # questions, text; empty without run.spot_checks

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def model_folder(self) -> Path | None:
        """The tuned model, or the adapter: a folder that from_pretrained loads. None if none was exported."""
        return folder if (folder := self.folder / MODEL_FOLDER).exists() else None

    @property
    def last_step(self) -> int:
        return max((series.steps[-1] for series in self.metrics.values()), default=0)

    @property
    def status(self) -> str:
        """In words: "running", "finished", "stopped at step 12", "failed"."""
        if self.state is None:
            return "unknown"
        return f"stopped at step {self.state.step}" if self.state.outcome == "stopped" else self.state.outcome

    def start(self, name: str) -> Any:
        """A value recorded at the last start; None if it was not recorded."""
        return self.starts[-1].get(name) if self.starts else None

    def last(self, metric: str) -> float | None:
        """The last value of a metric."""
        return self.metrics[metric].values[-1] if metric in self.metrics else None

    def figure(self, name: str, when: str = "after") -> dict[str, float] | None:
        """A metric of the evaluation, {"value", "low", "high"}; None if there is none."""
        found: dict[str, float] | None = self.evaluation.get(when, {}).get(name)
        return found


def read_run(folder: Path) -> RunRecord:
    """Read a run, which may still be in progress. Raises RunError if the folder contains none."""
    if not (folder / CONFIG_FILE).is_file():
        raise RunError(f"{folder}: no run found (no {CONFIG_FILE}). Pass a run folder; isopref ls lists them.")
    return RunRecord(
        folder=folder,
        config=read_values(folder / CONFIG_FILE),
        metrics=_series(_lines(folder / METRICS_FILE)),
        state=read_state(folder),
        starts=_lines(folder / STARTS_FILE),
        evaluation=_json(folder / EVALUATION_FILE),
        rewards=_rewards(folder / REWARDS_FILE),
        samples=_lines(folder / SAMPLES_FILE),
        spot_checks=_json(folder / SPOT_CHECKS_FILE),
    )


def _rewards(path: Path) -> Rewards | None:
    if not path.exists():
        return None
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return Rewards(arrays["tokens"], arrays["before"], arrays["after"])
    except (OSError, ValueError, KeyError, EOFError, BadZipFile, zlib.error) as error:
        raise _damaged(path, error) from error


def _lines(path: Path) -> list[Values]:
    """The objects in a JSONL file, without a last line that is still being written."""
    if not path.exists():
        return []
    # Of bytes: str.splitlines would also split at U+2028, which text may contain.
    lines = path.read_bytes().splitlines(keepends=True)
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            found.append(json.loads(line))
        except ValueError as error:
            if not line.endswith(b"\n"):
                break
            raise _damaged(path, error, line=number) from error
    return found


def _json(path: Path) -> dict[str, Values]:
    if not path.exists():
        return {}
    try:
        found: dict[str, Values] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise _damaged(path, error) from error
    return found


def _series(lines: list[Values]) -> dict[str, Series]:
    metrics: dict[str, Series] = {}
    for line in lines:
        for name, value in line.items():
            if name != "step":
                series = metrics.setdefault(name, Series([], []))
                series.steps.append(line["step"])
                series.values.append(math.nan if value is None else value)  # null stands for NaN or Inf
    return metrics


def _damaged(path: Path, error: Exception, line: int | None = None) -> RunError:
    place = path if line is None else f"{path}:{line}"
    return RunError(f"{place}: cannot be read ({error}). Remove the damaged part to see the rest of the run.")
