"""File locks between processes. The OS releases a lock when its process ends, however it ends."""

import fcntl


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
