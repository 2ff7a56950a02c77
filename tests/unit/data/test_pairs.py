"""The table: what it holds, that it is built once for the same content, and that half a build is no build."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isopref.data import pairs as building
from isopref.data.judged import BadPairError
from isopref.data.pairs import ExampleTable, SourceSpec, SourceStats, TableStats, TokenizeOptions, build_table
from isopref.errors import ConfigError, DataError
from isopref.examples import Example, Lengths, PairTokens
from isopref.testing.models import random_pairs, tree_examples
from isopref.testing.tokenizers import tiny_tokenizer
from isopref.types import IntArray

OPTIONS = TokenizeOptions(template=None, max_length=None, truncation="drop", on_bad="error")
DROP = TokenizeOptions(template=None, max_length=None, truncation="drop", on_bad="drop")


def record(number: int, **changes: Any) -> dict[str, Any]:
    return {"prompt": f"why {number}?", "chosen": "yes " * (number % 5 + 1), "rejected": f"no {number}"} | changes


def write(path: Path, records: list[dict[str, Any]]) -> SourceSpec:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return SourceSpec(str(path))


def build(*specs: SourceSpec, folder: Path, options: TokenizeOptions = OPTIONS, **kwargs: Any) -> ExampleTable:
    tokenizer = kwargs.pop("tokenizer", None) or tiny_tokenizer("chatml")
    return build_table(specs, tokenizer, folder=folder, options=options, **kwargs)


def tables(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.arrow"))


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "CHUNK_RECORDS", 4)
    monkeypatch.setattr(building, "CHUNKS_ALONE", 2)  # workers, where there are some, begin with the ninth record


def parts(example: Example) -> list[IntArray]:
    """The prompt and the answers."""
    return [example.prompt, *example.answers]


# --- contents -------------------------------------------------------------------------------------------


def test_a_table_in_memory_gives_back_what_went_in() -> None:
    pairs = random_pairs(7, seed=3)
    weights = [1.0, 2.0, 0.5, 1.0, 1.0, 3.0, 1.0]
    table = ExampleTable.from_tokens(pairs, weights)
    assert len(table) == 7
    assert table.lengths.prompt.tolist() == [len(pair.prompt) for pair in pairs]
    assert table.lengths.answer.tolist() == [len(answer) for pair in pairs for answer in pair[1:]]
    columns = (table.lengths.answer, table.weights, table.sources, table.ids, table.answer_ids, table.prompt_ids)
    assert [column.dtype.name for column in columns] == ["int32", "float64", "int16", "uint8", "uint8", "uint64"]
    assert table.weights.tolist() == weights
    assert table.ids.shape == (7, 16)
    for index, pair in enumerate(pairs):
        found = table.example(index)
        assert [part.tolist() for part in (found.prompt, *found.answers)] == [list(part) for part in pair]
        assert found.comparisons == ((0, 1),)
        assert found.prompt.dtype == np.int32
        assert table.origin(index) == f"pair {index}"
    assert len(ExampleTable.from_tokens([])) == 0


def test_a_table_of_lists_gives_back_what_went_in() -> None:
    examples = tree_examples()
    view = ExampleTable.from_tokens(examples).select([4, 0, 2])
    wanted = [examples[4], examples[0], examples[2]]
    for index, example in enumerate(wanted):
        found = view.example(index)
        assert [part.tolist() for part in found.answers] == [part.tolist() for part in example.answers]
        assert found.comparisons == example.comparisons
    for name, expected in vars(Lengths.of(wanted)).items():
        assert vars(view.lengths)[name].tolist() == expected.tolist(), name
    assert view.origin(0) == "example 4"
    assert view.answer_ids.shape == (8 + 1 + 5, 16)


def test_ids_are_of_the_content_only() -> None:
    def table(*pairs: tuple[list[int], list[int], list[int]]) -> ExampleTable:
        return ExampleTable.from_tokens([PairTokens(*(np.array(part) for part in pair)) for pair in pairs])

    first = ([1, 2], [3], [4, 5])
    both = table(first, ([7], [8], [9]))
    # By hand: each part's length in 8 bytes, then its tokens in 4 bytes each, little-endian.
    content = b"".join(
        len(part).to_bytes(8, "little") + b"".join(token.to_bytes(4, "little") for token in part) for part in first
    )
    assert both.ids[0].tobytes() == hashlib.blake2b(content, digest_size=16).digest()
    assert both.ids[0].tolist() == table(([7], [8], [9]), first).ids[1].tolist()
    for moved in (([1], [2, 3], [4, 5]), ([1, 2], [3, 4], [5]), ([1, 2], [4, 5], [3])):
        assert table(moved).ids[0].tolist() != both.ids[0].tolist()


def test_the_digest_follows_pairs_weights_and_order() -> None:
    pairs = random_pairs(4)
    table = ExampleTable.from_tokens(pairs)
    assert table.digest == ExampleTable.from_tokens(pairs).digest
    others = [ExampleTable.from_tokens(pairs, [1, 1, 1, 2]), table.select([1, 0, 2, 3]), table.select([0, 1, 2])]
    assert len({table.digest, *(other.digest for other in others)}) == 4


def test_a_built_table_knows_sources_weights_and_origins(tmp_path: Path, small_chunks: None) -> None:
    first = write(tmp_path / "first.jsonl", [record(n, weight=n + 1) for n in range(10)])
    second = write(tmp_path / "second.jsonl", [record(n, note="x") for n in range(10, 13)])
    tokenizer = tiny_tokenizer("chatml")
    table = build(first, second, folder=tmp_path, tokenizer=tokenizer)
    assert table.source_names == (first.path, second.path)
    assert table.sources.tolist() == [0] * 10 + [1] * 3
    assert table.weights.tolist() == [*range(1, 11), 1, 1, 1]
    origins = [table.origin(index) for index in range(13)]
    assert origins == [f"{first.path}:{n}" for n in range(1, 11)] + [f"{second.path}:{n}" for n in (1, 2, 3)]
    for index in range(13):
        prompt, chosen, rejected = (tokenizer.decode(part.tolist()) for part in parts(table.example(index)))
        assert prompt == f"<|im_start|>user\nwhy {index}?<|im_end|>\n<|im_start|>assistant\n"
        assert chosen == "yes " * (index % 5 + 1) + "<|im_end|>"
        assert rejected == f"no {index}<|im_end|>"
        lengths = table.lengths.select([index])
        assert [*lengths.prompt, *lengths.answer] == [len(part) for part in parts(table.example(index))]
    assert table.stats == TableStats(
        (SourceStats("jsonl", "text", 10, 10), SourceStats("jsonl", "text", 3, 3, ("note",))),
    )
    assert (table.stats.read, table.stats.kept, table.stats.dropped) == (13, 13, {})


def test_tokens_and_views_copy_nothing(tmp_path: Path, small_chunks: None) -> None:
    table = build(write(tmp_path / "a.jsonl", [record(n) for n in range(9)]), folder=tmp_path)
    view = table.select([8, 3, 3])
    again = view.select(np.array([2, 0]))
    assert (len(view), len(again)) == (3, 2)
    assert [again.origin(i) for i in range(2)] == [table.origin(3), table.origin(8)]
    assert again.ids.tolist() == table.ids[[3, 8]].tolist()
    assert again.lengths.answer.tolist() == table.lengths.select([3, 8]).answer.tolist()
    for mine, theirs in zip(parts(again.example(0)), parts(table.example(3)), strict=True):
        assert np.shares_memory(mine, theirs)
        assert not mine.flags.owndata
        assert not mine.flags.writeable  # the file is shared with other processes
    assert view.stats == table.stats


def test_bad_records_are_counted_by_reason(tmp_path: Path, small_chunks: None) -> None:
    records = [record(0), record(1, rejected="yes yes "), record(2, chosen=""), record(3, chosen=" "), record(4)]
    long = record(5, prompt="why " * 50)
    spec = write(tmp_path / "a.jsonl", [*records, long])
    options = TokenizeOptions(template=None, max_length=40, truncation="drop", on_bad="drop")
    stats = build(spec, folder=tmp_path, options=options).stats
    assert (stats.read, stats.kept) == (6, 2)
    assert stats.dropped == {"tie": 1, "empty": 2, "too_long": 1}
    with pytest.raises(BadPairError, match=r"a\.jsonl:2: 'chosen' equals 'rejected'"):
        build(spec, folder=tmp_path)
    cut = TokenizeOptions(template=None, max_length=40, truncation="keep_end", on_bad="drop")
    assert build(spec, folder=tmp_path, options=cut).stats.sources[0].truncated == 1


def test_counts_are_kept_apart_by_source(tmp_path: Path) -> None:
    first = write(tmp_path / "first.jsonl", [record(0), record(1, chosen=""), record(2, rejected=7)])
    second = write(tmp_path / "second.jsonl", [record(3, prompt="why " * 50), record(4), record(5, chosen="")])
    options = TokenizeOptions(template=None, max_length=40, truncation="keep_end", on_bad="drop")
    stats = build(first, second, folder=tmp_path, options=options).stats
    assert [(one.read, one.kept, one.dropped, one.truncated) for one in stats.sources] == [
        (3, 1, {"empty": 1, "type": 1}, 0),
        (3, 2, {"empty": 1}, 1),
    ]
    assert (stats.read, stats.kept, stats.dropped) == (6, 3, {"empty": 2, "type": 1})


def test_notes_of_the_tokenizer_are_counted(tmp_path: Path) -> None:
    spec = write(tmp_path / "a.jsonl", [record(n) for n in range(5)])
    (merging,) = build(spec, folder=tmp_path, tokenizer=tiny_tokenizer("merging")).stats.sources
    (endless,) = build(spec, folder=tmp_path, tokenizer=tiny_tokenizer("endless")).stats.sources
    thinking = tiny_tokenizer("chatml")
    thinking.chat_template = thinking.chat_template.replace("assistant\n{% endif", "assistant\n<think>{% endif")
    (unlike,) = build(spec, folder=tmp_path, tokenizer=thinking).stats.sources
    assert (unlike.generation_prompt_backoffs, unlike.boundary_backoffs) == (5, 0)
    assert (merging.boundary_backoffs, merging.added_ends) == (5, 0)
    assert (endless.boundary_backoffs, endless.added_ends) == (0, 5)


def test_pairs_that_the_template_leaves_something_out_of_are_counted(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    called = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    asked, said = ([{"role": role, "content": "yes"}] for role in ("user", "assistant"))
    records = [record(n, prompt=asked, chosen=called if n else said, rejected=said) for n in range(3)]
    records[0]["rejected"] = [{"role": "assistant", "content": "no"}]
    spec = write(tmp_path / "a.jsonl", records)
    stats = build(spec, folder=tmp_path, options=DROP).stats
    assert (stats.kept, stats.dropped) == (1, {"left_out": 2})
    with pytest.raises(BadPairError, match=r"a\.jsonl:2: the chat template leaves out a tool call of 'chosen'"):
        build(spec, folder=tmp_path)


def test_a_source_without_one_usable_pair_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    good, bad = write(tmp_path / "a.jsonl", [record(1)]), write(tmp_path / "b.jsonl", [record(0, rejected="yes ")])
    for specs in ([bad], [good, bad], [bad, good]):
        with pytest.raises(DataError, match=r"b\.jsonl: none of 1 records is usable; dropped: 1 tie\."):
            build(*specs, folder=tmp_path / "cache", options=DROP)
    assert not tables(tmp_path / "cache")


def test_a_column_name_we_do_not_have_is_refused(tmp_path: Path) -> None:
    spec = SourceSpec(write(tmp_path / "a.jsonl", [record(0)]).path, columns={"promt": "prompt"})
    with pytest.raises(ConfigError, match=r"promt.*prompt"):
        build(spec, folder=tmp_path)


TWO_ROLES = "is read as {} and as {}. Set another column for one of them."


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"prompt": "prompt", "chosen": "prompt"}, f"the column 'prompt' {TWO_ROLES.format('prompt', 'chosen')}"),
        ({"chosen": "a", "rejected": "a"}, f"the column 'a' {TWO_ROLES.format('chosen', 'rejected')}"),
        (
            {"chosen": "prompt"},
            "the column 'prompt' is read as chosen, so nothing is read as prompt. Set a column for prompt, as in "
            "{chosen: prompt, prompt: COLUMN}, or remove chosen: prompt.",
        ),
    ],
)
def test_one_column_for_two_roles_is_refused(tmp_path: Path, columns: dict[str, str], message: str) -> None:
    path = write(tmp_path / "a.jsonl", [record(n, a="a") for n in range(3)]).path
    with pytest.raises(ConfigError) as raised:
        build(SourceSpec(path, columns=columns), folder=tmp_path)
    assert str(raised.value) == f"columns for '{path}': {message}"


def test_progress_counts_records_and_knows_the_total_where_the_format_does(tmp_path: Path, small_chunks: None) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    calls: list[tuple[int, int | None]] = []
    spec = write(tmp_path / "a.jsonl", [record(n) for n in range(6)])
    build(spec, folder=tmp_path, progress=lambda *call: calls.append(call))
    assert calls == [(4, 6), (6, 6)]
    calls.clear()
    with Path(spec.path).open("a") as file:
        file.write(json.dumps(record(6)))  # without a line end
    build(spec, folder=tmp_path, progress=lambda *call: calls.append(call))
    assert calls == [(4, 7), (7, 7)]
    calls.clear()
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as zipped:
        zipped.write(json.dumps(record(0)))
    build(SourceSpec(str(tmp_path / "a.jsonl.gz")), spec, folder=tmp_path, progress=lambda *call: calls.append(call))
    assert calls == [(1, None), (5, None), (8, None)]
    calls.clear()
    pq.write_table(pa.Table.from_pylist([record(n) for n in range(6)]), tmp_path / "a.parquet")
    build(SourceSpec(str(tmp_path / "a.parquet")), folder=tmp_path, progress=lambda *call: calls.append(call))
    assert calls == [(4, 6), (6, 6)]


# --- the cache ------------------------------------------------------------------------------------------


def test_the_same_content_is_built_once_and_one_byte_builds_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, cache = tmp_path / "a.jsonl", tmp_path / "cache"
    spec = write(path, [record(n) for n in range(3)])
    first = build(spec, folder=cache)
    assert len(tables(cache)) == 1

    with monkeypatch.context() as patch:
        patch.setattr(building, "_build", lambda *_: pytest.fail("built again"))
        again = build(spec, folder=cache)
        moved = shutil.copy(path, tmp_path / "moved.jsonl")
        os.utime(path, (1, 1))
        elsewhere = build(SourceSpec(str(moved), weight=2.0), folder=cache, workers=2)
        assert [again.origin(2), elsewhere.origin(2)] == [f"{path}:3", f"{moved}:3"]
        assert first.ids.tolist() == again.ids.tolist() == elsewhere.ids.tolist()
        assert first.stats == again.stats == elsewhere.stats

    path.write_bytes(path.read_bytes().replace(b"why 1?", b"why 1!"))
    changed = build(spec, folder=cache)
    assert len(tables(cache)) == 2
    assert changed.ids.tolist() != first.ids.tolist()
    build(spec, folder=cache, options=DROP)
    build(spec, folder=cache, tokenizer=tiny_tokenizer("llama3"))
    build(SourceSpec(str(path), columns={"chosen": "rejected", "rejected": "chosen"}), folder=cache)
    assert len(tables(cache)) == 5


def test_a_build_that_fails_half_way_leaves_nothing_behind(
    tmp_path: Path, small_chunks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = write(tmp_path / "a.jsonl", [record(n) for n in range(9)])
    cache = tmp_path / "cache"

    def fail(done: int, total: int | None) -> None:
        if done > 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(spec, folder=cache, progress=fail)
    assert [path.suffix for path in cache.iterdir()] == [".lock"]
    assert len(build(spec, folder=cache)) == 9


def test_data_that_changes_while_it_is_read_is_refused(tmp_path: Path, small_chunks: None) -> None:
    spec = write(tmp_path / "a.jsonl", [record(n) for n in range(9)])

    def append(done: int, total: int | None) -> None:
        with Path(spec.path).open("a") as file:
            file.write("\n")

    with pytest.raises(DataError, match="changed while it was read"):
        build(spec, folder=tmp_path / "cache", progress=append)
    assert not tables(tmp_path / "cache")


KILLED = """
import os, signal, sys
from pathlib import Path
from isopref.data import pairs
from isopref.data.pairs import SourceSpec, TokenizeOptions, build_table
from isopref.testing.tokenizers import tiny_tokenizer
pairs.CHUNK_RECORDS = 4
options = TokenizeOptions(template=None, max_length=None, truncation="drop", on_bad="error")
build_table([SourceSpec(sys.argv[1])], tiny_tokenizer("chatml"), folder=Path(sys.argv[2]), options=options,
            progress=lambda done, total: os.kill(os.getpid(), signal.SIGKILL) if done > 4 else None)
