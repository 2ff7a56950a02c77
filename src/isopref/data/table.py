"""ExampleTable: tokenised examples in a memory-mapped file, and views of them.

Knows neither where examples come from (see pairs.build_table) nor the file format (see table_file.py).

N: examples of a table, A: their answers, M: their comparisons.
"""

from __future__ import annotations

import hashlib
import io
import mmap
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from isopref.data.content import ID_BYTES, prompt_id
from isopref.data.table_file import TableFile, TableRow, TableWriter, record_batch
from isopref.data.table_stats import SourceStats, TableStats
from isopref.examples import PAIR, Example, Lengths, PairTokens
from isopref.types import FloatArray, IntArray, Kind


def _held_by(examples: Sequence[Example]) -> Kind:
    """What examples hold that do not come from a source."""
    if examples and not any(one.comparisons for one in examples):
        return "labels"
    return "pairs" if all(one.comparisons == PAIR and len(one.answers) == 2 for one in examples) else "lists"


class ExampleTable:
    """Tokenised examples: a whole table, or a view of some of its examples in some order.

    lengths: token counts. weights (N,) float64. ids (N, 16) uint8: content ids of examples. answer_ids (A, 16) uint8:
    content ids of answers with their prompts. scores (A,) float64: NaN if there are none. gaps (M,) float64: score of
    better minus score of worse in each comparison, NaN if the data has no scores.
    question_ids (N,) uint64: shared by examples with the same prompt, before templating and tokenising.
    prompt_ids (N,) uint64: shared by examples whose prompts have the same tokens.
    sources (N,) int16: index into source_names.
    `stats` describes how the whole table was built, even on a view.
    """

    def __init__(
        self,
        file: TableFile,
        source_names: tuple[str, ...],
        indices: IntArray | None = None,
        bases: tuple[str, ...] | None = None,
    ) -> None:
        self._file = file
        self._bases = source_names if bases is None else bases
        self._indices = np.arange(file.starts[-1]) if indices is None else indices
        self.source_names = source_names
        self.stats = file.stats

    @classmethod
    def open(cls, path: Path, source_names: Sequence[str], bases: Sequence[str] | None = None) -> ExampleTable:
        """Map the table in a file. Raises DamagedTableError for damage outside tokens and places.

        `bases` prefix the places of each source in an origin; the default is the sources' names.
        Damaged tokens or places are detected on first use, which raises StartAgainError, or immediately by `check`.
        """
        with path.open("rb") as file:
            empty = file.seek(0, io.SEEK_END) == 0  # an empty file cannot be mapped
            content = b"" if empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return cls(TableFile(content, path), tuple(source_names), bases=None if bases is None else tuple(bases))

    @classmethod
    def from_tokens(
        cls, examples: Iterable[Example | PairTokens], weights: Iterable[float] | None = None
    ) -> ExampleTable:
        """A table in memory; the origin of example i is "example i" or "pair i"."""
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
        return cls(TableFile(sink.getvalue(), None), ("",))

    def __len__(self) -> int:
        return len(self._indices)

    @cached_property
    def holds(self) -> frozenset[Kind]:
        """What the sources of these examples hold: one kind, or several in a mix."""
        return frozenset(self.stats.sources[source].holds for source in np.unique(self.sources))

    @cached_property
    def unit(self) -> str:
        """What an example is called: "pair", "list", "answer" (labelled), "prompt" (grouped), "example" (in a mix)."""
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
        return self._file.lengths.select(self._indices)

    @cached_property
    def weights(self) -> FloatArray:
        return self._file.weights[self._indices]

    @cached_property
    def ids(self) -> NDArray[np.uint8]:
        return self._file.ids[self._indices]

    @cached_property
    def answer_ids(self) -> NDArray[np.uint8]:
        return self._file.answer_ids[self._file.lengths.answers_of(self._indices)]

    @cached_property
    def scores(self) -> FloatArray:
        return self._file.scores[self._file.lengths.answers_of(self._indices)]

    @cached_property
    def gaps(self) -> FloatArray:
        return self._file.gaps[self._file.lengths.comparisons_of(self._indices)]

    @cached_property
    def question_ids(self) -> NDArray[np.uint64]:
        return self._file.question_ids[self._indices]

    @cached_property
    def prompt_ids(self) -> NDArray[np.uint64]:
        return self._file.prompt_ids[self._indices]

    @cached_property
    def sources(self) -> IntArray:
        return self._file.sources[self._indices]

    @cached_property
    def digest(self) -> str:
        """Digest of the examples and their weights, in this order: what a run trains on, independent of files."""
        content = self.ids.tobytes() + self.weights.astype("<f8").tobytes()
        return hashlib.blake2b(content, digest_size=ID_BYTES).hexdigest()

    def example(self, index: int) -> Example:
        """The example's tokens, as int32 views of the file."""
        return self._file.example(int(self._indices[index]))

    def origin(self, index: int) -> str:
        """Where the example came from: "data.jsonl:12"."""
        return self._bases[int(self.sources[index])] + self.place(index)

    def place(self, index: int) -> str:
        """The example's location inside its source: ":12"."""
        return self._file.place(int(self._indices[index]))

    def subset(self, index: int) -> str | None:
        """The subset that the example belongs to, if the data names one."""
        return self._file.subset(int(self._indices[index]))

    def check(self) -> None:
        """Check every byte of the file, even on a view. Raises DamagedTableError."""
        self._file.check()

    def select(self, indices: IntArray | Sequence[int]) -> ExampleTable:
        """A view of these examples, in this order. No tokens are copied."""
        chosen = self._indices[np.asarray(indices, dtype=np.int64)]
        return ExampleTable(self._file, self.source_names, chosen, self._bases)
