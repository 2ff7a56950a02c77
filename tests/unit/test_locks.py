"""Locks on files: taken by one opening of a file at a time."""

from pathlib import Path

from isopref.locks import FileLock


def test_one_opening_has_the_lock_until_it_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with path.open("w") as other_file:
        other = FileLock(other_file.fileno())
        with path.open("w") as file:
            assert FileLock(file.fileno()).take()
            assert not other.take()
            assert other.is_taken()
        assert other.take()
        with path.open() as reader:
            assert FileLock(reader.fileno()).is_taken()
    with path.open() as reader:
        assert not FileLock(reader.fileno()).is_taken()


def test_waiting_takes_a_free_lock(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w") as file, (tmp_path / "lock").open() as other:
        FileLock(file.fileno()).wait()
        assert FileLock(other.fileno()).is_taken()
