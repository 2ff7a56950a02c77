"""PairTable: tokenised pairs in a memory-mapped file. One file format, one writer, one reader.

Owns what is in the file and views on it. Does not know where pairs come from: see pairs.build_table.

N: pairs of a table. Each chunk of records is two Arrow record batches, each a section with its own digest (see
sections): the small columns, which are read and checked when the table is opened, and tokens and places, which are
checked when a pair of the chunk is first used. So a table of any size is written, read and checked piece by piece.
"""

from __future__ import annotations

import hashlib
import io
import json
import mmap
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from isopref.data.content import ID_BYTES, pair_id, prompt_id
from isopref.data.sections import DamageError, Sections, SectionWriter
from isopref.errors import DataError, StartAgainError
from isopref.types import FloatArray, IntArray, PairTokens

SCHEMA = pa.schema(
    {
        "tokens": pa.list_(pa.int32()),  # prompt, chosen, rejected, one after the other
        "lengths": pa.list_(pa.int32(), 3),
        "weight": pa.float64(),
        "id": pa.binary(ID_BYTES),
        "question_id": pa.uint64(),  # of what is asked, whatever the template
        "prompt_id": pa.uint64(),  # of the prompt's tokens
        "source": pa.int16(),
        "place": pa.string(),  # inside the source (":12"); the source's name is not content
    }
)
TEXTS = pa.schema([SCHEMA.field(name) for name in ("tokens", "place")])
COLUMNS = pa.schema([field for field in SCHEMA if field.name not in TEXTS.names])


class DamagedTableError(DataError):
    """A table whose file is not as it was written. Built again, it is as it was."""


@dataclass(frozen=True)
class SourceStats:
    """What was found in one source. Counts are pairs (records for `read` and `dropped`)."""

    format: str
    shape: str
    read: int
    kept: int
    unused_columns: tuple[str, ...] = ()
    dropped: dict[str, int] = field(default_factory=dict)  # by reason
    boundary_backoffs: int = 0
    generation_prompt_backoffs: int = 0
    double_bos: int = 0
    added_ends: int = 0  # to answers that the template leaves open
    missing_eos: int = 0  # in answers that the template ends in plain text
    truncated: int = 0
    repeated_prompts: int = 0  # in both answers
    unused_inputs: int = 0  # records with a column 'input' or 'history' that is not read
    special_tokens: dict[str, int] = field(default_factory=dict)  # in the text, by the first one of a pair


@dataclass(frozen=True)
class TableStats:
    """What building the table met, source by source."""

    sources: tuple[SourceStats, ...]

    @property
    def read(self) -> int:
        return sum(source.read for source in self.sources)

    @property
    def kept(self) -> int:
        return sum(source.kept for source in self.sources)

    @property
    def dropped(self) -> dict[str, int]:
        """Records that gave no pair, by reason."""
        return dict(sum((Counter(source.dropped) for source in self.sources), Counter()))

    @property
    def dropped_note(self) -> str:
        """What an error about too few pairs adds; nothing where none was dropped."""
        dropped = self.dropped
        reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.items())
        cut = " Raise data.max_length, or cut prompts with data.truncation: keep_end." * ("too_long" in dropped)
        return f" Of {self.read} records {sum(dropped.values())} were dropped: {reasons}.{cut}" if dropped else ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> TableStats:
        sources = json.loads(text)["sources"]
        return cls(
            tuple(SourceStats(**{**source, "unused_columns": tuple(source["unused_columns"])}) for source in sources)
        )


class TableRow(NamedTuple):
    """One pair on its way into a table."""

    tokens: PairTokens
    weight: float
    question_id: bytes  # 8 bytes: pairs that ask the same share it
    place: str


def record_batch(rows: Sequence[TableRow], source: int) -> pa.RecordBatch:
    """The pairs of one chunk of one source."""
    parts = [part for row in rows for part in row.tokens]
    lengths = np.array([len(part) for part in parts], dtype=np.int32)
    offsets = np.concatenate([[0], lengths.reshape(-1, 3).sum(axis=1).cumsum()]).astype(np.int32)
    flat = np.concatenate(parts).astype(np.int32) if parts else np.empty(0, np.int32)
    return pa.record_batch(
        [
            pa.ListArray.from_arrays(offsets, flat),
            pa.FixedSizeListArray.from_arrays(lengths, 3),
            pa.array([row.weight for row in rows], pa.float64()),
            pa.array([pair_id(row.tokens) for row in rows], pa.binary(ID_BYTES)),
            pa.array([int.from_bytes(row.question_id, "little") for row in rows], pa.uint64()),
            pa.array([int.from_bytes(prompt_id(row.tokens.prompt), "little") for row in rows], pa.uint64()),
            pa.array(np.full(len(rows), source, np.int16)),
            pa.array([row.place for row in rows], pa.string()),
        ],
        schema=SCHEMA,
    )


