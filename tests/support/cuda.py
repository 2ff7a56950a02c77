"""What the command on a CUDA device is and gives, for the annotations of tests/gpu."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple


class Done(NamedTuple):
    """A finished run, and the accuracy on held-out pairs before and after."""

    folder: Path
    before: float
    after: float


Command = Callable[..., Done]
