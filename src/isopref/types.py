"""Small value types shared by all layers. No behaviour, no I/O.

P: pairs. Importing this module imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

IntArray = NDArray[np.integer[Any]]
FloatArray = NDArray[np.floating[Any]]

CHOSEN, REJECTED = 0, 1  # sides of a pair, wherever two things are stacked


class PairTokens(NamedTuple):
    """Token ids of one pair. Each completion follows the prompt directly."""

    prompt: IntArray
    chosen: IntArray
    rejected: IntArray


@dataclass(frozen=True)
class PairLogps:
    """Summed log-probabilities (natural log) of the completions of P pairs, with their token counts."""

    chosen: Tensor  # P
    rejected: Tensor  # P
    num_chosen: Tensor  # P
    num_rejected: Tensor  # P
