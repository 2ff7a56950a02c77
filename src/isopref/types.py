"""Value types shared by all layers. No behaviour beyond moving between devices, no I/O, no torch at import.

Dimensions: A answers, M comparisons, P pairs, B sequences, T tokens of a sequence, C trained tokens of answers,
S segments, Q sequences, K gathered keys, R copies of one element at most.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, is_dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch
    from torch import Tensor

IntArray = NDArray[np.integer[Any]]
FloatArray = NDArray[np.floating[Any]]

# The terms of a loss: comparisons of two answers, answers of ranked lists, or labelled answers.
Kind = Literal["pairs", "lists", "labels"]


@dataclass(frozen=True)
class Needs:
    """What an objective needs from a microbatch besides the log-probability of every answer."""

    heads: bool = False  # log-probabilities of compared answers up to the length of the shorter one
    confidence: bool = False  # how likely an answer's tokens are compared with the policy's own samples
    routing: bool = False  # where the routers of a mixture of experts sent the tokens
    gaps: bool = False  # score gap of each comparison in the data


LOGPS_ALONE = Needs()


class Readout(NamedTuple):
    """A policy's scores of a microbatch, in float32 or wider. Fields that were not requested are None.

    A tuple, because FSDP looks for tensors in tuples but not in dataclasses.
    """

    # A: log-probability (natural log) of each answer: the sum over its tokens of weight * log p. For a reward model,
    # its reward.
    logp: Tensor
    head_logp: Tensor | None = None  # 2, M: the same up to the length of the comparison's shorter answer (Needs.heads)
    confidence: Tensor | None = None  # A: mean over tokens of log p(token) - log sum_v p(v)^2, without gradient
    routing: Tensor | None = None  # 2, L, E: tokens sent to each expert and their probabilities, summed (experts.py)


@dataclass(frozen=True)
class PairLogps:
    """Summed log-probabilities (natural log) of the answers of P pairs, with the counts of their trained tokens.

    A comparison of two answers is such a pair, whatever other answers its example has.
    """

    chosen: Tensor  # P
    rejected: Tensor  # P
    num_chosen: Tensor  # P
    num_rejected: Tensor  # P
    heads: Tensor | None = None  # 2, P: the same up to the length of the shorter answer (Needs.heads)
    weight: Tensor | None = None  # P: WPO's weight of the pair (Needs.confidence)
    whole_chosen: Tensor | None = None  # P: `chosen` before LD-DPO's discount; None without a discount
    gap: Tensor | None = None  # P: score of chosen minus score of rejected in the data; never inferred (Needs.gaps)


@dataclass(frozen=True)
class ListLogps:
    """Summed log-probabilities (natural log) of the A answers of some lists, with their trained tokens and scores."""

    logp: Tensor  # A
    num_tokens: Tensor  # A
    list: Tensor  # A: index of the answer's list
    score: Tensor  # A: higher is better


@dataclass(frozen=True)
class LabelLogps:
    """Summed log-probabilities (natural log) of A labelled answers, with their token counts."""

    logp: Tensor  # A
    num_tokens: Tensor  # A
    good: Tensor  # A: booleans


Logps = PairLogps | ListLogps | LabelLogps


@dataclass(frozen=True)
class Anchors:
    """What losses for labels need from a global batch. Gains in nats, as scalars; None if not requested."""

    kl: Tensor | None = None  # mean gain of mismatched pairs, a prompt with another prompt's answer; at least 0
    midpoint: Tensor | None = None  # halfway between mean gains of good and bad answers so far, this batch included


@dataclass(frozen=True)
class ContextGroup:
    """Ranks that split the tokens of every row: rank r of n has tokens r, r + n, r + 2 n, ..."""

    name: str  # of their process group
    rank: int  # of this process in it
    size: int


@dataclass(eq=False)  # not frozen: torch 2.11 would then recompile layers for every number of segments
class Segments:
    """Which keys the queries of a packed row see. Treat as immutable.

    Query segment s attends causally to key segment s, the two aligned at their ends. `key_index` gathers keys from the
    row, so that segments can share keys (those of a prompt); None takes them in order. The bounds are the offsets on
    the host, so that reading them needs no synchronisation; `follows` says where each segment branches off.
    """

    query_offsets: Tensor  # S+1, int32
    key_offsets: Tensor  # S+1, int32
    key_index: Tensor | None  # K, int64
    key_copies: Tensor | None  # R, T, int64: where among the K keys each token is (see ops/take.py)
    query_bounds: tuple[int, ...]
    key_bounds: tuple[int, ...]
    follows: tuple[int, ...]  # S: position in the row of the token before the segment's first one; -1 if none
    longest: int  # no segment has more queries or keys
    context: ContextGroup | None = None  # the ranks that split the row, if any; the segments are of the complete row

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
    predict_index: Tensor  # C: flat position (of B*T) whose hidden state predicts the trained token
    predict_copies: Tensor  # R, B*T: where among the C each position is (see ops/take.py)
    target: Tensor  # C: the trained token
    answer: Tensor  # C: which answer it belongs to
    place: Tensor  # C: its place among the trained tokens of that answer
    times: Tensor  # B*T: how many sequences contain the token: 2 in the prompt of a pair, 0 in the padding
    last_index: Tensor  # Q: flat position of the last token of each sequence
    last_copies: Tensor  # R, B*T: where among the Q each position is (see ops/take.py)
    last_answer: Tensor  # Q: which answer the sequence ends with
    predict_places: IntArray  # C: predict_index on the host
    last_places: IntArray  # Q: last_index on the host
    weight: Tensor | None = None  # C, float64: weight of the token's log-probability; None if all are 1

    def to(self, device: torch.device) -> Pass:
        return moved(self, lambda tensor: tensor.to(device, non_blocking=True))


@dataclass(frozen=True)
class Microbatch:
    """The input of one forward and backward pass: complete examples, in one `Pass` or several.

    A microbatch without examples is a filler, which keeps a rank without work in step with the others.
    """

    passes: tuple[Pass, ...]
    num_tokens: Tensor  # A: trained tokens of each answer
    example: Tensor  # A: which example of the microbatch it answers
    score: Tensor  # A, float64: NaN if the data has none
    compared: Tensor  # 2 M: the answers that are compared: all better ones, then all worse ones
    compared_copies: Tensor  # R, A: where among the 2 M each answer is (see ops/take.py)
    gap: Tensor  # M, float64: score of better minus score of worse; NaN if unknown

    @property
    def num_answers(self) -> int:
        return int(self.num_tokens.shape[0])

    @property
    def num_comparisons(self) -> int:
        return int(self.compared.shape[0]) // 2

    def to(self, device: torch.device) -> Microbatch:
        return moved(self, lambda tensor: tensor.to(device, non_blocking=True))


Part = TypeVar("Part")


def moved(value: Part, move: Callable[[Tensor], Tensor]) -> Part:
    """A copy of one of this project's dataclasses with all tensors moved, including nested ones."""
    return replace(value, **{name: _moved(part, move) for name, part in vars(value).items()})  # type: ignore[type-var]


def _moved(part: Any, move: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(part, tuple):
        return tuple(_moved(one, move) for one in part)
    if is_dataclass(part):
        return moved(part, move)
    return move(part) if hasattr(part, "to") else part
