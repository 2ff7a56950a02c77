"""Value types shared by all layers. No behaviour beyond moving between devices, no I/O, no torch at import.

Dimensions: P pairs, B sequences, T tokens of a sequence, C completion tokens, S segments, K gathered keys.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch
    from torch import Tensor

IntArray = NDArray[np.integer[Any]]
FloatArray = NDArray[np.floating[Any]]

PROMPT, CHOSEN, REJECTED = 0, 1, 2  # columns of a table of lengths


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


@dataclass(frozen=True)
class Segments:
    """Which keys the queries of a packed row see.

    Query segment s attends causally to key segment s, the two aligned at their ends. Keys are taken from the row by
    `key_index`, so that two segments can share keys (a prompt); None takes them in order. The bounds are the offsets
    on the host, so that nobody has to ask the device for them.
    """

    query_offsets: Tensor  # S+1, int32
    key_offsets: Tensor  # S+1, int32
    key_index: Tensor | None  # K, int64
    key_copies: Tensor | None  # 2, T, int64: where among the K keys each token is, the second -1 if it is there once
    query_bounds: tuple[int, ...]
    key_bounds: tuple[int, ...]
    longest: int  # no segment has more queries or keys; rounded up, so that few values occur

    def to(self, device: torch.device) -> Segments:
        return _moved(self, device)


@dataclass(frozen=True)
class Pass:
    """The tensors of one forward pass: a packed row (B = 1, with segments) or a right-padded batch (without).

    A right-padded batch needs no attention mask: causal attention never looks ahead into the padding.
    """

    input_ids: Tensor  # B, T
    position_ids: Tensor | None  # B, T
    segments: Segments | None
    predict_index: Tensor  # C: flat position (of B*T) whose hidden state predicts the token
    target: Tensor  # C: the token
    completion: Tensor  # C: which completion it belongs to; pair p's chosen is p, its rejected is P + p

    def to(self, device: torch.device) -> Pass:
        return _moved(self, device)


@dataclass(frozen=True)
class Microbatch:
    """What one forward and backward takes: whole pairs, in one pass or in several. P may be 0 (a filler)."""

    passes: tuple[Pass, ...]
    num_completion_tokens: Tensor  # 2, P: chosen, rejected

    @property
    def num_pairs(self) -> int:
        return int(self.num_completion_tokens.shape[1])

    def to(self, device: torch.device) -> Microbatch:
        return Microbatch(
            tuple(one.to(device) for one in self.passes),
            self.num_completion_tokens.to(device, non_blocking=True),
        )


Part = TypeVar("Part", Segments, Pass)


def _moved(value: Part, device: torch.device) -> Part:
    """A copy whose tensors, also those of its parts, are on the device."""
    return replace(value, **{name: _to(part, device) for name, part in vars(value).items() if hasattr(part, "to")})


def _to(part: Any, device: torch.device) -> Any:
    return part.to(device) if isinstance(part, Segments) else part.to(device, non_blocking=True)
