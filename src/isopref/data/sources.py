"""Reading records from what people have: JSONL, JSON, CSV, Parquet and Arrow files, saved data sets, the hub.

Owns formats, places ("file:line") and the digest of a source. Does not know what a field means: see shapes.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from glob import glob
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from isopref.errors import DataError
from isopref.optional import IN_PACKAGE, package_file, require

FORMATS = "JSONL, a JSON array of objects, CSV or TSV (each also gzipped), Parquet, Arrow"
TEXT_SUFFIXES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".tsv": "tsv"}
DATA_SUFFIXES = {*TEXT_SUFFIXES, ".json", ".parquet", ".arrow", ".gz", ".txt"}
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
DELIMITERS = {";": "semicolons", "\t": "tabs", "|": "bars", ",": "commas"}
MAX_CSV_FIELD = 2**31 - 1  # the module's own limit, 131,072 characters, is less than a long conversation
BATCH_ROWS = 256
LISTED = 5  # files that an error names
DIGEST_BYTES = 16


class Record(NamedTuple):
    """One record, with the place it came from: "data.jsonl:12", "data.json:[3]", "data.parquet:row 7"."""

    fields: dict[str, Any]
    origin: str


Places = Iterator[tuple[dict[str, Any], str]]  # fields, and the place inside the source (":12")


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


# --- files -----------------------------------------------------------------------------------------


def _file_source(name: str, path: Path, columns: Mapping[str, str]) -> Source:
    try:
        kind, zipped = _sniff(name, path)
        num_rows = pq.ParquetFile(path).metadata.num_rows if kind == "parquet" else None
    except (OSError, pa.ArrowException, EOFError, zlib.error) as error:
        raise DataError(f"{name}: cannot be read ({error}). Is the file whole?") from error
    return Source(
        name=name,
        format=kind + (".gz" if zipped else ""),
        read=lambda: READERS[kind](name, path, zipped),
        digest=lambda: _digest([path]),
        columns=columns,
        count=partial(_count_lines, path) if kind == "jsonl" and not zipped else lambda: num_rows,
    )


def _sniff(name: str, path: Path) -> tuple[str, bool]:
    """The format of a file and whether it is gzipped: by content where that is certain, else by suffix."""
    if not path.is_file():
        raise DataError(f"{name}: a pipe or a device gives its data once, and it is read again. Write it to a file.")
    with path.open("rb") as file:
        head = file.read(4096)
    zipped = head.startswith(b"\x1f\x8b")
    if zipped:
        with gzip.open(path) as unzipped:
            head = unzipped.read(4096)
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if not start:
        raise DataError(f"{name}: the file is empty. Put pairs in, or name another file.")
    suffix = (path.with_suffix("") if path.suffix == ".gz" else path).suffix.lower()
    if head.startswith((b"PAR1", b"ARROW1", b"\xff\xff\xff\xff")):
        if zipped:
            raise DataError(f"{name}: a gzipped {suffix or 'binary'} file cannot be mapped. Unpack it: gunzip.")
        return ("parquet" if head.startswith(b"PAR1") else "arrow"), False
    if suffix in TEXT_SUFFIXES:
        return TEXT_SUFFIXES[suffix], zipped
    if start[:1] in (b"[", b"{"):
        return ("json" if start[:1] == b"[" else "jsonl"), zipped
    raise DataError(f"{name}: the format is not known. It can be {FORMATS}.")


def _lines(name: str, path: Path, zipped: bool) -> Iterator[tuple[int, str]]:
    """Numbered lines, ends kept. Bytes are split first: str.splitlines would also split at U+2028."""
    number = 0
    try:
        with gzip.open(path) if zipped else path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        written = "UTF-16" if b"\0" in error.object else "LATIN1"
        raise DataError(
            f"{name}:{number}: not UTF-8 ({error.reason}, byte {error.object[error.start]:#04x} at position "
            f"{error.start} of the line). Convert it: iconv -f {written} -t UTF-8, or -f whatever it was written in."
        ) from error
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{name}:{number + 1}: read failed ({error}). The file may be truncated.") from error


def _load_json(text: str, name: str, line: int, way_out: str) -> Any:
    """The value of a JSON text that begins on this line of the source."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        where, what = f"{name}:{line + error.lineno - 1}", error.msg.removesuffix(" at")
        raise DataError(f"{where}: not valid JSON: {what} at column {error.colno}. {way_out}") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; thousands of brackets
        raise DataError(f"{name}:{line}: JSON that cannot be read ({error}). {way_out}") from error


def _object(value: Any, where: str, way_out: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"{where}: a record must be a JSON object, this is a {type(value).__name__}. {way_out}")
    return value


def _read_jsonl(name: str, path: Path, zipped: bool) -> Places:
    way_out = "Mend the line, or remove it: each is one whole object. A file that is one array needs the suffix .json."
    for number, line in _lines(name, path, zipped):
        if line.strip():
            value = _load_json(line.rstrip(), name, number, way_out)
            yield _object(value, f"{name}:{number}", way_out), f":{number}"


def _read_json(name: str, path: Path, zipped: bool) -> Places:
    text = "".join(line for _, line in _lines(name, path, zipped))
    way_out = "A .json file is one array of objects, or one object on each line."
    for index, value in enumerate(_load_json(text, name, 1, way_out)):
        place = f":[{index}]"
        yield _object(value, name + place, way_out), place


