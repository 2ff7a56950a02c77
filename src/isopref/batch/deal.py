"""A packed row split over the ranks of a context-parallel group: each gets every n-th token, as cards are dealt.

All ranks then have the same number of tokens and about the same number of predictions, whatever the row holds. A rank's
predictions are selected on the host: counting them on a device would need a synchronisation. The segments stay those of
the complete row, because attention runs over all its tokens (ops/exchange.py).

Dimensions: T tokens of the row, C trained tokens, Q sequences, K keys, R copies of one element at most.
"""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from isopref.batch.rows import copies_of, on_device
from isopref.errors import ConfigError
from isopref.types import ContextGroup, IntArray, Pass, Segments


def deal(one: Pass, group: ContextGroup) -> Pass:
    """What this rank computes of a packed row; padding makes the row's length a multiple of the group's size.

    Raises ConfigError for a padded batch.
    """
    if one.segments is None or one.position_ids is None:
        raise ConfigError("context parallelism needs packed rows (layout.rows: shared or packed), not a padded batch.")
    num_tokens = one.segments.query_bounds[-1]
    padding = -num_tokens % group.size
    size = (num_tokens + padding) // group.size
    device = one.input_ids.device

    def dealt(x: Tensor) -> Tensor:
        return pad(x, (0, padding))[..., group.rank :: group.size].contiguous()

    predicts, ends = (np.flatnonzero(at % group.size == group.rank) for at in (one.predict_places, one.last_places))
    predict_places = one.predict_places[predicts] // group.size
    last_places = one.last_places[ends] // group.size
    some_C, some_Q = on_device(predicts, device), on_device(ends, device)
    return Pass(
        input_ids=dealt(one.input_ids),
        position_ids=dealt(one.position_ids),
        segments=replace(_padded(one.segments, padding), context=group),
        predict_index=on_device(predict_places, device),
        predict_copies=on_device(copies_of(predict_places, size), device),
        target=one.target[some_C],
        answer=one.answer[some_C],
        place=one.place[some_C],
        times=dealt(one.times),
        last_index=on_device(last_places, device),
        last_copies=on_device(copies_of(last_places, size), device),
        last_answer=one.last_answer[some_Q],
        predict_places=predict_places,
        last_places=last_places,
        weight=None if one.weight is None else one.weight[some_C],
    )


def _padded(segments: Segments, count: int) -> Segments:
    """The segments of the row with `count` more tokens, which form a segment of their own."""
    if count == 0:
        return segments
    num_tokens, num_keys = segments.query_bounds[-1], segments.key_bounds[-1]
    index, copies = segments.key_index, segments.key_copies
    if index is not None and copies is not None:
        more = np.arange(count)
        rest = np.full((len(copies) - 1, count), -1)
        index = torch.cat([index, _like(index, num_tokens + more)])
        copies = torch.cat([copies, _like(copies, np.vstack([num_keys + more[None], rest]))], dim=1)
    return replace(
        segments,
        query_offsets=_with_end(segments.query_offsets, num_tokens + count),
        key_offsets=_with_end(segments.key_offsets, num_keys + count),
        key_index=index,
        key_copies=copies,
        query_bounds=(*segments.query_bounds, num_tokens + count),
        key_bounds=(*segments.key_bounds, num_keys + count),
        follows=(*segments.follows, -1),
        longest=max(segments.longest, count),
    )


def _with_end(offsets: Tensor, end: int) -> Tensor:
    return torch.cat([offsets, offsets.new_full((1,), end)])


def _like(other: Tensor, array: IntArray) -> Tensor:
    return on_device(array, other.device)
