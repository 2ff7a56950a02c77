"""Builds an ExampleTable from sources: once for the same content, by one process, on all the requested cores.

Owns the cache (key, lock, atomic writes), the workers and the policy on bad records. sources.py reads records,
shapes.py interprets them, chat.py tokenises them, and table_file.py defines the file.
"""

from __future__ import annotations

import hashlib
import json
import logging
import multiprocessing
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from isopref.data.chat import NOTES, PairEncoder, TokenizeOptions
from isopref.data.columns import PROMPTS, SIDES
from isopref.data.grouping import VERSION as GROUPING_VERSION
from isopref.data.grouping import write_grouped
from isopref.data.judged import BadPairError, RankedList
from isopref.data.memory import memory_source
from isopref.data.shapes import COLUMNS, DETECT_RECORDS, Shape, detect_shape, to_pair
from isopref.data.sources import Record, Source, SourceSpec, read_source
from isopref.data.surprises import first_special_token, has_unused_context, repeats_prompt
from isopref.data.table import ExampleTable
from isopref.data.table_file import DamagedTableError, TableRow, TableWriter, record_batch
from isopref.data.table_stats import SourceStats, TableStats
from isopref.errors import ConfigError, DataError, RunError
from isopref.locks import FileLock

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["ExampleTable", "SourceSpec", "SourceStats", "TableStats", "TokenizeOptions", "build_table"]

CODE_VERSION = 15  # raise it when the same content would give different tokens or a different file
LEFT_OUT = ("unscored_answers", "repeated_answers")  # reasons why answers of a list are left out
CHUNK_RECORDS = 512  # also the maximum size of a record batch
CHECKED_AT_ONCE = 2**28  # bytes: tables up to this size are verified when opened, in a fraction of a second
# Chunks that this process encodes before it starts workers. A worker takes about 3 s to start, mostly for imports, in
# which one process encodes some 4,000 chat pairs; smaller data is done sooner without workers.
CHUNKS_ALONE = 8

Progress = Callable[[int, int | None], None]  # records done, and total records if the sources know

log = logging.getLogger(__name__)


class _Chunk(NamedTuple):
    source: int
    base: str  # the beginning of the origins of the source's records
    shape: Shape
    records: list[Record]


class _Encoded(NamedTuple):
    source: int
    shape: Shape
    read: int
    batch: Any  # pa.RecordBatch
    dropped: Counter[str]
    notes: Counter[str]
    special_tokens: Counter[str]
    columns: set[str]
    used_columns: set[str]


def build_table(
    specs: Sequence[SourceSpec],
    tokenizer: PreTrainedTokenizerBase,
    *,
    folder: Path,
    options: TokenizeOptions,
    group_by_prompt: bool = False,
    progress: Progress | None = None,
    workers: int = 1,
    head_start_s: float = 0.0,
    say: Callable[[str], None] = log.warning,
) -> ExampleTable:
    """The records of all sources, in order, tokenised; from the cache in `folder` if it has the same content.

    The table holds every usable record of every source: mixing by weight or count selects from it (mixing.py).
    `group_by_prompt` groups records with the same prompt into one example, from the ungrouped table (grouping.py).
    `workers` processes tokenise what is left after CHUNKS_ALONE; they are spawned, so a script that uses more than one
    needs the `if __name__ == "__main__":` guard. Of several processes with the same folder, one builds the table and
    the others wait; `head_start_s` lets another process, which shows its progress, start first.
    A damaged table is rebuilt by one of them, which reports that to `say`.
    Raises DataError, ConfigError, RunError.
    """
    sources = [_open(spec) for spec in specs]
    encoder = PairEncoder(tokenizer, options)
    content = _content(sources)
    key = _key(content, encoder)
    keep = partial(_kept_table, folder, sources, head_start_s, say)

    def write_records(file: Any) -> None:
        _write(file, sources, _encode_all(_chunks(sources, options.raw), encoder, workers), progress)
        if _content(sources) != content:
            raise DataError("The data changed while it was read. Start again once nothing writes to it.")

    table = keep(key, write_records)
    if not group_by_prompt:
        return table
    if table.holds == {"lists"}:
        raise ConfigError(
            "data.group_by_prompt groups pairs and labelled answers, but all data is lists, which are grouped already. "
            "Set data.group_by_prompt: false."
        )
    write = partial(write_grouped, table, drop_bad=options.on_bad == "drop", chunk_examples=CHUNK_RECORDS)
    return keep(_digest(["grouped", GROUPING_VERSION, key]), write)


