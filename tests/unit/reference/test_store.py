"""Stores on disk: what is written is read, and nothing else is ever believed."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isopref.errors import CacheError
from isopref.reference import store as module
from isopref.reference.store import Records, Store, find_store, key_of, records, stores

IDENTITY = {"weights": "abc", "config": {"layers": 2, "theta": 1e4}}


def some(count: int, seed: int = 0) -> Records:
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 256, (count, 16), dtype=np.uint8)
    return records(ids, rng.normal(-100, 30, count), rng.integers(1, 9999, count))


def ids_of(given: Records) -> Any:
    return np.frombuffer(given["id"].tobytes(), np.uint8).reshape(-1, 16)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path, IDENTITY, {"reference": "some/model"})


# --- what is written is read -----------------------------------------------------------------------


def test_look_up_gives_back_what_was_written(store: Store) -> None:
    first, second, never = some(50, 0), some(3, 1), some(20, 2)
    store.write(first)
    store.write(second)
    wanted = np.concatenate([second, never, first[::-1]])
    known, found, damage = store.look_up(ids_of(wanted))
    assert known.tolist() == [True] * 3 + [False] * 20 + [True] * 50
    assert found[known].tobytes() == wanted[known].tobytes()
    assert damage == []


def test_a_shard_is_its_bytes_by_hand(store: Store) -> None:
    """The format as documented, read without our code."""
    given = records(np.arange(16, dtype=np.uint8)[None], np.array([-1.5]), np.array([7]))
    store.write(given)
    (path,) = store.folder.glob("*.shard")
    content = path.read_bytes()
    assert len(content) == 32 + 28
    assert content[:8] == b"isoprefA"
    assert content[8:24].hex() == store.folder.name
    assert int.from_bytes(content[24:32], "little") == 1
    assert content[32:48] == bytes(range(16))
    assert np.frombuffer(content[48:56], "<f8").tolist() == [-1.5]
    assert np.frombuffer(content[56:], "<u4").tolist() == [7]


def test_writing_the_same_again_is_nothing_new(store: Store) -> None:
    store.write(some(5))
    store.write(some(5))
    assert len(store.shards()) == 1
    assert store.num_answers() == 5
    store.write(some(0))
    assert len(store.shards()) == 1


def test_of_a_pair_that_is_there_twice_one_value_is_used(store: Store) -> None:
    again = some(5)
    again["logp"] += 1e-9
    store.write(some(5))
    store.write(again)
    known, found, _ = store.look_up(ids_of(again))
    assert known.all()
    assert (np.abs(found["logp"] - some(5)["logp"]) <= 2e-9).all()
    assert store.num_answers() == 5


@settings(max_examples=30, deadline=None)
@given(parts=st.lists(st.integers(0, 30), max_size=5), seed=st.integers(0, 9))
def test_any_split_into_shards_reads_the_same(
    tmp_path_factory: pytest.TempPathFactory, parts: list[int], seed: int
) -> None:
    store = Store.open(tmp_path_factory.mktemp("store"), IDENTITY, {})
    everything = some(sum(parts), seed)
    for part in np.split(everything, np.cumsum(parts)[:-1]) if parts else []:
        store.write(part)
    known, found, _ = store.look_up(ids_of(everything))
    assert known.all()
    assert found.tobytes() == everything.tobytes()


def test_many_writers_at_once(store: Store) -> None:
    def write(writer: int) -> None:
        for number in range(10):
            store.write(some(3, 10 * writer + number))

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.num_answers() == 8 * 10 * 3
    assert store.problems() == []
    assert not list(store.folder.glob("*.tmp"))


def test_reading_needs_no_right_to_write(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.write(some(5))

    def refused(*_arguments: object, **_options: object) -> None:
        raise PermissionError(13, "Permission denied")

    for name in ("utime", "replace", "fsync", "mkdir"):
        monkeypatch.setattr(os, name, refused)
    again = Store.open(store.folder.parent, IDENTITY, {})
    assert again.look_up(ids_of(some(5)))[0].all()
    with pytest.raises(CacheError, match="Set ISOPREF_CACHE to a writable folder"):
        Store.open(store.folder.parent, {"other": 1}, {})


# --- nothing else is believed ----------------------------------------------------------------------


@pytest.mark.parametrize("change", ["flip", "cut", "grow", "empty", "other store"])
def test_damage_is_named_and_removed(store: Store, tmp_path: Path, change: str) -> None:
    store.write(some(5, 0))
    store.write(some(5, 1))
    known, _, _ = store.look_up(ids_of(some(5, 0)))
    path = next(path for path in store.shards() if some(5, 0).tobytes() in path.read_bytes())
    content = path.read_bytes()
    if change == "other store":
        other = Store.open(tmp_path, {"another": "model"}, {})
        other.write(some(5, 0))
        path.unlink()
        path = store.folder / other.shards()[0].name
        path.write_bytes(other.shards()[0].read_bytes())
    else:
        flipped = content[:50] + bytes([content[50] ^ 1]) + content[51:]
        path.write_bytes({"flip": flipped, "cut": content[:-1], "grow": content + b"\0", "empty": b""}[change])
    assert [text.split(": ")[0] for text in store.problems()] == [str(path)]
    assert path.exists()  # looking changes nothing
    known, _, damage = store.look_up(ids_of(np.concatenate([some(5, 0), some(5, 1)])))
    assert known.tolist() == [False] * 5 + [True] * 5
    assert [text.split(": ")[0] for text in damage] == [str(path)]
    assert not path.exists()
    assert store.problems() == []


def test_a_shard_that_cannot_be_read_is_left_where_it_is(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.write(some(5))

    def refused(_path: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", refused)
        known, _, damage = store.look_up(ids_of(some(5)))
    assert not known.any()
    assert damage == [f"{store.shards()[0]}: cannot be read (Permission denied)"]
    assert store.look_up(ids_of(some(5)))[0].all()


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_write_that_is_cut_off_leaves_nothing_to_read(
    store: Store, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """As if the process had died there: not even the temporary file is tidied up."""
    store.write(some(5, 0))

    def die(*_arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", lambda *_arguments, **_options: None)
        patch.setattr(*((Path, "replace", die) if call == "replace" else (os, "fsync", die)))
        with pytest.raises(KeyboardInterrupt):
            store.write(some(5, 1))
    assert len(list(store.folder.glob("*.tmp"))) == 1
    assert store.problems() == []
    assert store.look_up(ids_of(some(5, 1)))[0].tolist() == [False] * 5
    store.sweep()
    assert len(list(store.folder.glob("*.tmp"))) == 1  # it may be someone's who is still writing
    (left,) = store.folder.glob("*.tmp")
    os.utime(left, (0, 0))
    store.sweep()
    assert not left.exists()


def test_a_full_disk_is_an_error_that_says_so(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_file: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CacheError, match=r"No space left on device.*Set ISOPREF_CACHE"):
        store.write(some(5))
    assert not list(store.folder.glob("*.tmp"))


# --- the manifest ----------------------------------------------------------------------------------


def test_the_key_is_the_identitys_content() -> None:
    assert key_of({"a": 1, "b": [1.5]}) == key_of({"b": [1.5], "a": 1})
    assert len({key_of(x) for x in ({"a": 1}, {"a": 2}, {"b": 1}, {"a": "1"}, {"a": 1.5}, {})}) == 6


def test_the_manifest_says_what_the_store_is(store: Store) -> None:
    manifest = json.loads((store.folder / "manifest.json").read_text())
    assert manifest == {"format": 2, "reference": "some/model", "identity": IDENTITY}
    assert store.key == key_of(IDENTITY)


def test_hints_are_those_of_the_first(store: Store) -> None:
    again = Store.open(store.folder.parent, IDENTITY, {"reference": "a/copy"})
    assert again.folder == store.folder
    assert again.manifest()["reference"] == "some/model"


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"format": 2}', '{"format": 3, "identity": {}}', '{"format": 1, "identity": {"weights": "abd"}}'],
)
def test_a_damaged_manifest_is_named_and_written_anew(store: Store, text: str) -> None:
    store.write(some(5))
    store.manifest_file.write_text(text)
    assert [problem.split(": ")[0] for problem in store.problems()] == [str(store.manifest_file)]
    again = Store.open(store.folder.parent, IDENTITY, {})
    assert len(again.repaired) == 1
    assert again.problems() == []
    assert again.num_answers() == 5


def test_a_store_of_an_earlier_version_is_scored_again(store: Store) -> None:
    """The first format had records of pairs. One line says so, and nothing of it is read."""
    shard = store.folder / f"{'0' * 32}.shard"
    shard.write_bytes(b"isoprefR" + bytes(64))
    manifest = json.loads(store.manifest_file.read_text())
    store.manifest_file.write_text(json.dumps({**manifest, "format": 1}))
    assert store.is_outdated()
    assert [line for line in store.problems() if "earlier version" in line]
    again = Store.open(store.folder.parent, IDENTITY, {})
    assert [*again.repaired] == [
        f"{store.folder}: written by an earlier version of isopref, in another format. Scored again"
    ]
    assert not shard.exists()
    assert (again.problems(), again.num_answers()) == ([], 0)
    assert Store.open(store.folder.parent, IDENTITY, {}).repaired == ()


def test_last_use(store: Store) -> None:
    os.utime(store.manifest_file, (100, 100))
    assert store.last_use() == 100
    Store.open(store.folder.parent, IDENTITY, {})
    last = store.last_use()
    assert last is not None
    assert last > 1e9


# --- many stores -----------------------------------------------------------------------------------


def test_find_by_the_beginning_of_the_key(tmp_path: Path) -> None:
    made = [Store.open(tmp_path, {"model": n}, {}) for n in range(20)]
    assert {store.key for store in stores(tmp_path)} == {store.key for store in made}
    assert find_store(tmp_path, made[3].key[:10]) == Store(made[3].folder)
    with pytest.raises(CacheError, match="isopref cache ls"):
        find_store(tmp_path, "xyz")
    with pytest.raises(CacheError, match="Use a longer prefix"):
        find_store(tmp_path, next(c for c in "0123456789abcdef" if sum(s.key[0] == c for s in made) > 1))
    with pytest.raises(CacheError):
        find_store(tmp_path, "")


def test_remove(store: Store) -> None:
    store.write(some(5))
    store.remove()
    assert stores(store.folder.parent) == []
    assert list(store.folder.parent.iterdir()) == []
    store.write(some(5))  # a run that is filling it goes on
    assert store.num_answers() == 5


def test_needs_no_torch() -> None:
    code = f"import sys, {module.__name__}; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
