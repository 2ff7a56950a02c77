"""One run at a time in a folder: a lock file that names its holder."""

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from isopref.errors import RunError
from isopref.locks import FileLock
from isopref.runs.files import LOCK_FILE

log = logging.getLogger(__name__)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock an existing folder. Raises RunError if another process holds the lock."""
    path = folder / LOCK_FILE
    descriptor = _hold(path)
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()
        os.close(descriptor)


def _hold(path: Path) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            is_free = FileLock(descriptor).take()
        except OSError as error:  # a file system without locks
            is_free = True
            log.warning("%s cannot be locked (%s): two runs in the same folder would go unnoticed", path, error)
        if not is_free:
            holder = os.read(descriptor, 200).decode(errors="replace").strip() or "unknown"
            os.close(descriptor)
            raise RunError(
                f"run.folder: {path.parent} is in use by another run ({holder}). Wait for it to finish, stop it, or "
                "set a different run.folder."
            )
        with suppress(FileNotFoundError):  # otherwise its holder removed it while this process was opening it
            if os.stat(path).st_ino == os.fstat(descriptor).st_ino:
                os.truncate(descriptor, 0)
                os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
                return descriptor
        os.close(descriptor)
