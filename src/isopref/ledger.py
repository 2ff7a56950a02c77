"""Results by key, appended to a file as they arrive, so no finished work is lost, however a command ends.

Each line is a JSON object with a key and a value. A line left half-written by a killed process is skipped. Several
processes may append to the same file.
"""

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from isopref.errors import ConfigError, RunError
from isopref.locks import FileLock, held
from isopref.places import write_whole


class Ledger:
    """The results of an unfinished command, next to its output file."""

    def __init__(self, out: Path):
        self.out = out
        self.path = out.with_name(f".{out.name}.partial")

    def read(self, wanted: Collection[str]) -> dict[str, Any]:
        """The results so far. Raises RunError if the file has results that are not wanted now."""
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
                f"{self.path} holds results of an interrupted command with another model, other data or other "
                "settings. Run that command again to finish it, choose another --out, or remove the file."
            )
        return found

    def append(self, results: Mapping[str, Any]) -> None:
        """Append results. They are in the file when this returns."""
        lines = "".join(json.dumps({"key": key, "value": value}) + "\n" for key, value in results.items())
        with self._named_faults():
            self._append(lines)

    def _append(self, lines: str) -> None:
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
        """Write the complete result atomically and remove the ledger."""
        lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        # A reply may end in half a surrogate pair, which UTF-8 cannot encode.
        readable = re.sub(r"[\ud800-\udfff]", "\ufffd", lines)
        with self._named_faults():
            write_whole(self.out, readable.encode())
            self.path.unlink(missing_ok=True)

    def alone(self) -> AbstractContextManager[None]:
        """Keep other commands from writing the same file. Raises RunError if one does."""

        def in_use(holder: str) -> RunError:
            return RunError(
                f"--out: {self.out} is being written by another command ({holder}). Wait for it to finish, stop it, or "
                "choose another name."
            )

        return held(self.out.with_name(f".{self.out.name}.lock"), in_use)

    @contextmanager
    def _named_faults(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:  # a full disk, or a folder that is gone
            raise RunError(
                f"{self.out}: cannot be written ({error}). Earlier results are safe: free disk space or make the "
                "folder writable, then run the command again."
            ) from error


def check_out(out: Path, *, may_exist: bool = False) -> None:
    """Raise ConfigError early if a result cannot be written."""
    if out.is_dir():
        raise ConfigError(f"--out: {out} is a folder. Choose a file name, as in {out / 'out.jsonl'}.")
    if out.exists() and not may_exist:
        raise ConfigError(f"--out: {out} exists already and is not overwritten. Choose another name, or remove it.")
    if not os.access(out.absolute().parent, os.W_OK):
        raise ConfigError(
            f"--out: the folder {out.absolute().parent} does not exist or is not writable. Create it, or choose "
            "another --out."
        )