"""


def test_a_killed_builder_neither_blocks_nor_fools_the_next(tmp_path: Path, small_chunks: None) -> None:
    spec = write(tmp_path / "a.jsonl", [record(n) for n in range(9)])
    cache = tmp_path / "cache"
    killed = subprocess.run([sys.executable, "-c", KILLED, spec.path, str(cache)], check=False, timeout=120)
    assert killed.returncode == -signal.SIGKILL
    assert sorted(path.suffix for path in cache.iterdir()) == [".lock", ".tmp"]
    assert len(build(spec, folder=cache)) == 9
    assert not list(cache.glob("*.tmp"))


def test_one_builds_and_the_others_wait(tmp_path: Path) -> None:
    spec = write(tmp_path / "a.jsonl", [record(n) for n in range(5)])
    building_now, go_on = threading.Event(), threading.Event()
    builders: list[str] = []
    found: dict[str, ExampleTable] = {}

    def run(name: str) -> None:
        def progress(done: int, total: int | None) -> None:
            builders.append(name)
            building_now.set()
            assert go_on.wait(30)

        found[name] = build(spec, folder=tmp_path / "cache", progress=progress)

    threads = [threading.Thread(target=run, args=(name,)) for name in ("first", "second", "third")]
    threads[0].start()
    assert building_now.wait(30)
    for thread in threads[1:]:
        thread.start()
    threads[1].join(timeout=0.3)
    assert not found, "nobody may go on before the table is whole"
    go_on.set()
    for thread in threads:
        thread.join(timeout=30)
    assert builders == ["first"]
    assert found["first"].digest == found["second"].digest == found["third"].digest


def test_little_data_starts_no_workers(tmp_path: Path, small_chunks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    class StartedError(Exception):
        pass

    def start(*_: Any) -> None:
        raise StartedError

    monkeypatch.setattr(building, "ProcessPoolExecutor", start)
    few = write(tmp_path / "few.jsonl", [record(n) for n in range(8)])
    assert len(build(few, folder=tmp_path, workers=2)) == 8
    more = write(tmp_path / "more.jsonl", [record(n) for n in range(9)])
    with pytest.raises(StartedError):
        build(more, folder=tmp_path, workers=2)
    assert len(build(more, folder=tmp_path, workers=1)) == 9


def test_workers_give_the_same_file_and_the_same_error(tmp_path: Path, small_chunks: None) -> None:
    spec = write(tmp_path / "a.jsonl", [record(n) for n in range(30)] + [record(30, rejected="yes ")])
    files = []
    for workers in (1, 2):
        folder = tmp_path / str(workers)
        build(spec, folder=folder, options=DROP, workers=workers)
        files.append(tables(folder)[0].read_bytes())
    assert files[0] == files[1]
    with pytest.raises(BadPairError, match=r"a\.jsonl:31: 'chosen' equals"):
        build(spec, folder=tmp_path / "bad", workers=2)
    assert not tables(tmp_path / "bad")
