"""Value types shared by all layers. No behaviour beyond moving between devices, no I/O, no torch at import.

Dimensions: P pairs, B sequences, T tokens of a sequence, C completion tokens, S segments, K gathered keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, is_dataclass, replace
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
    whole_chosen: Tensor | None = None  # P: that of chosen with all its tokens, where LD-DPO discounts some in `chosen`
    weight: Tensor | None = None  # P: WPO's weight of the pair, where it was asked for
    routing: Tensor | None = None  # 2, L, E: tokens sent to each expert and their probabilities, summed (experts.py)


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
    key_copies: Tensor | None  # 2, T, int64: where among the K keys each token is; -1 for a copy there is not
    query_bounds: tuple[int, ...]
    key_bounds: tuple[int, ...]
    longest: int  # no segment has more queries or keys

    def to(self, device: torch.device) -> Segments:
        return moved(self, lambda tensor: tensor.to(device, non_blocking=True))


@dataclass(frozen=True)
class Pass:
    """The tensors of one forward pass: a packed row (B = 1, with segments) or a right-padded batch (without).

    A right-padded batch needs no attention mask: causal attention never looks ahead into the padding.
    """

    input_ids: Tensor  # B, T
    position_ids: Tensor | None  # B, T
    segments: Segments | None
    predict_index: Tensor  # C: flat position (of B*T) whose hidden state predicts the token
    predict_copies: Tensor  # 2, B*T: where among the C each position is, twice at most; -1 for a copy there is not
    target: Tensor  # C: the token
    completion: Tensor  # C: which completion it belongs to; pair p's chosen is p, its rejected is P + p
    times: Tensor  # B*T: of how many sequences the token is a part: 2 in a shared prompt, 0 in the padding
    is_tail: Tensor  # C: whether the token is beyond the length of the pair's shorter completion

    def to(self, device: torch.device) -> Pass:
        return moved(self, lambda tensor: tensor.to(device, non_blocking=True))


@dataclass(frozen=True)
class Microbatch:
    """What one forward and backward takes: whole pairs, in one pass or in several. P may be 0 (a filler)."""

    passes: tuple[Pass, ...]
    num_completion_tokens: Tensor  # 2, P: chosen, rejected

    @property
    def num_pairs(self) -> int:
        return int(self.num_completion_tokens.shape[1])

    def to(self, device: torch.device) -> Microbatch:
        return moved(self, lambda tensor: tensor.to(device, non_blocking=True))


Part = TypeVar("Part")


def moved(value: Part, move: Callable[[Tensor], Tensor]) -> Part:
    """A copy of one of the dataclasses of this project whose tensors, also those of its parts, are moved."""
    return replace(value, **{name: _moved(part, move) for name, part in vars(value).items()})  # type: ignore[type-var]


def _moved(part: Any, move: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(part, tuple):
        return tuple(_moved(one, move) for one in part)
    if is_dataclass(part):
        return moved(part, move)
    return move(part) if hasattr(part, "to") else part
