"""A damaged table of tokens is noticed wherever the damage is, and built again: never other tokens, no traceback."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from isopref.data import pairs as building
from isopref.data.pairs import ExampleTable, SourceSpec, TokenizeOptions, build_table
from isopref.data.table_file import DamagedTableError
from isopref.errors import DataError, StartAgainError
from isopref.testing.tokenizers import tiny_tokenizer

OPTIONS = TokenizeOptions(template=None, max_length=None, truncation="drop", on_bad="error")
NUM_PAIRS = 9  # in three chunks
ENDS = 256  # bytes at both ends of the file of which every bit is flipped


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SourceSpec:
    monkeypatch.setattr(building, "CHUNK_RECORDS", 4)
    path = tmp_path / "a.jsonl"
    records = [{"prompt": f"why {n}?", "chosen": "yes " * (n + 1), "rejected": f"no {n}"} for n in range(NUM_PAIRS)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return SourceSpec(str(path))


@pytest.fixture
def in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every table is too large to be checked when it is opened."""
    monkeypatch.setattr(building, "CHECKED_AT_ONCE", 0)


def build(spec: SourceSpec, said: list[str] | None = None) -> ExampleTable:
    say = (lambda text: None) if said is None else said.append
    folder = Path(spec.path).parent
    return build_table([spec], tiny_tokenizer("chatml"), folder=folder, options=OPTIONS, say=say)


def file_of(spec: SourceSpec) -> Path:
    (path,) = Path(spec.path).parent.glob("*.arrow")
    return path


def content(table: ExampleTable) -> list[Any]:
    """Everything that a run can read of a table."""
    columns = (table.weights, table.ids, table.answer_ids, table.question_ids, table.prompt_ids, table.sources)
    lengths = [column.tolist() for column in vars(table.lengths).values()]
    examples = [str(table.example(i)) for i in range(len(table))]
    origins = [table.origin(i) for i in range(len(table))]
    return [examples, lengths, *(column.tolist() for column in columns), origins, table.stats, table.digest]


def flip(path: Path, byte: int, bit: int = 0) -> None:
    damaged = bytearray(path.read_bytes())
    damaged[byte] ^= 1 << bit
    path.write_bytes(damaged)


def flips(size: int) -> list[tuple[int, int]]:
    """(byte, bit): every bit at both ends, and one bit of every fourth byte between them."""
    ends = [*range(ENDS), *range(size - ENDS, size)]
    return [(byte, bit) for byte in ends for bit in range(8)] + [(byte, byte // 4 % 8) for byte in range(0, size, 4)]


def test_every_flipped_bit_is_noticed(spec: SourceSpec) -> None:
    build(spec)
    path = file_of(spec)
    whole = path.read_bytes()
    damaged = path.with_name("damaged")
    places = flips(len(whole))
    assert len(places) > 4000
    for byte, bit in places:
        damaged.write_bytes(whole)
        flip(damaged, byte, bit)
        with pytest.raises(DamagedTableError, match="damaged: "):
            ExampleTable.open(damaged, ["a"]).check()


def test_in_use_a_flipped_bit_never_gives_other_content(spec: SourceSpec) -> None:
    expected = content(build(spec))
    path = file_of(spec)
    whole = path.read_bytes()
    opened = 0
    for byte, bit in flips(len(whole)):
        path.write_bytes(whole)
        flip(path, byte, bit)
        try:
            table = ExampleTable.open(path, [spec.path])
        except DamagedTableError:
            continue
        opened += 1
        with pytest.raises(StartAgainError):
            content(table)
        assert not path.exists()
    assert opened > 100  # what was flipped there is the tokens or places, which opening does not read
    path.write_bytes(whole)
    assert content(ExampleTable.open(path, [spec.path])) == expected


def test_a_damaged_table_is_built_again_and_one_line_says_so(spec: SourceSpec) -> None:
    expected = content(build(spec))
    path = file_of(spec)
    whole = path.read_bytes()
    for byte in range(0, len(whole), 64):
        flip(path, byte)
        said: list[str] = []
        assert content(build(spec, said)) == expected
        assert path.read_bytes() == whole
        (line,) = said
        assert line.startswith(f"{path}: damaged: ")
        assert line.endswith(". Building it again")
    said = []
    assert content(build(spec, said)) == expected
    assert said == []


@pytest.mark.parametrize("keep", [0, 1, 31, 32, -1, -20, -600])
def test_a_table_that_was_cut_is_built_again(spec: SourceSpec, keep: int) -> None:
    expected = content(build(spec))
    path = file_of(spec)
    path.write_bytes(path.read_bytes()[:keep])
    said: list[str] = []
    assert content(build(spec, said)) == expected
    assert len(said) == 1


def test_bytes_taken_out_of_the_middle_are_noticed(spec: SourceSpec) -> None:
    build(spec)
    path = file_of(spec)
    whole = path.read_bytes()
    path.write_bytes(whole[:64] + whole[72:])
    with pytest.raises(DamagedTableError, match=rf"damaged: {len(whole) - 8} bytes long, not {len(whole)}"):
        ExampleTable.open(path, ["a"])


def test_a_chunk_is_checked_when_it_is_first_used(spec: SourceSpec, in_use: None) -> None:
    expected = content(build(spec))
    path = file_of(spec)
    whole = path.read_bytes()
    table = build(spec)
    tokens = whole.index(table.example(8).answers[1].tobytes())
    flip(path, tokens)
    table = build(spec)
    assert str(table.example(7)) == expected[0][7]  # of the chunk before
    with pytest.raises(StartAgainError) as raised:
        table.example(8)
    message = str(raised.value)
    assert message.startswith(f"{path}: damaged: ")
    assert "deleted" in message
    assert "--resume" in message
    assert not path.exists()
    said: list[str] = []
    assert content(build(spec, said)) == expected
    assert path.read_bytes() == whole
    assert said == []  # the line was said when it was removed


def test_a_damaged_table_that_cannot_be_removed_is_named(
    spec: SourceSpec, in_use: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = build(spec)
    path = file_of(spec)
    flip(path, path.read_bytes().index(table.example(8).answers[1].tobytes()))

    def refuse(self: Path, **_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(
        DataError, match=r"damaged: .*cannot be removed \(Permission denied\)\. Remove it, or set ISOPREF"
    ):
        build(spec).example(8)


def test_one_process_builds_again_and_the_others_take_what_it_built(spec: SourceSpec) -> None:
    expected = content(build(spec))
    path = file_of(spec)
    flip(path, 0)
    said: list[str] = []
    found: list[list[Any]] = []
    threads = [threading.Thread(target=lambda: found.append(content(build(spec, said)))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert found == [expected] * 4
    assert len(said) == 1
