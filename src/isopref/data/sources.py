"""Reading records from what people have: files, saved data sets, the hub.

Owns origins ("file:line") and the digest of a source. How a file is read is in formats, what a field means in shapes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from glob import glob
from pathlib import Path
from typing import Any, NamedTuple

from isopref.data.formats import SUFFIXES, Places, digest_files, open_file, without_filling
from isopref.errors import DataError
from isopref.optional import IN_PACKAGE, package_file, require

DATA_SUFFIXES = {*SUFFIXES, ".gz", ".txt"}
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
LISTED = 5  # files that an error names


class Record(NamedTuple):
    """One record, with the place it came from: "data.jsonl:12", "data.json:[3]", "data.parquet:row 7"."""

    fields: dict[str, Any]
    origin: str


@dataclass(frozen=True)
class SourceSpec:
    """What a user says about one source. `weight` and `count` are its share in a mix (see mixing)."""

    path: str
    columns: Mapping[str, str] | None = None
    weight: float | None = None
    count: int | None = None


@dataclass(frozen=True)
class Source:
    """Records, to be read as often as needed. Iterating raises DataError at the first broken record."""

    name: str
    format: str
    read: Callable[[], Places] = field(repr=False)
    digest: Callable[[], str] = field(repr=False)  # of the content: file bytes, or a data set's fingerprint
    columns: Mapping[str, str] = field(default_factory=dict)  # our name -> the name in the source
    count: Callable[[], int | None] = field(default=lambda: None, repr=False)  # records, where that is quickly known

    def __iter__(self) -> Iterator[Record]:
        place = None
        unseen = set(self.columns.values())
        for fields, place in self.read():
            unseen -= fields.keys()
            yield Record(self._renamed(fields), self.name + place)
        if place is None:
            raise DataError(f"{self.name}: no records in this {self.format} source. Name another.")
        if unseen:
            raise DataError(
                f"{self.name}: no record has the columns {sorted(unseen)}. Mend data.columns, or the columns of the "
                "source itself."
            )

    def _renamed(self, fields: dict[str, Any]) -> dict[str, Any]:
        if not self.columns:
            return fields
        taken = {*self.columns, *self.columns.values()}
        rest = {key: value for key, value in fields.items() if key not in taken}
        return rest | {ours: fields[theirs] for ours, theirs in self.columns.items() if theirs in fields}


def read_source(spec: str, *, columns: Mapping[str, str] | None = None) -> Source:
    """Open a source; records are read when it is iterated.

    `spec` is a file, a folder written by `save_to_disk` ("folder" or "folder:split"), "package:PACKAGE/FILE",
    or, where no such path exists, a hub name ("owner/name" or "owner/name:split"). Raises DataError.
    """
    columns = columns or {}
    if spec.startswith(IN_PACKAGE):
        return _file_source(spec, package_file(spec), columns)
    path = Path(spec).expanduser()
    base, _, split = spec.rpartition(":")
    if path.is_dir():
        return _saved_source(spec, path, None, columns)
    if path.exists():
        return _file_source(spec, path, columns)
    if base and Path(base).expanduser().is_dir():
        return _saved_source(spec, Path(base).expanduser(), split, columns)
    return _hub_source(spec, base or spec, split if base else "train", columns)


def _file_source(name: str, path: Path, columns: Mapping[str, str]) -> Source:
    file = open_file(name, path)
    return Source(name, file.format, file.read, lambda: digest_files([path]), columns, file.count)


def _saved_source(spec: str, folder: Path, split: str | None, columns: Mapping[str, str]) -> Source:
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(path.name for path in folder.iterdir() if (path / "state.json").is_file())
        wanted = split or "train"
        if wanted not in splits:
            raise DataError(f"{spec}: no split '{wanted}'. Name one as '{folder}:SPLIT'; there are: {splits}.")
        folder = folder / wanted
    elif split or not (folder / "state.json").is_file():
        inside = (*folder.glob("*"), *folder.glob("*/*"))  # a clone of a hub data set has them in data/
        found = sorted(path for path in inside if path.suffix in DATA_SUFFIXES)
        raise DataError(
            f"{spec}: a folder, but not {'splits' if split else 'a data set'} written by save_to_disk. "
            + (_as_list(found) if found else "It holds no data file.")
        )
    datasets = require("datasets", extra="datasets", why=f"the source '{spec}' is a folder written by save_to_disk")
    try:
        dataset = datasets.load_from_disk(str(folder))
    except Exception as error:  # the library raises many kinds for a damaged folder
        raise DataError(f"{spec}: cannot be read ({_first_line(error)}). Write it again.") from error
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return _dataset_source(spec, dataset, "saved data set", lambda: digest_files(files), columns)


def _hint(spec: str) -> str:
    """What to say, where there is no such path, of a text that was meant as something else."""
    if re.fullmatch(r"[\d.]+%?", spec):
        return " A share of the prompts to hold out is a number without quotes, as in data.eval: 0.05."
    if "://" in spec:
        return " Nothing is fetched from an address: download the file, or name a hub data set as owner/name."
    if not set("*?[") & set(spec):
        return ""
    found = sorted(Path(path) for path in glob(str(Path(spec).expanduser()), recursive=True))
    return " Patterns are not looked up." + (" " + _as_list(found) if found else " This one fits no file.")


def _as_list(paths: list[Path]) -> str:
    """How several files are named."""
    named = ", ".join(str(path) for path in paths[:LISTED]) + ", ..." * (len(paths) > LISTED)
    return f"Name each file, as in data.train=[{named}]."


def _hub_source(spec: str, name: str, split: str, columns: Mapping[str, str]) -> Source:
    tried, hint = Path(spec).expanduser().absolute(), _hint(spec)
    if hint or not HUB_NAME.fullmatch(name) or Path(name).suffix in DATA_SUFFIXES:
        way_out = f"Check the path; a relative one starts where the command runs.{hint}"
        raise DataError(f"{spec}: no such file or folder ({tried}). {way_out}")
    datasets = require(
        "datasets", extra="datasets", why=f"'{spec}' is no local path ({tried}), so it is read as a hub name"
    )
    try:
        dataset = datasets.load_dataset(name, split=split)
    except Exception as error:  # network, authentication, unknown name or split: each a class of its own
        raise DataError(
            f"{spec}: there is no local path {tried}, and the Hugging Face hub gave no data set '{name}' "
            f"with split '{split}' ({_first_line(error)}). Mend the path, or the name as 'owner/name:split'."
        ) from error
    # The fingerprint is the library's own content key: it follows the files and every step that changed them.
    return _dataset_source(spec, dataset, "hub", lambda: str(dataset._fingerprint), columns)


def _dataset_source(
    spec: str, dataset: Any, kind: str, digest: Callable[[], str], columns: Mapping[str, str]
) -> Source:
    def read() -> Places:
        as_written = without_filling(dataset.features.arrow_schema)
        return ((as_written(row), f":row {number}") for number, row in enumerate(dataset))

    return Source(spec, kind, read, digest, columns, count=lambda: len(dataset))


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
