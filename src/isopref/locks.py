"""Locks between processes, on files. The system frees a lock when its process ends, however it ends."""

import fcntl


class FileLock:
    """The lock of an open file, by its descriptor; closing the file frees it."""

    def __init__(self, descriptor: int):
        self.descriptor = descriptor

    def take(self) -> bool:
        """Take the lock unless another has it; returns whether it was free. Raises OSError if there are no locks."""
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def wait(self) -> None:
        """Take the lock as soon as it is free. Raises OSError on a file system without locks."""
        fcntl.flock(self.descriptor, fcntl.LOCK_EX)

    def is_taken(self) -> bool:
        """Whether another has the lock. True on a file system without locks, where nobody can tell."""
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        return False
