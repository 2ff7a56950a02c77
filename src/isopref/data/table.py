"""ExampleTable: tokenised examples in a memory-mapped file. One file format, one writer, one reader.

Owns what is in the file and views on it. Does not know where examples come from: see pairs.build_table.

N: examples of a table, A: their answers. Each chunk of records is two Arrow record batches, each a section with its own
digest (see sections): the small columns, which are read and checked when the table is opened, and tokens with their
weights and places, which are checked when an example of the chunk is first used. So a table of any size is written,
read and checked piece by piece.
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

from isopref.data.content import ID_BYTES, answer_id, example_id, prompt_id
from isopref.data.sections import DamageError, Sections, SectionWriter
from isopref.data.token_weights import Runs, from_runs, to_runs
from isopref.errors import DataError, StartAgainError
from isopref.examples import PAIR, Example, Lengths, PairTokens, tree_tokens
from isopref.types import FloatArray, IntArray, Kind

SCHEMA = pa.schema(
    {
        "tokens": pa.list_(pa.int32()),  # the prompt and the answers, one after the other
        "lengths": pa.list_(pa.int32()),  # of those
        "trained": pa.list_(pa.int32()),  # trained tokens of the answers; none where all are
        "run_lengths": pa.list_(pa.int32()),  # of runs of answers' tokens with equal weights; none where all are one
        "run_weights": pa.list_(pa.float64()),
        "tree": pa.int32(),  # see Lengths
        "compared": pa.list_(pa.int32()),  # better, worse, better, worse, ...: numbers of answers
        "scores": pa.list_(pa.float64()),  # of the answers, or none
        "gaps": pa.list_(pa.float64()),  # of the comparisons, or none
        "weight": pa.float64(),
        "id": pa.binary(ID_BYTES),
        "answer_ids": pa.list_(pa.binary(ID_BYTES)),
        "question_id": pa.uint64(),  # of what is asked, whatever the template
        "prompt_id": pa.uint64(),  # of the prompt's tokens
        "source": pa.int16(),
        "place": pa.string(),  # inside the source (":12"); the source's name is not content
        "subset": pa.string(),  # of the source, to be evaluated on its own; null where the data names none
    }
)
TEXTS = pa.schema([SCHEMA.field(name) for name in ("tokens", "run_lengths", "run_weights", "place", "subset")])
COLUMNS = pa.schema([field for field in SCHEMA if field.name not in TEXTS.names])


class DamagedTableError(DataError):
    """A table whose file is not as it was written. Built again, it is as it was."""


@dataclass(frozen=True)
class SourceStats:
    """What was found in one source. Counts are examples (records for `read`, `dropped` and `grouped`)."""

    format: str
    shape: str
    read: int
    kept: int
    unused_columns: tuple[str, ...] = ()
    dropped: dict[str, int] = field(default_factory=dict)  # by reason
    holds: Kind = "pairs"
    grouped: int = 0  # records that joined an earlier one with the same prompt
    boundary_backoffs: int = 0
    generation_prompt_backoffs: int = 0
    double_bos: int = 0
    added_ends: int = 0  # to answers that the template leaves open
    missing_eos: int = 0  # in answers that the template ends in plain text
    truncated: int = 0
    repeated_prompts: int = 0  # in both answers
    unscored_answers: int = 0  # of lists, which are left out
    repeated_answers: int = 0  # of lists, of which the first is kept
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
    """One example on its way into a table."""

    tokens: Example
    weight: float
    question_id: bytes  # 8 bytes: examples that ask the same share it
    place: str
    subset: str | None = None


def record_batch(rows: Sequence[TableRow], source: int) -> pa.RecordBatch:
    """The examples of one chunk of one source."""
    runs = [to_runs(row.tokens) for row in rows]
    examples = [
        row.tokens if len(one.lengths) else row.tokens._replace(weights=()) for row, one in zip(rows, runs, strict=True)
    ]
    parts = [np.concatenate([one.prompt, *one.answers]) for one in examples]
    lengths = [np.array([len(one.prompt), *map(len, one.answers)]) for one in examples]
    compared = [np.array(one.comparisons, np.int32).ravel() for one in examples]
    answer_ids = [
        [answer_id(one.prompt, answer, one.weights_of(k)) for k, answer in enumerate(one.answers)] for one in examples
    ]
    return pa.record_batch(
        [
            _lists(parts),
            _lists(lengths),
            _lists([np.array(one.trained if one.weights else (), np.int32) for one in examples]),
            _lists([one.lengths for one in runs]),
            pa.array([one.weights for one in runs], SCHEMA.field("run_weights").type),
            pa.array([tree_tokens(one) for one in examples], pa.int32()),
            _lists(compared),
            pa.array([one.scores for one in examples], SCHEMA.field("scores").type),
            pa.array([one.score_gaps for one in examples], SCHEMA.field("gaps").type),
            pa.array([row.weight for row in rows], pa.float64()),
            pa.array([example_id(one) for one in examples], pa.binary(ID_BYTES)),
            pa.array(answer_ids, SCHEMA.field("answer_ids").type),
            pa.array([int.from_bytes(row.question_id, "little") for row in rows], pa.uint64()),
            pa.array([int.from_bytes(prompt_id(one.prompt), "little") for one in examples], pa.uint64()),
            pa.array(np.full(len(rows), source, np.int16)),
            pa.array([row.place for row in rows], pa.string()),
            pa.array([row.subset for row in rows], pa.string()),
        ],
        schema=SCHEMA,
    )


def _lists(parts: Sequence[IntArray]) -> pa.ListArray:
    """One list of int32 for each part."""
    offsets = np.cumsum([0, *map(len, parts)]).astype(np.int32)
    flat = np.concatenate([np.empty(0, np.int32), *parts]).astype(np.int32)
    return pa.ListArray.from_arrays(offsets, flat)


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
    """Tokens, their weights, places and subsets of one chunk, where they lie in the file."""

    offsets: IntArray
    tokens: IntArray
    run_offsets: IntArray
    runs: Runs
    places: pa.StringArray
    subsets: pa.StringArray


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
        self.lengths = self._lengths(batches)
        self.weights: FloatArray = self._gather(batches, "weight", np.float64)
        self.question_ids: NDArray[np.uint64] = self._gather(batches, "question_id", np.uint64)
        self.prompt_ids: NDArray[np.uint64] = self._gather(batches, "prompt_id", np.uint64)
        self.sources: IntArray = self._gather(batches, "source", np.int16)
        self.scores = self._known(batches, "scores", self.lengths.of_answer)
        self.gaps = self._known(batches, "gaps", self.lengths.of_comparison)
        self.ids: NDArray[np.uint8] = self._ids(batches, "id")
        self.answer_ids: NDArray[np.uint8] = self._ids(batches, "answer_ids")
        self._texts: list[_Texts | None] = [None] * len(batches)

    @classmethod
    def _lengths(cls, batches: list[pa.RecordBatch]) -> Lengths:
        num_parts = cls._counts(batches, "lengths")
        parts = cls._gather(batches, "lengths", np.int32)
        is_prompt = np.zeros(len(parts), np.bool_)
        is_prompt[np.cumsum(num_parts) - num_parts] = True
        answer = parts[~is_prompt]
        trained = answer.copy()
        trained[np.repeat(cls._counts(batches, "trained") > 0, num_parts - 1)] = cls._gather(
            batches, "trained", np.int32
        )
        return Lengths(
            prompt=parts[is_prompt],
            answer=answer,
            trained=trained,
            tree=cls._gather(batches, "tree", np.int32),
            num_answers=num_parts - 1,
            num_comparisons=cls._counts(batches, "compared") // 2,
            compared=cls._gather(batches, "compared", np.int32).reshape(-1, 2),
        )

    @staticmethod
    def _gather(batches: list[pa.RecordBatch], name: str, dtype: Any) -> NDArray[Any]:
        """The values of a column, those of lists one after the other."""
        flat = (_flat(batch[name]) for batch in batches)
        return np.concatenate([np.empty(0, dtype), *(column.to_numpy() for column in flat)]).astype(dtype)

    @staticmethod
    def _counts(batches: list[pa.RecordBatch], name: str) -> IntArray:
        """How many values each list of a column has."""
        counts = (np.diff(batch[name].offsets.to_numpy()) for batch in batches)
        return np.concatenate([np.empty(0, np.int32), *counts]).astype(np.int32)

    @classmethod
    def _known(cls, batches: list[pa.RecordBatch], name: str, example: IntArray) -> FloatArray:
        """One number for each entry of `example`, which says which example it is of; NaN where that one has none."""
        has_some = cls._counts(batches, name) > 0
        values = np.full(len(example), np.nan)
        values[has_some[example]] = cls._gather(batches, name, np.float64)
        return values

    @staticmethod
    def _ids(batches: list[pa.RecordBatch], name: str) -> NDArray[np.uint8]:
        columns = [_flat(batch[name]) for batch in batches]
        content = b"".join(column.buffers()[1].to_pybytes()[: len(column) * ID_BYTES] for column in columns)
        return np.frombuffer(content, np.uint8).reshape(-1, ID_BYTES)

    def locate(self, index: int) -> tuple[int, int]:
        batch = int(np.searchsorted(self.starts, index, side="right")) - 1
        return batch, index - int(self.starts[batch])

    def example(self, index: int) -> Example:
        batch, row = self.locate(index)
        texts = self._read_texts(batch)
        start, end = (int(offset) for offset in texts.offsets[row : row + 2])
        this = np.array([index])
        answers = self.lengths.answer[self.lengths.answers_of(this)]
        borders = self.lengths.prompt[index] + np.cumsum([0, *answers[:-1]])
        prompt, *answer_tokens = np.split(texts.tokens[start:end], borders)
        compared = self.lengths.compared[self.lengths.comparisons_of(this)].tolist()
        scores, gaps = self.scores[self.lengths.answers_of(this)], self.gaps[self.lengths.comparisons_of(this)]
        of_runs = slice(*texts.run_offsets[row : row + 2])
        return Example(
            prompt,
            tuple(answer_tokens),
            tuple((better, worse) for better, worse in compared),
            () if np.isnan(scores).any() else tuple(scores.tolist()),
            () if np.isnan(gaps).any() else tuple(gaps.tolist()),
            from_runs(Runs(texts.runs.lengths[of_runs], texts.runs.weights[of_runs]), answers),
        )

    def place(self, index: int) -> str:
        batch, row = self.locate(index)
        return str(self._read_texts(batch).places[row])

    def subset(self, index: int) -> str | None:
        batch, row = self.locate(index)
        found: str | None = self._read_texts(batch).subsets[row].as_py()
        return found

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
            tokens, lengths, weights = (found[name] for name in ("tokens", "run_lengths", "run_weights"))
            runs = Runs(lengths.values.to_numpy(), weights.values.to_numpy())
            texts = _Texts(
                tokens.offsets.to_numpy(),
                tokens.values.to_numpy(),
                lengths.offsets.to_numpy(),
                runs,
                found["place"],
                found["subset"],
            )
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


def _flat(column: Any) -> Any:
    return column.values if pa.types.is_list(column.type) else column


def _held_by(examples: Sequence[Example]) -> Kind:
    """What examples without a source hold."""
    if examples and not any(one.comparisons for one in examples):
        return "labels"
    return "pairs" if all(one.comparisons == PAIR and len(one.answers) == 2 for one in examples) else "lists"


class ExampleTable:
    """Tokenised examples: a whole table, or a view on some of its examples in some order.

    lengths: token counts. weights (N,) float64. ids (N, 16) uint8: content of an example. answer_ids (A, 16) uint8:
    content of an answer with its prompt. scores (A,) float64: NaN where there are none. gaps (M,) float64: score of
    better minus score of worse in each comparison, NaN where the data does not say.
    question_ids (N,) uint64: examples that ask the same share it, whatever template and tokenizer made of it.
    prompt_ids (N,) uint64: examples with the same tokens as their prompt share it.
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
    def open(cls, path: Path, source_names: Sequence[str], bases: Sequence[str] | None = None) -> ExampleTable:
        """Map the table in a file. Raises DamagedTableError for damage outside tokens and places.

        `bases` stand before the places of each source in an origin; without them, the sources' names do.
        Damage in those is met when they are first used, which raises StartAgainError; `check` looks for it at once.
        """
        with path.open("rb") as file:
            empty = file.seek(0, io.SEEK_END) == 0  # which cannot be mapped
            content = b"" if empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return cls(_Store(content, path), tuple(source_names), bases=None if bases is None else tuple(bases))

    @classmethod
    def from_tokens(
        cls, examples: Iterable[Example | PairTokens], weights: Iterable[float] | None = None
    ) -> ExampleTable:
        """A table in memory; example i has the origin "example i", or "pair i"."""
        given = list(examples)
        weights = [1.0] * len(given) if weights is None else list(weights)
        rows = []
        for index, (tokens, weight) in enumerate(zip(given, weights, strict=True)):
            is_pair = isinstance(tokens, PairTokens)
            example = tokens.example if isinstance(tokens, PairTokens) else tokens
            place = f"pair {index}" if is_pair else f"example {index}"
            rows.append(TableRow(example, weight, prompt_id(example.prompt), place))
        sink = io.BytesIO()
        writer = TableWriter(sink)
        writer.write(record_batch(rows, 0))
        holds = _held_by([row.tokens for row in rows])
        writer.close(TableStats((SourceStats("memory", "tokens", read=len(rows), kept=len(rows), holds=holds),)))
        return cls(_Store(sink.getvalue(), None), ("",))

    def __len__(self) -> int:
        return len(self._indices)

    @cached_property
    def holds(self) -> frozenset[Kind]:
        """What the sources of these examples hold: one kind, or several in a mix."""
        return frozenset(self.stats.sources[source].holds for source in np.unique(self.sources))

    @cached_property
    def is_compared(self) -> bool:
        """Whether every example has a comparison, as a loss of pairs needs."""
        return bool((self.lengths.num_comparisons > 0).all())

    @cached_property
    def is_labelled(self) -> bool:
        """Whether every answer is good (1) or bad (0), as a loss of labels needs: labels are, and most pairs."""
        return bool(np.isin(self.scores, (0.0, 1.0)).all())

    @cached_property
    def unit(self) -> str:
        """What an example is called: "pair", "list", "answer" (with a label); grouped "prompt", in a mix "example"."""
        lengths = self.lengths
        if "lists" in self.holds:
            return "list"
        if self.holds == {"pairs"} and (lengths.num_comparisons == 1).all():
            return "pair"
        if self.holds == {"labels"} and (lengths.num_answers == 1).all():
            return "answer"
        return "prompt" if len(self.holds) == 1 else "example"

    @cached_property
    def lengths(self) -> Lengths:
        return self._store.lengths.select(self._indices)

    @cached_property
    def weights(self) -> FloatArray:
        return self._store.weights[self._indices]

    @cached_property
    def ids(self) -> NDArray[np.uint8]:
        return self._store.ids[self._indices]

    @cached_property
    def answer_ids(self) -> NDArray[np.uint8]:
        return self._store.answer_ids[self._store.lengths.answers_of(self._indices)]

    @cached_property
    def scores(self) -> FloatArray:
        return self._store.scores[self._store.lengths.answers_of(self._indices)]

    @cached_property
    def gaps(self) -> FloatArray:
        return self._store.gaps[self._store.lengths.comparisons_of(self._indices)]

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
        """Digest of the examples and their weights, in this order: what a run trains on, whatever its files."""
        content = self.ids.tobytes() + self.weights.astype("<f8").tobytes()
        return hashlib.blake2b(content, digest_size=ID_BYTES).hexdigest()

    def example(self, index: int) -> Example:
        """The example's tokens, int32 views on the file."""
        return self._store.example(int(self._indices[index]))

    def origin(self, index: int) -> str:
        """Where the example came from: "data.jsonl:12"."""
        return self._bases[int(self.sources[index])] + self.place(index)

    def place(self, index: int) -> str:
        """Where that is inside its source: ":12"."""
        return self._store.place(int(self._indices[index]))

    def subset(self, index: int) -> str | None:
        """The part of its source that the data says it belongs to, if any."""
        return self._store.subset(int(self._indices[index]))

    def check(self) -> None:
        """Check every byte of the file, also on a view. Raises DamagedTableError."""
        self._store.check()

    def select(self, indices: IntArray | Sequence[int]) -> ExampleTable:
        """A view on these examples, in this order. No token is copied."""
        chosen = self._indices[np.asarray(indices, dtype=np.int64)]
        return ExampleTable(self._store, self.source_names, chosen, self._bases)
