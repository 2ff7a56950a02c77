"""Results by key, appended to a file as they come: what a command has paid for survives however it ends.

A line is a JSON object with a key and a value. A line that a killed process left half-written is skipped. Several
processes may append to one file.
"""

import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from isopref.errors import ConfigError, RunError
from isopref.locks import FileLock
from isopref.places import write_whole


class Ledger:
    """The results of an unfinished command, beside the file that it will write."""

    def __init__(self, out: Path):
        self.out = out
        self.path = out.with_name(f".{out.name}.partial")

    def read(self, wanted: Collection[str]) -> dict[str, Any]:
        """The results so far. Raises RunError if there are others than those wanted now."""
        found = {}
        if self.path.exists():
            for line in self.path.read_bytes().split(b"\n"):
                try:
                    content = json.loads(line)
                    found[str(content["key"])] = content["value"]
                except (ValueError, KeyError, TypeError):  # torn, or empty
                    continue
        if found.keys() - wanted:
            raise RunError(
                f"{self.path} was left by a command that was stopped, with another model, other data or other "
                "settings. Run that command again to finish it, choose another --out, or remove the file."
            )
        return found

    def append(self, results: Mapping[str, Any]) -> None:
        """Add results. They are in the file when this returns."""
        lines = "".join(json.dumps({"key": key, "value": value}) + "\n" for key, value in results.items())
        file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            FileLock(file).wait()
            size = os.fstat(file).st_size
            torn = size > 0 and os.pread(file, 1, size - 1) != b"\n"
            content = (b"\n" if torn else b"") + lines.encode()
            while content:
                content = content[os.write(file, content) :]
        finally:
            os.close(file)  # which releases the lock

    def finish(self, records: Collection[Mapping[str, Any]]) -> None:
        """Write the complete result in one go and drop the ledger."""
        lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        write_whole(self.out, lines.encode("utf-8", "surrogatepass"))
        self.path.unlink(missing_ok=True)


def check_out(out: Path, *, may_exist: bool = False) -> None:
    """Raise ConfigError early where a result cannot be written."""
    if out.exists() and not may_exist:
        raise ConfigError(f"--out: {out} exists already, and is not overwritten. Choose another name, or remove it.")
    if not os.access(out.absolute().parent, os.W_OK):
        raise ConfigError(f"--out: the folder {out.absolute().parent} is not there or cannot be written to.")
