"""The file of a token table: its columns, its writer, its reader.

Each chunk of records is two Arrow record batches, each a section with its own digest (see sections.py): the small
columns, which are read and verified when the table is opened, and tokens with their weights and places, which are
verified when an example of the chunk is first used. So a table of any size is written, read and verified in chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from isopref.data.content import ID_BYTES, answer_id, example_id, prompt_id
from isopref.data.sections import DamageError, Sections, SectionWriter
from isopref.data.table_stats import TableStats
from isopref.data.token_weights import Runs, from_runs, to_runs
from isopref.errors import DataError, StartAgainError
from isopref.examples import Example, Lengths, tree_tokens
from isopref.types import FloatArray, IntArray

SCHEMA = pa.schema(
    {
        "tokens": pa.list_(pa.int32()),  # the prompt and the answers, one after the other
        "lengths": pa.list_(pa.int32()),  # of the prompt and of each answer
        "trained": pa.list_(pa.int32()),  # trained tokens of the answers; null if all are
        "run_lengths": pa.list_(pa.int32()),  # run-length encoded weights of answer tokens; null if all are 1
        "run_weights": pa.list_(pa.float64()),
        "tree": pa.int32(),  # see Lengths
        "compared": pa.list_(pa.int32()),  # better, worse, better, worse, ...: numbers of answers
        "scores": pa.list_(pa.float64()),  # of the answers, or none
        "gaps": pa.list_(pa.float64()),  # of the comparisons, or none
        "weight": pa.float64(),
        "id": pa.binary(ID_BYTES),
        "answer_ids": pa.list_(pa.binary(ID_BYTES)),
        "question_id": pa.uint64(),  # of the prompt before templating
        "prompt_id": pa.uint64(),  # of the prompt's tokens
        "source": pa.int16(),
        "place": pa.string(),  # inside the source (":12"); the source's name is not content
        "subset": pa.string(),  # evaluated separately; null if the data names none
    }
)
TEXTS = pa.schema([SCHEMA.field(name) for name in ("tokens", "run_lengths", "run_weights", "place", "subset")])
COLUMNS = pa.schema([field for field in SCHEMA if field.name not in TEXTS.names])


class DamagedTableError(DataError):
    """The table's file has been damaged. Rebuilding restores it."""


class TableRow(NamedTuple):
    """One example on its way into a table."""

    tokens: Example
    weight: float
    question_id: bytes  # 8 bytes: shared by examples with the same prompt
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
    """Writes batches to a sink; the table is valid only after `close`, which adds the statistics."""

    def __init__(self, sink: Any) -> None:
        self._writer = SectionWriter(sink)

    def write(self, batch: pa.RecordBatch) -> None:
        if batch.num_rows:
            for schema in (COLUMNS, TEXTS):
                self._writer.write(batch.select(schema.names).serialize())

    def close(self, stats: TableStats) -> None:
        self._writer.close(stats.to_json())


class _Texts(NamedTuple):
    """Tokens, their weights, places and subsets of one chunk, mapped from the file."""

    offsets: IntArray
    tokens: IntArray
    run_offsets: IntArray
    runs: Runs
    places: pa.StringArray
    subsets: pa.StringArray


class TableFile:
    """The content of a file: small columns in memory, tokens and places mapped."""

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
        """The values of a column, with lists flattened."""
        flat = (_flat(batch[name]) for batch in batches)
        return np.concatenate([np.empty(0, dtype), *(column.to_numpy() for column in flat)]).astype(dtype)

    @staticmethod
    def _counts(batches: list[pa.RecordBatch], name: str) -> IntArray:
        """The length of each list in a column."""
        counts = (np.diff(batch[name].offsets.to_numpy()) for batch in batches)
        return np.concatenate([np.empty(0, np.int32), *counts]).astype(np.int32)

    @classmethod
    def _known(cls, batches: list[pa.RecordBatch], name: str, example: IntArray) -> FloatArray:
        """One number per entry of `example`, the example it belongs to; NaN for examples without numbers."""
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
        """Remove the file, so that the next start rebuilds it, and stop."""
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
