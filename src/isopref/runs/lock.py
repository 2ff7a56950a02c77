"""One run at a time in a folder: a lock file that names its holder."""

from contextlib import AbstractContextManager
from pathlib import Path

from isopref.errors import RunError
from isopref.locks import held
from isopref.runs.files import LOCK_FILE


def locked(folder: Path) -> AbstractContextManager[None]:
    """Lock an existing folder. Raises RunError if another process holds the lock."""

    def in_use(holder: str) -> RunError:
        return RunError(
            f"run.folder: {folder} is in use by another run ({holder}). Wait for it to finish, stop it, or set a "
            "different run.folder."
        )

    return held(folder / LOCK_FILE, in_use)
