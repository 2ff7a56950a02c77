"""Sources made of files: one file, the files in a folder, or those that a pattern matches, in the order of their names.

Several files form one source and must have one format. Each record's origin names its own file.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from glob import glob
from pathlib import Path

from isopref.data.formats import DIGEST_BYTES, SUFFIXES, DataFile, Places, digest_files, open_file, suffix_of
from isopref.data.source import Source
from isopref.errors import DataError

LISTED = 8  # files that an error message lists at most
PATTERN = re.compile(r"[*?\[]")
SPLIT = re.compile(r"(train|test|validation|valid|val|dev|eval)(?![a-z])", re.IGNORECASE)


def file_source(name: str, path: Path, columns: Mapping[str, str]) -> Source:
    """One file. Raises DataError."""
    file = open_file(name, path)
    return Source(name, file.format, file.read, lambda: digest_files([path]), columns, file.count)


def folder_source(name: str, folder: Path, columns: Mapping[str, str]) -> Source:
    """The data files directly in a folder. Raises DataError if there are none, or they do not belong together."""

    def listed() -> list[str]:
        visible = (path for path in folder.iterdir() if not path.name.startswith("."))
        return sorted(path.name for path in visible if suffix_of(path) in SUFFIXES and path.is_file())

    base = name.rstrip("/") + "/"
    try:
        files = listed()
    except OSError as error:
        raise DataError(f"{name}: cannot be listed ({error.strerror}). Check the folder's permissions.") from error
    if not files:
        raise DataError(f"{name}: the folder has no data files in it. {inside(folder)}")
    if len(splits := sorted({found[1].lower() for file in files if (found := SPLIT.match(file))})) > 1:
        raise DataError(
            f"{name}: the folder has files of several splits ({', '.join(splits)}). Select one with a pattern, as in "
            f"{base}{splits[-1]}*."
        )
    return _files_source(name, base, folder, listed, columns)


def pattern_source(name: str, columns: Mapping[str, str]) -> Source:
    """The files that a pattern such as data/*.jsonl matches; ** is any number of folders. Raises DataError."""
    found = PATTERN.search(name)
    assert found is not None
    base = name[: name.rfind("/", 0, found.start()) + 1]
    folder, pattern = Path(base).expanduser(), name.removeprefix(base)

    def listed() -> list[str]:
        return sorted({file for file in glob(pattern, root_dir=folder, recursive=True) if (folder / file).is_file()})

    if not listed():
        raise DataError(f"{name}: no file matches this pattern. {inside(folder)}")
    return _files_source(name, base, folder, listed, columns)


def inside(folder: Path) -> str:
    """What is in a folder, for an error message; if it does not exist, what is in the nearest folder above it."""
    if not folder.is_dir():
        above = next(parent for parent in folder.absolute().parents if parent.is_dir())
        return f"There is no folder {folder}. {inside(above)}"
    found = sorted(path.name + "/" * path.is_dir() for path in folder.iterdir())
    below = sorted({path.parent for path in folder.glob("*/*") if suffix_of(path) in SUFFIXES})
    contents = f"contains {_names(found)}" if found else "is empty"
    hint = f" There are data files in {_names(below)}." if below else ""
    return f"{folder.absolute()} {contents}.{hint}"


def _files_source(
    name: str, base: str, folder: Path, listed: Callable[[], list[str]], columns: Mapping[str, str]
) -> Source:
    files = {file: open_file(base + file, folder / file) for file in listed()}
    _refuse_mixed(name, base, files)

    def read() -> Places:
        for file, opened in files.items():
            printable = file.encode(errors="backslashreplace").decode()  # a name need not be UTF-8
            for fields, place in opened.read():
                yield fields, printable + place

    def digest() -> str:
        now = listed()  # again, because files may have been added or removed since
        # Names count as content, because they are part of the records' origins.
        content = json.dumps([now, digest_files(folder / file for file in now)])
        return hashlib.blake2b(content.encode(), digest_size=DIGEST_BYTES).hexdigest()

    def count() -> int | None:
        counts = [opened.count() for opened in files.values()]
        return None if None in counts else sum(number for number in counts if number is not None)

    formats = sorted({opened.format for opened in files.values()})
    format_ = " and ".join(formats) if len(files) == 1 else f"{len(files)} files, {' and '.join(formats)}"
    return Source(name, format_, read, digest, columns, count, base)


def _refuse_mixed(name: str, base: str, files: Mapping[str, DataFile]) -> None:
    """Raise DataError if the files have several formats: some of them may not be meant as data."""
    by_format: dict[str, list[str]] = {}
    for file, opened in files.items():
        by_format.setdefault(SUFFIXES.get(suffix_of(opened.path), opened.kind), []).append(file)
    if len(by_format) == 1:
        return
    found = "; ".join(f"{kind}: {_names(some)}" for kind, some in by_format.items())
    most = max(by_format.values(), key=len)
    raise DataError(
        f"{name}: files of several formats ({found}), but a source must have one. Select one with a pattern, as in "
        f"{base}*{Path(most[0]).suffix}, or list each format as a separate source."
    )


def _names(found: Iterable[str | Path]) -> str:
    every = [str(one) for one in found]
    more = f" and {len(every) - LISTED} more" if len(every) > LISTED else ""
    return ", ".join(every[:LISTED]) + more