def _read_csv(name: str, path: Path, zipped: bool, delimiter: str = ",") -> Places:
    csv.field_size_limit(MAX_CSV_FIELD)
    rows = csv.reader((line for _, line in _lines(name, path, zipped)), delimiter=delimiter, strict=True)
    header: list[str] = []
    line = 1
    try:
        for row in rows:
            if row and not header:
                header = row
                if len(set(header)) < len(header):
                    raise DataError(f"{name}:{line}: a column name comes twice in {header}. Rename one of them.")
                _check_delimiter(header, f"{name}:{line}")
            elif row:
                if len(row) != len(header):
                    raise DataError(
                        f"{name}:{line}: {len(row)} cells, but the header names {len(header)} columns. "
                        "Quote cells that hold a delimiter or a line break."
                    )
                # A cell has no type: empty means absent.
                yield {key: cell or None for key, cell in zip(header, row, strict=True)}, f":{line}"
            line = rows.line_num + 1
    except csv.Error as error:
        raise DataError(f"{name}:{line}: not valid CSV: {error}. Mend the quotes, or remove the record.") from error


def _check_delimiter(header: list[str], where: str) -> None:
    """One column makes no pair; most often it is several, between other delimiters."""
    others = [sign for sign in DELIMITERS if len(header) == 1 and sign in header[0]]
    if others:
        raise DataError(
            f"{where}: the header is one column, {header[0]!r}, which {DELIMITERS[others[0]]} seem to divide. A .csv "
            "file has commas, a .tsv file has tabs: rename it, or write it so (pandas: to_csv(path, index=False))."
        )


def _read_parquet(name: str, path: Path, zipped: bool) -> Places:
    return _rows(name, lambda: pq.ParquetFile(path).iter_batches(batch_size=BATCH_ROWS))


def _read_arrow(name: str, path: Path, zipped: bool) -> Places:
    def batches() -> Iterator[Any]:
        with pa.memory_map(str(path)) as file:
            if file.read(6) == b"ARROW1":
                reader = pa.ipc.open_file(file)
                yield from (reader.get_batch(index) for index in range(reader.num_record_batches))
            else:
                file.seek(0)
                yield from pa.ipc.open_stream(file)

    return _rows(name, batches)


def _rows(name: str, batches: Callable[[], Iterator[Any]]) -> Places:
    number = 0
    try:
        for batch in batches():
            as_written = _without_filling(batch.schema)
            for start in range(0, batch.num_rows, BATCH_ROWS):
                for row in batch.slice(start, BATCH_ROWS).to_pylist():
                    yield as_written(row), f":row {number}"
                    number += 1
    except (OSError, pa.ArrowException, ValueError) as error:  # ValueError: bytes that are not UTF-8
        raise DataError(f"{name}:row {number}: cannot be read ({error}). Is the file whole?") from error


def _without_filling(schema: pa.Schema) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Takes from a row the nulls that nobody wrote: each struct of a column has all keys that any of its structs has.

    A null in a list stays, as does one in a column of JSON: no other row put it there.
    """
    unfill = {field.name: found for field in schema if (found := _unfill(field.type))}
    return lambda row: row | {name: unfill[name](row[name]) for name in unfill}


def _unfill(kind: pa.DataType) -> Callable[[Any], Any] | None:
    """The same for values of one type; None: they hold no struct. An object that a data set decoded is left alone."""
    if pa.types.is_struct(kind):
        inner = {field.name: found for field in kind if (found := _unfill(field.type))}

        def of_struct(value: Any) -> Any:
            if not isinstance(value, dict):
                return value
            written = {key: held for key, held in value.items() if held is not None}
            return written | {key: inner[key](written[key]) for key in inner if key in written}

        return of_struct
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        of_item = _unfill(kind.value_type)
        return of_item and (lambda value: [of_item(item) for item in value] if isinstance(value, list) else value)
    return None


READERS: dict[str, Callable[[str, Path, bool], Places]] = {
    "jsonl": _read_jsonl,
    "json": _read_json,
    "csv": _read_csv,
    "tsv": lambda name, path, zipped: _read_csv(name, path, zipped, delimiter="\t"),
    "parquet": _read_parquet,
    "arrow": _read_arrow,
}


def _count_lines(path: Path) -> int:
    """Lines of a file, empty ones too: a progress bar needs no more."""
    lines, block = 0, b"\n"
    with path.open("rb") as file:
        while more := file.read(1 << 20):
            lines, block = lines + more.count(b"\n"), more
    return lines + (not block.endswith(b"\n"))


def _digest(paths: list[Path]) -> str:
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for path in paths:
        digest.update(path.stat().st_size.to_bytes(8, "little"))
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


# --- packages, saved data sets, the hub ------------------------------------------------------------


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
    return _dataset_source(spec, dataset, "saved data set", lambda: _digest(files), columns)


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
        as_written = _without_filling(dataset.features.arrow_schema)
        return ((as_written(row), f":row {number}") for number, row in enumerate(dataset))

    return Source(spec, kind, read, digest, columns, count=lambda: len(dataset))


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
