"""Reads one file: JSONL, JSON, CSV and TSV (each also gzipped), Parquet, Arrow. The content determines the format.

Owns formats and places inside a file (":12"). file_sources.py combines several files.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from isopref.errors import DataError

FORMATS = "JSONL, a JSON array of objects, CSV or TSV (each also gzipped), Parquet, Arrow"
TEXT_SUFFIXES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".tsv": "tsv"}
SUFFIXES = {**TEXT_SUFFIXES, ".json": "json", ".parquet": "parquet", ".arrow": "arrow"}
DELIMITERS = {";": "semicolons", "\t": "tabs", "|": "bars", ",": "commas"}
MAX_CSV_FIELD = 2**31 - 1  # csv's default limit of 131,072 characters is too small for a long conversation
BATCH_ROWS = 256
DAMAGED = "The file may be truncated or damaged: download or write it again."
DIGEST_BYTES = 16

Places = Iterator[tuple[dict[str, Any], str]]  # fields, and the place inside the file (":12")


@dataclass(frozen=True)
class DataFile:
    """A file whose format is known. `name` is what messages call it."""

    name: str
    path: Path
    kind: str  # of READERS
    zipped: bool

    @property
    def format(self) -> str:
        return self.kind + (".gz" if self.zipped else "")

    def read(self) -> Places:
        return READERS[self.kind](self.name, self.path, self.zipped)

    def count(self) -> int | None:
        """The number of records, if it is cheap to find."""
        if self.kind == "parquet":
            return int(pq.ParquetFile(self.path).metadata.num_rows)
        return _count_lines(self.path) if self.kind == "jsonl" and not self.zipped else None


def open_file(name: str, path: Path) -> DataFile:
    """Determine the format of a file. Raises DataError if isopref does not read it, or the file is damaged."""
    try:
        file = DataFile(name, path, *_sniff(name, path))
        if file.kind == "parquet":
            pq.ParquetFile(path)
    except PermissionError as error:
        raise DataError(f"{name}: cannot be read ({error.strerror}). Check its permissions.") from error
    except (OSError, pa.ArrowException, EOFError, zlib.error) as error:
        raise DataError(f"{name}: cannot be read ({error}). {DAMAGED}") from error
    return file


def suffix_of(path: Path) -> str:
    """The suffix that tells a file's format, in lower case: ".jsonl" for a.jsonl.gz."""
    return (path.with_suffix("") if path.suffix == ".gz" else path).suffix.lower()


