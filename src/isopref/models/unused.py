"""The parts of a model that have no gradient: they are not trained, and adapters leave them alone.

These are the parts of a multi-modal model that text does not use (a vision tower, an audio encoder, their projectors),
attention to an encoder's output in a decoder that is trained alone (Whisper, BART), and indexers, which choose the keys
that sparse attention sees. They are found by the model's structure, because a trial pass would not reach every expert,
and no rank ever holds a large model completely.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from torch import nn
from transformers import PreTrainedModel

from isopref.models.head import head_of

if TYPE_CHECKING:
    from isopref.models.native import NativeModel  # OLMo-core takes seconds to import

# Attention to an encoder's output, and its norms, by the names of modules; Mllama has whole layers of it.
CROSS_ATTENTION = ("encoder_attn", "crossattention", "ln_cross_attn")
CROSS_ATTENTION_LAYER = "CrossAttentionDecoderLayer"  # class names end in it


def unused_parts(model: PreTrainedModel | NativeModel) -> tuple[str, ...]:
    """Names of the outermost modules and parameters outside the text decoder, its embedding and the head.

    Also of attention to an encoder's output. In a model whose config has no separate text config, all else is used.
    """
    if not isinstance(model, PreTrainedModel):
        return ()
    outside = _outside_text(model)
    return (*outside, *(name for name in _cross_attention(model) if not is_inside(name, outside)))


def _outside_text(model: PreTrainedModel) -> tuple[str, ...]:
    if model.config.get_text_config() is model.config:
        return ()
    text = (model.get_decoder(), model.get_input_embeddings(), head_of(model))
    used = {id(parameter) for part in text if part is not None for parameter in part.parameters()}
    return tuple(_outermost(model, used, ""))


def _cross_attention(module: nn.Module, prefix: str = "") -> Iterator[str]:
    for name, child in module.named_children():
        if name.startswith(CROSS_ATTENTION) or type(child).__name__.endswith(CROSS_ATTENTION_LAYER):
            yield prefix + name
        else:
            yield from _cross_attention(child, f"{prefix}{name}.")


def indexers(model: PreTrainedModel | NativeModel) -> tuple[str, ...]:
    """Names of modules that choose keys, as in DeepSeek-V3.2. A choice has no gradient, and they do nothing else."""
    return tuple(name for name, module in model.named_modules() if type(module).__name__.endswith("Indexer"))


def without_gradient(model: PreTrainedModel | NativeModel) -> tuple[str, ...]:
    """Names of all parts without a gradient."""
    return (*unused_parts(model), *indexers(model))


def is_inside(name: str, parts: Collection[str]) -> bool:
    """Whether a module or parameter is one of the parts, or inside one."""
    return f"{name}.".startswith(tuple(f"{part}." for part in parts))


def _outermost(module: nn.Module, used: set[int], prefix: str) -> Iterator[str]:
    for name, parameter in module.named_parameters(recurse=False):
        if id(parameter) not in used:
            yield prefix + name
    for name, child in module.named_children():
        weights = [id(parameter) for parameter in child.parameters()]
        is_list = isinstance(child, nn.ModuleList | nn.ModuleDict)  # FSDP cannot wrap these, so list their children
        if weights and used.isdisjoint(weights) and not is_list:
            yield prefix + name
        else:
            yield from _outermost(child, used, f"{prefix}{name}.")
