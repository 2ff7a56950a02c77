"""What a source of records is, wherever they come from. sources.py opens them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from isopref.data.formats import Places
from isopref.errors import DataError

if TYPE_CHECKING:
    from isopref.data.memory import MemoryData


class Record(NamedTuple):
    """One record, with the place it came from: "data.jsonl:12", "data.json:[3]", "data.parquet:row 7"."""

    fields: dict[str, Any]
    origin: str


@dataclass(frozen=True)
class SourceSpec:
    """The user's settings for one source. `weight` and `count` are its share in a mix (see mixing.py).

    `name` (a config), `split` and `revision` select from a data set of the hub. `memory` holds the records themselves,
    if a script passed them; `path` is then only their name.
    """

    path: str
    columns: Mapping[str, str] | None = None
    weight: float | None = None
    count: int | None = None
    name: str | None = None
    split: str | None = None
    revision: str | None = None
    memory: MemoryData | None = None


@dataclass(frozen=True)
class Source:
    """Records, to be read as often as needed. Iterating raises DataError at the first broken record."""

    name: str
    format: str
    read: Callable[[], Places] = field(repr=False)
    digest: Callable[[], str] = field(repr=False)  # of the content: file bytes, or a data set's fingerprint
    columns: Mapping[str, str] = field(default_factory=dict)  # our name -> the name in the source
    count: Callable[[], int | None] = field(default=lambda: None, repr=False)  # of records, if it is cheap to find
    folder: str | None = None  # of several files: the prefix of each file's name ("data/" for data/*.jsonl)

    @property
    def base(self) -> str:
        """The prefix of a place: base and place together are a record's origin."""
        return self.name if self.folder is None else self.folder

    def __iter__(self) -> Iterator[Record]:
        place = None
        unseen = set(self.columns.values())
        for fields, place in self.read():
            unseen -= fields.keys()
            yield Record(self._renamed(fields), self.base + place)
        if place is None:
            raise DataError(f"{self.name}: this {self.format} source has no records. Choose another.")
        if unseen:
            raise DataError(
                f"{self.name}: no record has the columns {sorted(unseen)}. Fix data.columns, or the columns of the "
                "source itself."
            )

    def _renamed(self, fields: dict[str, Any]) -> dict[str, Any]:
        if not self.columns:
            return fields
        taken = {*self.columns, *self.columns.values()}
        rest = {key: value for key, value in fields.items() if key not in taken}
        return rest | {ours: fields[theirs] for ours, theirs in self.columns.items() if theirs in fields}