def _kept_table(
    folder: Path,
    sources: list[Source],
    head_start_s: float,
    say: Callable[[str], None],
    key: str,
    write: Callable[[Any], None],
) -> ExampleTable:
    """The table with this key, built if its file is missing or damaged."""
    path = folder / f"{key}.arrow"
    table, _ = _find(path, sources)
    if table is None:
        time.sleep(head_start_s)
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(path.with_suffix(".lock")):
            table, damage = _find(path, sources)  # another process may have built it while we waited
            if damage is not None:
                say(f"{damage}. Building it again")
            if table is None:
                _build(path, write)
                table = _open_table(path, sources)
    return table


def _open_table(path: Path, sources: list[Source]) -> ExampleTable:
    return ExampleTable.open(path, [source.name for source in sources], [source.base for source in sources])


def _find(path: Path, sources: list[Source]) -> tuple[ExampleTable | None, DamagedTableError | None]:
    """The table in a file if it is intact; otherwise what is wrong with it, if it exists."""
    try:
        table = _open_table(path, sources)
        if path.stat().st_size <= CHECKED_AT_ONCE:
            table.check()
    except FileNotFoundError:
        return None, None
    except DamagedTableError as damage:
        return None, damage
    return table, None


def all_cores() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0))


def _open(spec: SourceSpec) -> Source:
    unknown = set(spec.columns or {}) - set(COLUMNS)
    if unknown:
        turned = {
            ours: theirs for theirs, ours in (spec.columns or {}).items() if theirs in unknown and ours in COLUMNS
        }
        names = ", ".join(f"{ours}: {theirs}" for ours, theirs in turned.items())
        way_out = f" isopref's name comes first: if those are columns of the data, write {{{names}}}." if turned else ""
        raise ConfigError(
            f"columns for '{spec.path}': isopref has no columns {sorted(unknown)}, but {', '.join(COLUMNS)}.{way_out}"
        )
    _refuse_shared_columns(spec)
    if spec.memory is not None:
        return memory_source(spec.memory, spec.columns or {})
    return read_source(spec.path, columns=spec.columns, name=spec.name, split=spec.split, revision=spec.revision)


def _refuse_shared_columns(spec: SourceSpec) -> None:
    """Raise ConfigError if one column would be read under two names, or if its own name would be left without one."""
    columns = spec.columns or {}
    roles: dict[str, list[str]] = {}
    for ours, theirs in columns.items():
        roles.setdefault(theirs, []).append(ours)
    for theirs, names in roles.items():
        if len(names) > 1:
            raise ConfigError(
                f"columns for '{spec.path}': the column '{theirs}' is read as {' and as '.join(names)}. Set another "
                "column for one of them."
            )
        (ours,) = names
        is_prompt = theirs == "prompt" and ours in PROMPTS
        if theirs in ("prompt", *SIDES) and theirs not in columns and not is_prompt:
            raise ConfigError(
                f"columns for '{spec.path}': the column '{theirs}' is read as {ours}, so nothing is read as {theirs}. "
                f"Set a column for {theirs}, as in {{{ours}: {theirs}, {theirs}: COLUMN}}, or remove {ours}: {theirs}."
            )


def _content(sources: list[Source]) -> list[Any]:
    return [(source.format, source.digest(), sorted(source.columns.items())) for source in sources]


def _key(content: list[Any], encoder: PairEncoder) -> str:
    return _digest([CODE_VERSION, CHUNK_RECORDS, encoder.key(), content])


def _digest(parts: list[Any]) -> str:
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Wait for the lock on a file and hold it."""
    with path.open("w") as file:
        lock = FileLock(file.fileno())
        if not lock.take():
            log.info("Another process is building the pair table; waiting for %s.", path)
            lock.wait()
        yield


def _build(path: Path, write: Callable[[Any], None]) -> None:
    """Write the table to a temporary name and rename it once it is complete and on disk."""
    for left_over in path.parent.glob(f"{path.stem}.*.tmp"):
        left_over.unlink()  # this process holds the lock, so the one that wrote the file is dead
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _write(file: Any, sources: list[Source], results: Iterable[_Encoded], progress: Progress | None) -> None:
    totals = [source.count() for source in sources] if progress else [None]
    total = None if None in totals else sum(count for count in totals if count is not None)
    found = [_Found(source) for source in sources]
    done = 0
    writer = TableWriter(file)
    for result in results:
        writer.write(result.batch)
        found[result.source].add(result)
        done += result.read
        if progress:
            progress(done, total)
    writer.close(TableStats(tuple(one.stats() for one in found)))


class _Found:
    """What was found in a source so far."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._shape: Shape | None = None
        self._counts: Counter[str] = Counter()
        self._dropped: Counter[str] = Counter()
        self._special: Counter[str] = Counter()
        self._columns: set[str] = set()
        self._used: set[str] = set()

    def add(self, result: _Encoded) -> None:
        self._shape = result.shape
        self._counts.update(result.notes, read=result.read, kept=result.batch.num_rows)
        self._dropped += result.dropped
        self._special += result.special_tokens
        self._columns |= result.columns
        self._used |= result.used_columns

    def stats(self) -> SourceStats:
        """Raises DataError if there is not a single pair: an empty source cannot be mixed."""
        source, dropped = self._source, dict(self._dropped)
        counts = {
            name: self._counts[name]
            for name in ("read", "kept", "repeated_prompts", "unused_inputs", *LEFT_OUT, *NOTES)
        }
        if not counts["kept"]:
            reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.items())
            raise DataError(
                f"{source.name}: none of {counts['read']} records is usable; dropped: {reasons}. Use another source, "
                "data.template or data.max_length."
            )
        assert self._shape is not None, "a source has records"
        return SourceStats(
            source.format,
            self._shape.name,
            holds=self._shape.holds,
            dropped=dropped,
            unused_columns=tuple(sorted(self._columns - self._used)),
            special_tokens=dict(self._special.most_common()),
            **counts,
        )


