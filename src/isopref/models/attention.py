"""Packed rows in Hugging Face models, through transformers' own registration of attention functions.

A model that uses `AttentionInterface` calls our function with every layer's queries, keys and values. Most models also
pass on the row's `segments`; for the others, row.py provides them. Whether a given model really attends as it should is
decided by a numerical probe (probe.py).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from transformers import AttentionInterface, AttentionMaskInterface

from isopref.errors import ModelError
from isopref.models.row import current_row
from isopref.ops.attention import batch_attention, segment_attention
from isopref.types import Segments

NAME = "isopref_segments"
RECORDED = "isopref_recorded"  # the same attention, which also records for the probe what layers ask for


class PackedRowsError(ModelError):
    """A layer needs something that packed rows do not support, the `reason`."""

    def __init__(self, reason: str):
        super().__init__(f"{reason}. Set layout.rows: padded.")
        self.reason = reason


class Mask:
    """Replaces the mask that transformers would make for a layer: holds its window, or the size of its chunks."""

    def __init__(self, *_: Any, local_size: int | None = None, **__: Any):
        self.window = local_size


class Asked(NamedTuple):
    """What a layer asked its attention for."""

    layer: str
    window: int | None  # the sliding window that it passed to its attention
    mask: Mask | None  # None if it did not ask transformers for a mask


_asked: ContextVar[list[Asked] | None] = ContextVar("asked", default=None)


def register() -> None:
    """Register the attention implementations `NAME` and `RECORDED` with transformers. Idempotent.

    The first has no mask function, so transformers makes no mask: the segments say which tokens see which.
    """
    AttentionInterface.register(NAME, _attention)
    AttentionInterface.register(RECORDED, _recorded_attention)
    AttentionMaskInterface.register(RECORDED, Mask)


@contextmanager
def recorded() -> Iterator[list[Asked]]:
    """Record what layers ask their attention for while the context is open."""
    asked: list[Asked] = []
    token = _asked.set(asked)
    try:
        yield asked
    finally:
        _asked.reset(token)


def record(module: nn.Module, window: int | None, mask: Mask | None) -> None:
    """Record what a layer asks for, if `recorded` is open."""
    # Not in a compiled layer: the probe runs layers uncompiled to record them.
    if not is_compiling() and (asked := _asked.get()) is not None:
        asked.append(Asked(type(module).__name__, window, mask))


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    segments: Segments | None = None,
    s_aux: Tensor | None = None,
    position_ids: Tensor | None = None,
    **unknown: Any,
) -> tuple[Tensor, None]:
    """The signature transformers calls; 1, heads, T, width in and 1, T, heads, width out."""
    names = [name for name, one in unknown.items() if isinstance(one, Tensor)]
    if attention_mask is not None or names:
        raise PackedRowsError(
            f"{type(module).__name__} hands its attention {' and '.join(names) or 'a mask of its own'}, which packed "
            "rows do not support"
        )
    scale = scaling if scaling is not None else float(query.shape[-1]) ** -0.5
    options: dict[str, Any] = {"scale": scale, "window": sliding_window, "softcap": softcap, "sinks": s_aux}
    if segments is None:
        out: Tensor = _attention_beside(module, query, key, value, options)
        return out, None
    return segment_attention(query[0], key[0], value[0], segments, **options)[None], None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attention_beside(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
    """The attention of a layer that was not passed the segments. A compiled layer calls it uncompiled."""
    row = current_row()
    if row is None:  # in a layer for which unfold.py has made a padded batch
        return batch_attention(query, key, value, **options)
    if query.shape[0] != 1 or query.shape[2] != row.num_own_tokens:
        raise PackedRowsError(f"{type(module).__name__} attends to something other than the tokens of the row")
    return segment_attention(query[0], key[0], value[0], row.segments, **options)[None]


def _recorded_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    mask = attention_mask if isinstance(attention_mask, Mask) else None
    record(module, options.get("sliding_window"), mask)
    return _attention(module, query, key, value, attention_mask if mask is None else None, **options)
