"""The results of bench.py: a file of all runs, and the measured*.json files that the docs quote.

A run is one system, setting or file of a measurement; its repeats are numbered from 1. The file is written atomically
after every run, so a benchmark that is killed loses at most the current run.
"""

import hashlib
import json
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from isopref.places import write_whole

FOLDER = Path(__file__).parent
Record = dict[str, Any]  # run, repeat, given, code, about, wall_s, and one of result, error and skipped


def code_version() -> str:
    """A digest of the code that a figure depends on: the library and the benchmarks."""
    digest = hashlib.sha256()
    for file in sorted([*(FOLDER.parent / "src").rglob("*.py"), *FOLDER.glob("*.py")]):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def commit() -> str:
    """The checkout's commit, "-dirty" if files differ from it; without git, the digest of the code."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    found = ""
    if shutil.which("git"):
        found = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, check=False).stdout.strip()
    return found or f"code {code_version()}"


class UnavailableError(Exception):
    """Why a run cannot be measured here."""


class Records:
    """The recorded runs, in a file `name` of a folder."""

    def __init__(self, folder: Path, name: str = "bench.json"):
        self.folder = folder
        self.path = folder / name
        self.all: list[Record] = json.loads(self.path.read_text())["runs"] if self.path.exists() else []
        self._code = code_version()

    def done(self, run: str, repeat: int) -> bool:
        """Whether this code has measured the run. Failed and skipped runs do not count, so they are retried."""
        found = self._find(run, repeat)
        return found is not None and "result" in found and found["code"] == self._code

    def add(self, record: Record) -> None:
        """Add a record, replacing an earlier one of the same run and repeat, and write the file."""
        old = self._find(record["run"], record["repeat"])
        self.all = [one for one in self.all if one is not old]
        self.all.append(record | {"code": self._code})
        self.folder.mkdir(parents=True, exist_ok=True)
        _write(self.path, {"runs": self.all})

    def of(self, run: str) -> list[Record]:
        """The results of a run from the code that last measured it."""
        results = [one for one in self.all if one["run"] == run and "result" in one]
        return [one for one in results if one["code"] == results[-1]["code"]]

    def medians(self, runs: Iterable[str]) -> list[Record]:
        """For each run, the repeat with the median step time (of two, the slower). `repeats_s`: all step times."""
        return [_median(some) for some in map(self.of, runs) if some]

    def write_measured(self, name: str, runs: Iterable[str]) -> Path | None:
        """Update a file that the docs quote with the medians of runs. Entries that were not measured stay."""
        new = self.medians(runs)
        if not new:
            return None
        path = self.folder / name
        before = next((file for file in (path, FOLDER / name) if file.exists()), None)
        _write(path, merged(json.loads(before.read_text()) if before else {"results": []}, new))
        return path

    def _find(self, run: str, repeat: int) -> Record | None:
        return next((one for one in self.all if (one["run"], one["repeat"]) == (run, repeat)), None)


def merged(before: dict[str, Any], new: Sequence[Record]) -> dict[str, Any]:
    """The content of a measured file, with new entries replacing those they repeat.

    `about` describes the newest entry. An entry measured on another day, machine or commit has its own `about`.
    """
    about = new[-1]["about"]
    kept = []
    for entry in before["results"]:
        if not any(all(entry.get(key) == value for key, value in one["given"].items()) for one in new):
            own = entry.get("about", before.get("about"))
            kept.append(entry if own in (None, about) else {**entry, "about": own})
    added = []
    for one in new:
        own = {} if one["about"] == about else {"about": one["about"]}
        added.append({**one["given"], **one["result"], **own})
    return {**before, "about": about, "results": kept + added}


def _median(some: list[Record]) -> Record:
    by_speed = sorted(some, key=lambda one: float(one["result"].get("step_s") or 0))
    found = by_speed[len(by_speed) // 2]
    if len(some) == 1:
        return found
    times = [one["result"].get("step_s") for one in some]
    return {**found, "result": {**found["result"], "repeats_s": times}}


def ratios(entries: Iterable[Record]) -> str:
    """One line per run: its step time, its memory, and its step time relative to that of the first run."""
    lines, first = [], None
    for one in entries:
        result = one["result"]
        seconds = result.get("step_s")
        if not seconds:
            told = ", ".join(f"{key} {value}" for key, value in result.items() if not isinstance(value, dict | list))
            lines.append(f"  {one['run']:46} {told[:110]}")
            continue
        first = first or seconds
        memory = f"{result['peak_memory_gib']:6.1f} GiB" if "peak_memory_gib" in result else ""
        count = len(result.get("repeats_s", [seconds]))
        lines.append(
            f"  {one['run']:46} {seconds:9.4f} s  {memory}  {seconds / first:6.2f} times the first, of {count}"
        )
    return "\n".join(lines)


def _write(path: Path, content: Any) -> None:
    write_whole(path, (json.dumps(_rounded(content), indent=1) + "\n").encode())


def _rounded(value: Any) -> Any:
    """The value with every figure rounded to five significant digits."""
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(one) for one in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value
