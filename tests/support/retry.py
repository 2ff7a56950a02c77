"""A second try for a group of ranks that crashed. Pytest lists every one in its summary of warnings.

A thread of gloo, which torch brings, was once seen to die of a segmentation fault inside malloc. A cell of the matrix
depends on no earlier one, so it is measured again instead of turning a long run red. isopref.testing never retries.
"""

import os
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from isopref.testing.ranks import RankDiedError, Ranks


class RankCrashWarning(UserWarning):
    """A rank crashed, and its group was started a second time."""


def retried(ranks: Ranks, function: Callable[..., Any], *args: Any) -> list[Any]:
    """`ranks(function, *args)`, and once more if a rank crashes. Raises RankError, after the second crash too."""
    try:
        return ranks(function, *args)
    except RankDiedError as error:
        called = f"{function.__name__}({', '.join(map(str, args))})"
        warnings.warn(f"{called} runs again, because a rank crashed:\n{error}", RankCrashWarning, stacklevel=2)
        return ranks(function, *args)


def crash(folder: Path, times: int) -> int:
    """Kill this process in each of its first `times` calls, which are counted in `folder`. Then return their number."""
    crashed = len(list(folder.iterdir()))
    if crashed < times:
        (folder / str(crashed)).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return crashed
