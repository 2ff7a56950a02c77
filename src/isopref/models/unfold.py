"""Unfolds packed rows into separate sequences for layers that cannot follow segments.

Recurrent layers (state-space layers, linear attention, short convolutions) read from left to right, so one answer would
start from the state that another one left behind. Attention in chunks, over compressed keys or over keys selected by an
indexer counts tokens along the row. Hooks around such a layer unfold the row into its sequences: every segment with
everything before it, from the root of its tree, as padded batches of similar lengths. The outputs of the segments' own
tokens are folded back into the row. The layer computes a shared prompt once per answer; all other layers compute it
once. Nothing is assumed about the layer, except that it is causal. The probe (probe.py) compares the result with the
model itself.

Kinds of layers with dedicated code follow the row instead (follow.py) and compute a prompt once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import (
    LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING,
    create_causal_mask,
    create_sliding_window_causal_mask,
)

from isopref.models.follow import can_follow, follow
from isopref.models.row import Bucket, Row, current_row, enter_row

if TYPE_CHECKING:
    from isopref.models.native import NativeModel  # OLMo-core takes seconds to import

# Recurrent layers without a convolution.
STATEFUL = ("LightningAttention", "RwkvSelfAttention", "RwkvFeedForward", "xLSTMLayer")
# Layer types, as configs name them, whose attention needs only segments and a window.
FOLLOWING = (
    "full_attention", "sliding_attention", "attention", "linear_attention", "recurrent", "conv", "mamba", "hybrid",
    "hybrid_sliding", "mlp", "moe",
)  # fmt: skip
# Attention outside transformers' `AttentionInterface`, or that counts tokens, has a bias, or a window only in its mask.
MASKING = (
    "CodeGenAttention", "FalconAttention", "GPTJAttention", "GPTNeoAttention", "GPTNeoXJapaneseAttention",
    "InklingAttention", "Llama4TextAttention", "PhimoeAttention", "XGLMAttention",
)  # fmt: skip


def adapt_layers(model: PreTrainedModel | NativeModel) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Make layers follow a row's tree, and put hooks around those that cannot. Returns the names of both."""
    if not isinstance(model, PreTrainedModel):
        return (), ()
    attentions = dict(_unfollowing(model))
    inside = {id(part) for module in attentions.values() for part in module.modules()}
    stateful = {name: module for name, module in recurrent_layers(model) if id(module) not in inside}
    # Layers unfolded for another policy of this model stay unfolded: they failed the probe.
    following = {name: module for name, module in stateful.items() if can_follow(module) and not _is_unfolded(module)}
    follow(following.values())
    unfolded = {name: module for name, module in stateful.items() if name not in following}
    unfold(unfolded.values())
    for module in attentions.values():
        if not _is_unfolded(module):
            _Unfolding(_config_of(module, model)).around(module)
    return tuple(following), (*unfolded, *attentions)


def unfold(layers: Iterable[nn.Module]) -> None:
    """Put hooks around recurrent layers. Idempotent."""
    for module in layers:
        if not _is_unfolded(module):
            _Unfolding(None).around(module)


def _is_unfolded(module: nn.Module) -> bool:
    return any(isinstance(hook, _Unfolding) for hook in module._forward_pre_hooks.values())


def unknown_layers(model: PreTrainedModel | NativeModel) -> set[str]:
    """Layer types that neither follow segments nor are unfolded."""
    types = set(getattr(model.config.get_text_config(), "layer_types", None) or ()) - set(FOLLOWING)
    if not types or not isinstance(model, PreTrainedModel):
        return types
    return types - {layer_type(module, model.config) for _, module in _unfollowing(model)}


