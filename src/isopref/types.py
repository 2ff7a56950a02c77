"""Value types shared by all layers. No behaviour beyond moving between devices, no I/O, no torch at import.

Dimensions: A answers, M comparisons, P pairs, B sequences, T tokens of a sequence, C trained tokens of answers,
S segments, Q sequences, K gathered keys, R times that something is taken at most.
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

# What a loss has a value for each of: comparisons of two answers, answers of ranked lists, labelled answers.
Kind = Literal["pairs", "lists", "labels"]


@dataclass(frozen=True)
class Needs:
    """What an objective has to know of a microbatch besides the log-probability of every answer."""

    heads: bool = False  # log-probabilities of the first tokens of compared answers, as many as the shorter one has
    confidence: bool = False  # how likely an answer's tokens are compared with the policy's own samples
    routing: bool = False  # where the routers of a mixture of experts sent the tokens
    gaps: bool = False  # by how much the better answer of each comparison is better, as the data scores them


LOGPS_ALONE = Needs()


class Readout(NamedTuple):
    """What a policy says of a microbatch: float32 or wider. What was not asked for is None.

    A tuple, since FSDP looks for tensors in those, and not in dataclasses.
    """

    # A: log-probability (natural log) of each answer: the sum over its tokens of weight * log p. Of a reward model: its
    # reward.
    logp: Tensor
    head_logp: Tensor | None = None  # 2, M: the same of the first tokens of better and worse (Needs.heads)
    confidence: Tensor | None = None  # A: mean over tokens of log p(token) - log sum_v p(v)^2, without gradient
    routing: Tensor | None = None  # 2, L, E: tokens sent to each expert and their probabilities, summed (experts.py)


@dataclass(frozen=True)
class PairLogps:
    """Summed log-probabilities (natural log) of the answers of P pairs, with the counts of their trained tokens.

    A comparison of two answers of an example is such a pair, whatever other answers the example has.
    """

    chosen: Tensor  # P
    rejected: Tensor  # P
    num_chosen: Tensor  # P
    num_rejected: Tensor  # P
    heads: Tensor | None = None  # 2, P: of the first tokens of both, as many as the shorter one has (Needs.heads)
    weight: Tensor | None = None  # P: WPO's weight of the pair (Needs.confidence)
    whole_chosen: Tensor | None = None  # P: that of chosen with all its tokens, where LD-DPO discounts some in `chosen`
    gap: Tensor | None = None  # P: the data's score of chosen minus that of rejected; never made up (Needs.gaps)


@dataclass(frozen=True)
class ListLogps:
    """Summed log-probabilities (natural log) of the A answers of some lists; their trained tokens and scores."""

    logp: Tensor  # A
    num_tokens: Tensor  # A
    list: Tensor  # A: which list it is in, counted from 0
    score: Tensor  # A: the higher the better


@dataclass(frozen=True)
class LabelLogps:
    """Summed log-probabilities (natural log) of A labelled answers, with their token counts."""

    logp: Tensor  # A
    num_tokens: Tensor  # A
    good: Tensor  # A: booleans


Logps = PairLogps | ListLogps | LabelLogps


@dataclass(frozen=True)
class Anchors:
    """What losses of labels have to know of a global batch: gains in nats, each a number. None if not asked for."""

    kl: Tensor | None = None  # mean gain of mismatched pairs, a prompt with another prompt's answer; at least 0
    midpoint: Tensor | None = None  # of the mean gains of good and of bad answers so far, this batch included


@dataclass(frozen=True)
class Segments:
    """Which keys the queries of a packed row see.

    Query segment s attends causally to key segment s, the two aligned at their ends. Keys are taken from the row by
    `key_index`, so that segments can share keys (those of a prompt); None takes them in order. The bounds are the
    offsets on the host, so that nobody has to ask the device for them; `follows` says where each segment branches off.
    """

    query_offsets: Tensor  # S+1, int32
    key_offsets: Tensor  # S+1, int32
    key_index: Tensor | None  # K, int64
    key_copies: Tensor | None  # R, T, int64: where among the K keys each token is (see ops/take.py)
    query_bounds: tuple[int, ...]
    key_bounds: tuple[int, ...]
    follows: tuple[
        int, ...
    ]  # S: the position in the row of the token that comes before the segment's first; -1 if none
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
    predict_index: Tensor  # C: flat position (of B*T) whose hidden state predicts the token, one of those trained
    predict_copies: Tensor  # R, B*T: where among the C each position is (see ops/take.py)
    target: Tensor  # C: the token
    answer: Tensor  # C: which answer it belongs to
    place: Tensor  # C: its place among the trained tokens of that answer
    times: Tensor  # B*T: of how many sequences the token is a part: 2 in the prompt of a pair, 0 in the padding
    last_index: Tensor  # Q: flat position of the last token of each sequence
    last_copies: Tensor  # R, B*T: where among the Q each position is (see ops/take.py)
    last_answer: Tensor  # Q: which answer the sequence ends with
    weight: Tensor | None = None  # C: float64: what the token's log-probability counts for; None where all are one

    def to(self, device: torch.device) -> Pass:
        return moved(self, lambda tensor: tensor.to(device, non_blocking=True))


@dataclass(frozen=True)
class Microbatch:
    """What one forward and backward takes: whole examples, in one pass or in several. None at all make a filler."""

    passes: tuple[Pass, ...]
    num_tokens: Tensor  # A: trained tokens of each answer
    example: Tensor  # A: which example of the microbatch it answers
    score: Tensor  # A: float64; NaN where there is none
    compared: Tensor  # 2 M: the answers that are compared: all the better ones, then the worse
    compared_copies: Tensor  # R, A: where among the 2 M each answer is (see ops/take.py)
    gap: Tensor  # M: float64; score of better minus score of worse, NaN where the data does not say

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
    """A copy of one of the dataclasses of this project whose tensors, also those of its parts, are moved."""
    return replace(value, **{name: _moved(part, move) for name, part in vars(value).items()})  # type: ignore[type-var]


def _moved(part: Any, move: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(part, tuple):
        return tuple(_moved(one, move) for one in part)
    if is_dataclass(part):
        return moved(part, move)
    return move(part) if hasattr(part, "to") else part
