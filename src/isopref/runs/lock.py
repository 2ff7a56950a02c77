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
    """Hold a folder that exists. Raises RunError where another process holds it."""
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
            log.warning("%s cannot be locked (%s): two runs in one folder would not be noticed", path, error)
        if not is_free:
            holder = os.read(descriptor, 200).decode(errors="replace").strip() or "unknown"
            os.close(descriptor)
            raise RunError(
                f"run.folder: {path.parent} is in use by another run ({holder}). Wait for its end, or stop it, or set "
                "another run.folder."
            )
        with suppress(FileNotFoundError):  # else its holder removed it while this process opened it
            if os.stat(path).st_ino == os.fstat(descriptor).st_ino:
                os.truncate(descriptor, 0)
                os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
                return descriptor
        os.close(descriptor)
