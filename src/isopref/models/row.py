"""The packed row that a model is computing, for modules that are not passed the row's segments.

Most models pass keyword arguments, including `segments`, through to their attention. Some drop them on the way
(StableLM, Nemotron), and recurrent layers need other tables than attention does. Both use the current row here.
Activation checkpointing runs layers again in the backward pass, outside the forward pass and often in another thread;
`contexts` gives them the same row as the first time.

Dimensions: S sequences of a bucket, L their padded length, T tokens of the row, K gathered keys.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from isopref.models.tree import levels_of, taps_of
from isopref.ops.convolution import Taps
from isopref.ops.levels import Levels
from isopref.ops.take import take
from isopref.types import IntArray, Segments


class Bucket(NamedTuple):
    """Segments of similar length, each with everything before it in its own sequence."""

    shape: tuple[int, int]  # S, L
    source: Tensor  # N: which of the K keys
    slot: Tensor  # N: where among the S * L places
    answer: Tensor  # M: the places of the segments' own tokens


class Row:
    """A packed row. Tables for layers are built when the first layer asks, and cached for the others."""

    def __init__(self, segments: Segments):
        self.segments = segments
        self._taps: dict[int, Taps] = {}

    @property
    def num_own_tokens(self) -> int:
        """How many tokens of the row this rank has: all, unless ranks split it."""
        context = self.segments.context
        return self.segments.query_bounds[-1] // (1 if context is None else context.size)

    def taps(self, count: int) -> Taps:
        """The tables of a convolution over `count` tokens."""
        if count not in self._taps:
            self._taps[count] = taps_of(self.segments, count)
        return self._taps[count]

    @cached_property
    def levels(self) -> Levels:
        """The row, cut where its sequences branch."""
        return levels_of(self.segments)

    @cached_property
    def buckets(self) -> list[Bucket]:
        """The row's segments, bucketed by length so that at most half of each bucket is padding."""
        own = np.diff(self.segments.query_bounds)
        length = np.diff(self.segments.key_bounds)
        order = np.argsort(length, kind="stable")[::-1]
        buckets: list[list[int]] = []
        for s in order[length[order] > 0]:
            if not buckets or 2 * length[s] < length[buckets[-1][0]]:
                buckets.append([])
            buckets[-1].append(int(s))
        return [self._bucket(members, own, length) for members in buckets]

    def _bucket(self, members: list[int], own: IntArray, length: IntArray) -> Bucket:
        longest = int(length[members[0]])
        source = [self.segments.key_bounds[s] + np.arange(length[s]) for s in members]
        slot = [i * longest + np.arange(length[s]) for i, s in enumerate(members)]
        answer = [places[len(places) - own[s] :] for places, s in zip(slot, members, strict=True)]
        return Bucket((len(members), longest), *(self._tensor(parts) for parts in (source, slot, answer)))

    @cached_property
    def order(self) -> Tensor:
        """The index of each token of the row in the concatenated output of the buckets: T."""
        length = np.diff(self.segments.key_bounds)
        by_length = np.argsort(length, kind="stable")[::-1]
        bounds = self.segments.query_bounds
        tokens = np.concatenate([np.arange(bounds[s], bounds[s + 1]) for s in by_length])
        return self._tensor([np.argsort(tokens, kind="stable")])

    def _tensor(self, parts: list[IntArray]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(self.segments.query_offsets.device, non_blocking=True)

    def keys(self, x: Tensor) -> Tensor:
        """Per-token values of a row (1, T, ...), gathered for each of the K keys."""
        index, copies = self.segments.key_index, self.segments.key_copies
        return x[0] if index is None or copies is None else take(x[0], index, copies)

    def unfold(self, keys: Tensor, bucket: Bucket) -> Tensor:
        """A bucket's share of `keys`, as a padded batch: S, L, ..."""
        num_places = bucket.shape[0] * bucket.shape[1]
        padded = keys.new_zeros(num_places, *keys.shape[1:])
        return padded.index_copy(0, bucket.slot, keys.index_select(0, bucket.source)).view(
            *bucket.shape, *keys.shape[1:]
        )

    def fold(self, batches: list[Tensor]) -> Tensor:
        """The outputs of the segments' own tokens in all buckets' padded batches, in row order: 1, T, ..."""
        parts = [
            batch.flatten(0, 1).index_select(0, bucket.answer)
            for batch, bucket in zip(batches, self.buckets, strict=True)
        ]
        return torch.cat(parts).index_select(0, self.order)[None]


_row: ContextVar[Row | None] = ContextVar("row", default=None)


@contextmanager
def computing(row: Row | None) -> Iterator[None]:
    """Make `row` the current row while the context is open; None: a padded batch."""
    token = _row.set(row)
    try:
        yield
    finally:
        _row.reset(token)


def enter_row(row: Row | None) -> None:
    """Switch to another row until the end of the enclosing `computing` pass."""
    _row.set(row)


def current_row() -> Row | None:
    """The packed row being computed; None for a padded batch."""
    return _row.get()


def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The contexts that torch's `checkpoint` uses for a layer's first computation and for its recomputation."""
    return nullcontext(), computing(_row.get())