def _chunks(sources: list[Source], raw: bool) -> Iterator[_Chunk]:
    for index, source in enumerate(sources):
        records = iter(source)
        first = list(islice(records, DETECT_RECORDS))
        shape = detect_shape(first, raw=raw, columns=source.columns)
        everything = chain(first, records)
        while chunk := list(islice(everything, CHUNK_RECORDS)):
            yield _Chunk(index, source.base, shape, chunk)


# --- encoding, here or in worker processes -----------------------------------------------------------


def _encode_chunk(encoder: PairEncoder, chunk: _Chunk) -> _Encoded:
    options = encoder.options
    dropped: Counter[str] = Counter()
    notes: Counter[str] = Counter()
    special: Counter[str] = Counter()
    columns: set[str] = set()
    used: set[str] = set()

    def drop(bad: BadPairError) -> None:
        if options.on_bad == "error":
            raise bad
        dropped[bad.reason] += 1

    pairs = []
    for record in chunk.records:
        columns |= record.fields.keys()
        try:
            pairs.append(to_pair(record, chunk.shape, raw=options.raw))
            used |= (reads := chunk.shape.used(record.fields))
            notes["unused_inputs"] += has_unused_context(record.fields, pairs[-1], reads)
        except BadPairError as bad:
            drop(bad)
    rows = []
    for pair, result in zip(pairs, encoder.encode(pairs), strict=True):
        if result is None:
            dropped["too_long"] += 1
        elif isinstance(result, BadPairError):
            drop(result)
        else:
            notes.update(result.notes)
            notes.update(pair.notes if isinstance(pair, RankedList) else {})
            notes["repeated_prompts"] += repeats_prompt(pair)
            if encoder.special_tokens and (token := first_special_token(pair, encoder.special_tokens)):
                special[token] += 1
            place = pair.origin.removeprefix(chunk.base)
            rows.append(TableRow(result.tokens, pair.weight, result.question_id, place, pair.subset))
    batch = record_batch(rows, chunk.source)
    return _Encoded(chunk.source, chunk.shape, len(chunk.records), batch, dropped, notes, special, columns, used)


def _encode_all(chunks: Iterator[_Chunk], encoder: PairEncoder, workers: int) -> Iterator[_Encoded]:
    """Encoded chunks, in order."""
    encode = partial(_encode_chunk, encoder)
    yield from map(encode, chunks if workers == 1 else islice(chunks, CHUNKS_ALONE))
    first = next(chunks, None)
    if first is None:
        return
    pending: deque[Future[_Encoded]] = deque()
    # spawn: a fork would copy locks held by torch's and the tokenizer's threads, and the lock on the cache.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, _start_worker, (encoder,)) as pool:
        try:
            for chunk in chain([first], chunks):
                pending.append(pool.submit(_work, chunk))
                if len(pending) > 2 * workers:  # bounds memory: the whole data set is never in flight
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BrokenProcessPool as error:
            raise RunError(
                "A tokenising process died. If it ran out of memory, free some and try again. In a script, put the "
                "call under `if __name__ == '__main__':`."
            ) from error
        except BaseException:  # a bad record or Ctrl-C: do not wait for the rest
            pool.shutdown(wait=False, cancel_futures=True)
            raise


_encode_here: Callable[[_Chunk], _Encoded]  # of a worker process, set when it starts


def _start_worker(encoder: PairEncoder) -> None:
    global _encode_here
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _encode_here = partial(_encode_chunk, encoder)


def _work(chunk: _Chunk) -> _Encoded:
    return _encode_here(chunk)