class TableWriter:
    """Writes batches to a sink; without `close`, which adds the statistics, there is no table."""

    def __init__(self, sink: Any) -> None:
        self._writer = SectionWriter(sink)

    def write(self, batch: pa.RecordBatch) -> None:
        if batch.num_rows:
            for schema in (COLUMNS, TEXTS):
                self._writer.write(batch.select(schema.names).serialize())

    def close(self, stats: TableStats) -> None:
        self._writer.close(stats.to_json())


class _Texts(NamedTuple):
    """Tokens and places of one chunk, where they lie in the file."""

    offsets: IntArray
    tokens: IntArray
    places: pa.StringArray


class _Store:
    """The content of a whole file: small columns in memory, tokens and places where they lie."""

    def __init__(self, content: Any, path: Path | None) -> None:
        self._path = path
        try:
            self._sections = Sections(content)
            batches = [
                pa.ipc.read_record_batch(self._sections.read(number), COLUMNS)
                for number in range(0, len(self._sections), 2)
            ]
        except DamageError as error:
            raise DamagedTableError(f"{path}: {error}") from error
        self.stats = TableStats.from_json(self._sections.note)
        self.starts = np.cumsum([0, *(batch.num_rows for batch in batches)])
        self.lengths: IntArray = self._gather(batches, "lengths", np.int32).reshape(-1, 3)
        self.weights: FloatArray = self._gather(batches, "weight", np.float64)
        self.question_ids: NDArray[np.uint64] = self._gather(batches, "question_id", np.uint64)
        self.prompt_ids: NDArray[np.uint64] = self._gather(batches, "prompt_id", np.uint64)
        self.sources: IntArray = self._gather(batches, "source", np.int16)
        ids = b"".join(batch["id"].buffers()[1].to_pybytes()[: batch.num_rows * ID_BYTES] for batch in batches)
        self.ids: NDArray[np.uint8] = np.frombuffer(ids, np.uint8).reshape(-1, ID_BYTES)
        self._texts: list[_Texts | None] = [None] * len(batches)

    @staticmethod
    def _gather(batches: list[pa.RecordBatch], name: str, dtype: Any) -> NDArray[Any]:
        columns = (batch[name] for batch in batches)
        flat = [column.values if pa.types.is_fixed_size_list(column.type) else column for column in columns]
        return np.concatenate([np.empty(0, dtype), *(column.to_numpy() for column in flat)]).astype(dtype)

    def locate(self, index: int) -> tuple[int, int]:
        batch = int(np.searchsorted(self.starts, index, side="right")) - 1
        return batch, index - int(self.starts[batch])

    def tokens(self, index: int) -> PairTokens:
        batch, row = self.locate(index)
        texts = self._read_texts(batch)
        start = int(texts.offsets[row])
        chosen, rejected, end = (int(stop) for stop in start + np.cumsum(self.lengths[index]))
        return PairTokens(texts.tokens[start:chosen], texts.tokens[chosen:rejected], texts.tokens[rejected:end])

    def place(self, index: int) -> str:
        batch, row = self.locate(index)
        return str(self._read_texts(batch).places[row])

    def check(self) -> None:
        """Check every byte. Raises DamagedTableError."""
        for number in range(len(self._sections)):
            try:
                self._sections.read(number)
            except DamageError as error:
                raise DamagedTableError(f"{self._path}: {error}") from error

    def _read_texts(self, batch: int) -> _Texts:
        texts = self._texts[batch]
        if texts is None:
            try:
                section = self._sections.read(2 * batch + 1)
            except DamageError as error:
                self._give_up(error)
            found = pa.ipc.read_record_batch(section, TEXTS)
            tokens = found["tokens"]
            texts = _Texts(tokens.offsets.to_numpy(), tokens.values.to_numpy(), found["place"])
            self._texts[batch] = texts
        return texts

    def _give_up(self, error: DamageError) -> NoReturn:
        """Remove the file, so that the next start builds it again, and stop."""
        assert self._path is not None, "a table in memory is not damaged"
        try:
            self._path.unlink(missing_ok=True)
        except OSError as refused:
            raise DataError(
                f"{self._path}: {error}, and it cannot be removed ({refused.strerror}). Remove it, or set "
                "ISOPREF_CACHE to another folder, and use the same command with --resume."
            ) from error
        raise StartAgainError(
            f"{self._path}: {error}. isopref deleted it and rebuilds it on restart. isopref train and torchrun "
            "--max-restarts restart automatically; otherwise run the same command with --resume."
        ) from error


