"""File locks between processes. The OS releases a lock when its process ends, however it ends."""

import fcntl
import logging
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

log = logging.getLogger(__name__)


class FileLock:
    """The lock of an open file descriptor; closing the file releases it."""

    def __init__(self, descriptor: int):
        self.descriptor = descriptor

    def take(self) -> bool:
        """Take the lock if it is free; returns whether it was. Raises OSError on a file system without locks."""
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def wait(self) -> None:
        """Wait for the lock and take it. Raises OSError on a file system without locks."""
        fcntl.flock(self.descriptor, fcntl.LOCK_EX)

    def is_taken(self) -> bool:
        """Whether another process holds the lock. True on a file system without locks, where it is unknown."""
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        return False


@contextmanager
def held(path: Path, in_use: Callable[[str], Exception]) -> Iterator[None]:
    """Hold the lock of a file that contains its holder's name. If it is taken, raises `in_use(holder)`."""
    descriptor = _hold(path, in_use)
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()
        os.close(descriptor)


def _hold(path: Path, in_use: Callable[[str], Exception]) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            is_free = FileLock(descriptor).take()
        except OSError as error:  # a file system without locks
            is_free = True
            log.warning("%s cannot be locked (%s): a second process would not be noticed", path, error)
        if not is_free:
            holder = os.read(descriptor, 200).decode(errors="replace").strip() or "unknown"
            os.close(descriptor)
            raise in_use(holder)
        # The previous holder may have removed the file since it was opened here. Its lock is worthless then: retry.
        with suppress(FileNotFoundError):
            if os.stat(path).st_ino == os.fstat(descriptor).st_ino:
                os.truncate(descriptor, 0)
                os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
                return descriptor
        os.close(descriptor)
