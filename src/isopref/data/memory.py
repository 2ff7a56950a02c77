"""Records that a script holds in memory: a list of dicts, or a `datasets.Dataset`.

They have no path, so they are named by their content (`memory:DIGEST`): the same records have the same name in every
process, and a resumed run must be given them again.
"""

from __future__ import annotations

import datetime
import decimal
import hashlib
import json
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from isopref.data.formats import DIGEST_BYTES, Places, without_filling
from isopref.data.source import Source
from isopref.errors import DataError

IN_MEMORY = "memory:"  # the beginning of these names
# Types that isopref does not read, but that other columns may hold. Their repr is the same in every process.
PRINTED = (bytes, datetime.date, datetime.time, datetime.timedelta, decimal.Decimal, uuid.UUID)


@dataclass(frozen=True)
class MemoryData:
    """Records in memory. `label` says where a script passed them ("data.train"); `digest` is of their content then."""

    label: str
    records: Any = field(repr=False)  # a list of dicts or a Dataset
    digest: str
    count: int

    @property
    def name(self) -> str:
        """Their name in a config."""
        return IN_MEMORY + self.digest


def hold(label: str, records: Any) -> MemoryData:
    """Name records by their content. Raises DataError for a value that is not a record."""
    return MemoryData(label, records, _digest(label, records), len(records))


def memory_source(data: MemoryData, columns: Mapping[str, str]) -> Source:
    """A source of these records; the origin of the fourth is "data.train[3]"."""

    def read() -> Places:
        return ((fields, f"[{index}]") for index, fields in enumerate(_records(data.label, data.records)))

    def digest() -> str:
        # A list may have changed since, but a Dataset is immutable.
        return _digest(data.label, data.records) if isinstance(data.records, list) else data.digest

    return Source(data.label, "in memory", read, digest, columns, count=lambda: len(data.records))


def _records(label: str, records: Any) -> Iterator[dict[str, Any]]:
    """The records as plain values. A data set's output format, such as tensors, is ignored."""
    if isinstance(records, list):
        for index, record in enumerate(records):
            if not isinstance(record, Mapping):
                raise DataError(
                    f"{label}[{index}]: a record must be a dict, but this is a {type(record).__name__}. Convert it."
                )
            if (key := next((key for key in record if not isinstance(key, str)), None)) is not None:
                raise DataError(f"{label}[{index}]: a column's name must be text, this is {key!r}. Rename it.")
            yield _plain(record)
    else:
        as_written = without_filling(records.features.arrow_schema)
        yield from (as_written(row) for row in records.with_format(None))


def _plain(value: Any) -> Any:
    """The value with numpy's arrays and numbers, which pandas returns, converted to Python's lists and numbers."""
    if isinstance(value, Mapping):
        return {key: _plain(held) for key, held in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(held) for held in value]
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    return value


def _digest(label: str, records: Any) -> str:
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for index, record in enumerate(_records(label, records)):
        try:
            text = json.dumps(record, default=_print)
        except (TypeError, ValueError, RecursionError) as error:
            raise DataError(
                f"{label}[{index}]: {error}. A record in memory may hold text, numbers, booleans, None, lists and "
                "dicts. Convert the value, or remove its column."
            ) from error
        digest.update(text.encode() + b"\n")
    return digest.hexdigest()


def _print(value: Any) -> str:
    if isinstance(value, PRINTED):
        return repr(value)
    raise TypeError(f"holds a {type(value).__module__}.{type(value).__qualname__}")