class PairTable:
    """Tokenised pairs: a whole table, or a view on some of its pairs in some order.

    lengths (N, 3) int32: tokens of prompt, chosen, rejected. weights (N,) float64. ids (N, 16) uint8: content.
    question_ids (N,) uint64: pairs that ask the same share it, whatever template and tokenizer made of it.
    prompt_ids (N,) uint64: pairs with the same tokens as their prompt share it.
    sources (N,) int16: index into source_names.
    `stats` tells of the building of the whole table, also on a view.
    """

    def __init__(
        self,
        store: _Store,
        source_names: tuple[str, ...],
        indices: IntArray | None = None,
        bases: tuple[str, ...] | None = None,
    ) -> None:
        self._store = store
        self._bases = source_names if bases is None else bases
        self._indices = np.arange(store.starts[-1]) if indices is None else indices
        self.source_names = source_names
        self.stats = store.stats

    @classmethod
    def open(cls, path: Path, source_names: Sequence[str], bases: Sequence[str] | None = None) -> PairTable:
        """Map the table in a file. Raises DamagedTableError for damage outside tokens and places.

        `bases` stand before the places of each source in an origin; without them, the sources' names do.
        Damage in those is met when they are first used, which raises StartAgainError; `check` looks for it at once.
        """
        with path.open("rb") as file:
            empty = file.seek(0, io.SEEK_END) == 0  # which cannot be mapped
            content = b"" if empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return cls(_Store(content, path), tuple(source_names), bases=None if bases is None else tuple(bases))

    @classmethod
    def from_tokens(cls, pairs: Iterable[PairTokens], weights: Iterable[float] | None = None) -> PairTable:
        """A table in memory; pair i has the origin "pair i"."""
        pairs = list(pairs)
        weights = [1.0] * len(pairs) if weights is None else list(weights)
        rows = [
            TableRow(tokens, weight, prompt_id(tokens.prompt), f"pair {index}")
            for index, (tokens, weight) in enumerate(zip(pairs, weights, strict=True))
        ]
        sink = io.BytesIO()
        writer = TableWriter(sink)
        writer.write(record_batch(rows, 0))
        writer.close(TableStats((SourceStats("memory", "tokens", read=len(rows), kept=len(rows)),)))
        return cls(_Store(sink.getvalue(), None), ("",))

    def __len__(self) -> int:
        return len(self._indices)

    @cached_property
    def lengths(self) -> IntArray:
        return self._store.lengths[self._indices]

    @cached_property
    def weights(self) -> FloatArray:
        return self._store.weights[self._indices]

    @cached_property
    def ids(self) -> NDArray[np.uint8]:
        return self._store.ids[self._indices]

    @cached_property
    def question_ids(self) -> NDArray[np.uint64]:
        return self._store.question_ids[self._indices]

    @cached_property
    def prompt_ids(self) -> NDArray[np.uint64]:
        return self._store.prompt_ids[self._indices]

    @cached_property
    def sources(self) -> IntArray:
        return self._store.sources[self._indices]

    @cached_property
    def digest(self) -> str:
        """Digest of the pairs and their weights, in this order: what a run trains on, whatever its files."""
        content = self.ids.tobytes() + self.weights.astype("<f8").tobytes()
        return hashlib.blake2b(content, digest_size=ID_BYTES).hexdigest()

    def tokens(self, index: int) -> PairTokens:
        """The pair's tokens, int32 views on the file."""
        return self._store.tokens(int(self._indices[index]))

    def origin(self, index: int) -> str:
        """Where the pair came from: "data.jsonl:12"."""
        return self._bases[int(self.sources[index])] + self._store.place(int(self._indices[index]))

    def check(self) -> None:
        """Check every byte of the file, also on a view. Raises DamagedTableError."""
        self._store.check()

    def select(self, indices: IntArray | Sequence[int]) -> PairTable:
        """A view on these pairs, in this order. No token is copied."""
        chosen = self._indices[np.asarray(indices, dtype=np.int64)]
        return PairTable(self._store, self.source_names, chosen, self._bases)
