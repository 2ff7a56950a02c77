"""Packed rows in Hugging Face models, through transformers' own registration of attention functions.

A model that goes through `AttentionInterface` hands our function every layer's queries, keys and values. The row's
`segments` are a keyword argument of the decoder: most models pass it on to their attention, some only to their decoder
layers, and there a hook picks it up. Whether a given model really attends as it should is decided by a numerical probe
(probe.py).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.modeling_layers import GradientCheckpointingLayer

from isopref.errors import ModelError
from isopref.ops.attention import segment_attention
from isopref.types import Segments

NAME = "isopref_segments"
RECORDED = "isopref_recorded"  # the same attention, which also tells the probe what layers ask for


class Mask:
    """In place of a mask that transformers would make for a layer: its window, or the size of its chunks."""

    def __init__(self, *_: Any, local_size: int | None = None, **__: Any):
        self.window = local_size


class Asked(NamedTuple):
    """What a layer asked its attention for."""

    layer: str
    window: int | None  # the sliding window it handed to its attention
    mask: Mask | None  # None if it asked transformers for no mask


_asked: ContextVar[list[Asked] | None] = ContextVar("asked", default=None)


def register() -> None:
    """Make the attention implementations `NAME` and `RECORDED` known to transformers. Harmless when repeated.

    No mask function is registered with the first, so transformers makes no mask: the segments say who sees whom.
    """
    AttentionInterface.register(NAME, _attention)
    AttentionInterface.register(RECORDED, _recorded_attention)
    AttentionMaskInterface.register(RECORDED, Mask)


@contextmanager
def recorded() -> Iterator[list[Asked]]:
    """What layers ask for while the context is open."""
    asked: list[Asked] = []
    token = _asked.set(asked)
    try:
        yield asked
    finally:
        _asked.reset(token)


def record(module: nn.Module, window: int | None, mask: Mask | None) -> None:
    """Tell the probe what a layer asks for, if it wants to know."""
    # A compiled layer cannot tell; the probe runs it uncompiled for this.
    if not is_compiling() and (asked := _asked.get()) is not None:
        asked.append(Asked(type(module).__name__, window, mask))


class _Held:
    """What a decoder layer was last called with, for the modules inside it."""

    segments: Segments | None = None


def hold_segments(model: nn.Module) -> None:
    """Make every decoder layer keep the segments it is given within reach of the modules inside it.

    StableLM's and Nemotron's layers take all keyword arguments and drop them before their attention. A variable around
    the whole forward pass would not do: activation checkpointing calls a layer again in the backward pass, after other
    microbatches, with the arguments it had the first time.
    """
    for layer in model.modules():
        hooked = _hold in layer._forward_pre_hooks.values()  # by another policy
        if isinstance(layer, GradientCheckpointingLayer) and not hooked:
            held = _Held()
            for module in layer.modules():
                module._isopref_held = held  # type: ignore[assignment]
            layer.register_forward_pre_hook(_hold, with_kwargs=True)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _hold(layer: Any, _args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    layer._isopref_held.segments = kwargs.get("segments")


def held_segments(module: nn.Module) -> Segments | None:
    """The segments that the decoder layer around a module was given; None in a padded batch, or outside a layer."""
    held: _Held | None = getattr(module, "_isopref_held", None)
    return None if held is None else held.segments


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
    if segments is None:
        segments = held_segments(module)
    if segments is None:
        raise ModelError(
            f"the row's segments reached neither {type(module).__name__} nor its decoder layer, so packed rows would "
            "leak between answers. Set layout.rows: padded."
        )
    if s_aux is not None:
        raise ModelError(
            f"{type(module).__name__} uses attention sinks, which packed rows do not support. Set layout.rows: padded."
        )
    if attention_mask is not None or any(isinstance(one, Tensor) for one in unknown.values()):
        names = [name for name, one in unknown.items() if isinstance(one, Tensor)]
        raise ModelError(
            f"{type(module).__name__} hands its attention {' and '.join(names) or 'a mask of its own'}, which packed "
            "rows do not support. Set layout.rows: padded."
        )
    scale = scaling if scaling is not None else float(query.shape[-1]) ** -0.5
    out = segment_attention(query[0], key[0], value[0], segments, scale=scale, window=sliding_window, softcap=softcap)
    return out[None], None


def _recorded_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    mask = attention_mask if isinstance(attention_mask, Mask) else None
    record(module, options.get("sliding_window"), mask)
    return _attention(module, query, key, value, attention_mask if mask is None else None, **options)
