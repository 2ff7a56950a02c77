"""One run at a time in a folder: a lock that the system frees when its process ends, however it ends."""

import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from isopref.errors import RunError
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
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.read(descriptor, 200).decode(errors="replace").strip() or "unknown"
            os.close(descriptor)
            raise RunError(
                f"run.folder: {path.parent} is in use by another run ({holder}). Wait for its end, or stop it, or set "
                "another run.folder."
            ) from error
        except OSError as error:  # a file system without locks
            log.warning("%s cannot be locked (%s): two runs in one folder would not be noticed", path, error)
        with suppress(FileNotFoundError):  # else its holder removed it while this process opened it
            if os.stat(path).st_ino == os.fstat(descriptor).st_ino:
                os.truncate(descriptor, 0)
                os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
                return descriptor
        os.close(descriptor)