def _sniff(name: str, path: Path) -> tuple[str, bool]:
    """The format of a file and whether it is gzipped: by content if that is certain, otherwise by suffix."""
    if not path.is_file():
        raise DataError(f"{name}: a pipe or a device cannot be read twice, as is needed. Write the data to a file.")
    with path.open("rb") as file:
        head = file.read(4096)
    zipped = head.startswith(b"\x1f\x8b")
    if zipped:
        with gzip.open(path) as unzipped:
            head = unzipped.read(4096)
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if not start:
        raise DataError(f"{name}: the file is empty. Add records, or choose another file.")
    suffix = suffix_of(path)
    if head.startswith((b"PAR1", b"ARROW1", b"\xff\xff\xff\xff")):
        if zipped:
            raise DataError(f"{name}: a gzipped {suffix or 'binary'} file cannot be mapped. Unpack it with gunzip.")
        return ("parquet" if head.startswith(b"PAR1") else "arrow"), False
    if suffix in TEXT_SUFFIXES:
        return TEXT_SUFFIXES[suffix], zipped
    if start[:1] in (b"[", b"{"):
        return ("json" if start[:1] == b"[" else "jsonl"), zipped
    raise DataError(f"{name}: unknown format. Supported: {FORMATS}.")


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
    """The value of a JSON text that begins on line `line` of the file."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        where, what = f"{name}:{line + error.lineno - 1}", error.msg.removesuffix(" at")
        raise DataError(f"{where}: not valid JSON: {what} at column {error.colno}. {way_out}") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; thousands of brackets
        raise DataError(f"{name}:{line}: JSON that cannot be read ({error}). {way_out}") from error


def _object(value: Any, where: str, way_out: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"{where}: a record must be a JSON object, but this is a {type(value).__name__}. {way_out}")
    return value


def _read_jsonl(name: str, path: Path, zipped: bool) -> Places:
    way_out = "Fix the line, or remove it: each line must be one object. A file with one array needs the suffix .json."
    over_lines = "An object over several lines is not read: put each on one line, or all into one array, [...]."
    for number, line in _lines(name, path, zipped):
        if line.strip():
            value = _load_json(line.rstrip(), name, number, over_lines if line.strip() == "{" else way_out)
            yield _object(value, f"{name}:{number}", way_out), f":{number}"


def _read_json(name: str, path: Path, zipped: bool) -> Places:
    text = "".join(line for _, line in _lines(name, path, zipped))
    way_out = "A .json file must hold one array of objects, or one object per line."
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
                    raise DataError(f"{name}:{line}: duplicate column name in {header}. Rename one of the columns.")
                _check_delimiter(header, f"{name}:{line}")
            elif row:
                if len(row) != len(header):
                    raise DataError(
                        f"{name}:{line}: {len(row)} cells, but the header names {len(header)} columns. "
                        "Quote cells that hold a delimiter or a line break."
                    )
                # CSV cannot tell an empty text from an absent one: treat it as absent.
                yield {key: cell or None for key, cell in zip(header, row, strict=True)}, f":{line}"
            line = rows.line_num + 1
    except csv.Error as error:
        raise DataError(f"{name}:{line}: not valid CSV: {error}. Fix the quotes, or remove the record.") from error


def _check_delimiter(header: list[str], where: str) -> None:
    """Raise DataError for a header of one column that another delimiter would split: one column cannot hold a pair."""
    others = [sign for sign in DELIMITERS if len(header) == 1 and sign in header[0]]
    if others:
        raise DataError(
            f"{where}: the header has one column, {header[0]!r}, which seems to be separated by "
            f"{DELIMITERS[others[0]]}. A .csv file is separated by commas, a .tsv file by tabs. Rename the file, "
            "or write it again (pandas: to_csv(path, index=False))."
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
            if len(set(batch.schema.names)) < len(batch.schema.names):
                raise DataError(f"{name}: duplicate column name in {batch.schema.names}. Rename one of the columns.")
            as_written = without_filling(batch.schema)
            for start in range(0, batch.num_rows, BATCH_ROWS):
                for row in batch.slice(start, BATCH_ROWS).to_pylist():
                    yield as_written(row), f":row {number}"
                    number += 1
    except (OSError, pa.ArrowException, ValueError, OverflowError) as error:  # not UTF-8; a date after the year 9999
        raise DataError(f"{name}:row {number}: cannot be read ({error}). {DAMAGED}") from error


def without_filling(schema: pa.Schema) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A function that removes filled-in nulls from a row: Arrow gives each struct all keys that any row's struct has.

    A null in a list or in a column of JSON stays, because it was in the data.
    """
    unfill = {field.name: found for field in schema if (found := _unfill(field.type))}
    return lambda row: row | {name: unfill[name](row[name]) for name in unfill}


def _unfill(kind: pa.DataType) -> Callable[[Any], Any] | None:
    """The same for values of one type; None if they hold no struct. Objects decoded by `datasets` are left alone."""
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
    """The number of lines of a file, including empty ones: exact enough for a progress bar."""
    lines, block = 0, b"\n"
    with path.open("rb") as file:
        while more := file.read(1 << 20):
            lines, block = lines + more.count(b"\n"), more
    return lines + (not block.endswith(b"\n"))


def digest_files(paths: Iterable[Path]) -> str:
    """Digest of the files' bytes, in this order. Names are not content."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for path in paths:
        digest.update(path.stat().st_size.to_bytes(8, "little"))
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()
