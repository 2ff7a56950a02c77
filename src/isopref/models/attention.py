"""Packed rows in Hugging Face models, through transformers' own registration of attention functions.

A model that goes through `AttentionInterface` hands our function every layer's queries, keys and values, and passes
`segments` through untouched. Whether a given model really does is decided by a numerical probe (probe.py).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn
from torch.compiler import is_compiling
from transformers import AttentionInterface

from isopref.errors import ModelError
from isopref.ops.attention import segment_attention
from isopref.types import Segments

NAME = "isopref_segments"
_windows: ContextVar[set[int | None] | None] = ContextVar("windows", default=None)


def register() -> None:
    """Make the attention implementation `NAME` known to transformers. Harmless when repeated.

    No mask function is registered with it, so transformers makes no mask: the segments say who sees whom.
    """
    AttentionInterface.register(NAME, _attention)


@contextmanager
def recorded_windows() -> Iterator[set[int | None]]:
    """The sliding windows that layers ask for while the context is open."""
    windows: set[int | None] = set()
    token = _windows.set(windows)
    try:
        yield windows
    finally:
        _windows.reset(token)


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
    **_kwargs: Any,
) -> tuple[Tensor, None]:
    """The signature transformers calls; 1, heads, T, width in and 1, T, heads, width out."""
    if segments is None:
        raise ModelError(
            f"{type(module).__name__} did not pass the row's segments on to its attention, so packed rows would leak "
            "between answers. Set layout.rows: padded."
        )
    if s_aux is not None:
        raise ModelError(
            f"{type(module).__name__} uses attention sinks, which packed rows do not support. Set layout.rows: padded."
        )
    record_window(sliding_window)
    scale = scaling if scaling is not None else float(query.shape[-1]) ** -0.5
    out = segment_attention(query[0], key[0], value[0], segments, scale=scale, window=sliding_window, softcap=softcap)
    return out[None], None


def record_window(window: int | None) -> None:
    """Tell the probe a layer's window, if it asks."""
    # A compiled layer cannot ask; the probe runs it uncompiled for this.
    if not is_compiling() and (windows := _windows.get()) is not None:
        windows.add(window)