def recurrent_layers(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The outermost recurrent modules, and their names."""
    for name, child in module.named_children():
        convolves = any(isinstance(part, nn.Conv1d) for part in child.children())
        if convolves or type(child).__name__.endswith(STATEFUL):
            yield prefix + name, child
        else:
            yield from recurrent_layers(child, f"{prefix}{name}.")


def _unfollowing(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    """Attention that needs more than segments and a window."""
    for name, module in model.named_modules():
        kind = layer_type(module, model.config) if type(module).__name__.endswith("Attention") else None
        if type(module).__name__ in MASKING or (kind is not None and kind not in FOLLOWING):
            yield name, module


def _config_of(module: nn.Module, model: PreTrainedModel) -> Any:
    """The config that determines the kind of an attention module."""
    return getattr(module, "config", None) or model.config.get_text_config()


def layer_type(module: nn.Module, config: Any) -> str | None:
    """The type of the layer that a module belongs to, if its config lists it."""
    types = getattr(getattr(module, "config", config), "layer_types", None)
    number = getattr(module, "layer_idx", None)
    return None if types is None or number is None else types[number]


class _Unfolding:
    """The hooks around one layer: the first replaces the row by its first batch, the second runs the other batches.

    With a `config`, the layer is attention: it gets a mask for each batch and its model's own implementation.
    """

    def __init__(self, config: Any) -> None:
        self.config = config
        self.own_attention = None if config is None else config._attn_implementation
        self.packed_attention: str | None = None
        self.row: Row | None = None
        self.given: dict[str, Any] = {}

    def around(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(self, with_kwargs=True)
        # Also after an exception: checkpointing stops a recomputation by raising one.
        module.register_forward_hook(self.after, always_call=True)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        row = self.row = current_row()
        if row is None:
            return None
        enter_row(None)  # until `after`: modules inside the layer see a padded batch
        num_tokens = row.segments.query_bounds[-1]
        kwargs = {name: one for name, one in kwargs.items() if name != "segments"}
        given = signature(module.forward).bind(*args, **kwargs)
        given.arguments.pop("attention_mask", None)  # it is for the row; each batch gets its own

        def keys(x: Any) -> Any:
            return _Keys(row.keys(x)) if isinstance(x, Tensor) and x.shape[:2] == (1, num_tokens) else x

        self.given = _each(dict(given.arguments), keys)
        if self.config is not None:
            self.packed_attention = self.config._attn_implementation
            self.config._attn_implementation = self.own_attention
        return self._batch(module, row, 0)

    def _batch(self, module: nn.Module, row: Row, number: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The layer's arguments for one batch."""
        bucket = row.buckets[number]

        def argument(x: Any) -> Any:
            if isinstance(x, _Choices):
                return x.by_bucket[number]
            return row.unfold(x.tensor, bucket) if isinstance(x, _Keys) else x

        arguments = _each(self.given, argument)
        bound = signature(module.forward).bind_partial()
        bound.arguments.update(arguments)
        if "attention_mask" in bound.signature.parameters:
            bound.arguments["attention_mask"] = self._mask(module, bucket, arguments)
        ordered = {name: bound.arguments[name] for name in bound.signature.parameters if name in bound.arguments}
        bound.arguments = ordered
        return bound.args, bound.kwargs

    def _mask(self, module: nn.Module, bucket: Bucket, arguments: dict[str, Any]) -> Any:
        """What transformers would pass to this layer for a batch without padding."""
        config = self.config
        if config is None:
            return None
        kind = layer_type(module, config)
        windowed = kind in (None, "sliding_attention", "hybrid_sliding") and getattr(config, "sliding_window", None)
        make: Any = create_sliding_window_causal_mask if windowed else create_causal_mask
        if kind is not None and kind not in FOLLOWING:
            make = LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING.get(kind, make)
        hidden = next(one for one in arguments.values() if isinstance(one, Tensor) and one.shape[:2] == bucket.shape)
        return make(config=config, inputs_embeds=hidden, attention_mask=None, past_key_values=None)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def after(self, module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        row, self.row = self.row, None
        if row is None:
            return None
        try:
            outputs = [output]
            for number in range(1, len(row.buckets)) if output is not None else ():
                args, kwargs = self._batch(module, row, number)
                outputs.append(module.forward(*args, **kwargs))
        finally:
            self.given = {}
            if self.config is not None:
                self.config._attn_implementation = self.packed_attention
            enter_row(row)
        return _folded(row, outputs)


class _Keys:
    """A tensor with one entry per key of the row, in place of one with an entry per token."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor


class _Choices:
    """Keys that a layer chose for its own attention and for that of the next layers (GLM-MoE-DSA), in each bucket.

    They count the places of a sequence, so they mean nothing in the row.
    """

    def __init__(self, by_bucket: list[Tensor]):
        self.by_bucket = by_bucket


def _each(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same arguments with a function applied to everything in them that is not a collection."""
    if isinstance(value, tuple | list):
        return type(value)(_each(one, change) for one in value)
    if isinstance(value, dict):
        return {name: _each(one, change) for name, one in value.items()}
    return change(value)


def _folded(row: Row, outputs: list[Any]) -> Any:
    """A layer's outputs for all buckets, merged into its output for the row; None for attention weights."""
    first = outputs[0]
    if isinstance(first, tuple):
        return tuple(_folded(row, list(parts)) for parts in zip(*outputs, strict=True))
    if isinstance(first, nn.Parameter):  # GPT-NeoX Japanese leaves it to the next module to add a bias
        return first
    if not isinstance(first, Tensor):
        return None
    if not all(one.shape[:2] == bucket.shape for one, bucket in zip(outputs, row.buckets, strict=True)):
        return None
    return row.fold(outputs) if first.is_floating_point() else _Choices(outputs)
