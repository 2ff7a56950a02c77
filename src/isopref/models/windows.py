"""Which of a model's layers attend, and with which sliding windows: the basis for counting attention's work."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from torch import nn

from isopref.models.parts import layer_configs, widest_attention
from isopref.models.policy import Policy
from isopref.models.unfold import layer_type, recurrent_layers
from isopref.models.unused import is_inside
from isopref.types import FloatArray, IntArray

SELF_ATTENTION = ("Attention", "MLA")  # class names end in these

Windows = Mapping[int | None, float]  # how many layers attend with each window; None is full attention


def attention_windows(policy: Policy) -> Counter[int | None]:
    """Counts the attention layers by window. Recurrent layers do not attend."""
    config = policy.model.config.get_text_config()
    if policy.native is not None:
        kinds = getattr(config, "layer_types", None) or [None] * config.num_hidden_layers
        return Counter(_window(kind, config) for kind in kinds)
    found = Counter(_window(layer_type(module, config), config) for module in _attentions(policy))
    if not found and not policy.following and not policy.unfolded:  # under a name that is not known here
        found[_window(None, config)] = config.num_hidden_layers
    return found


def attention_work(policy: Policy) -> Windows:
    """Counts the attention layers by window, a layer with narrower heads than the widest as a part of one."""
    config = policy.model.config.get_text_config()
    configs, most = layer_configs(config), _width(widest_attention(config))
    if policy.native is not None or len(configs) == 1 or not most:
        return attention_windows(policy)
    work: dict[int | None, float] = defaultdict(float)
    for module in _attentions(policy):
        number: Any = module.layer_idx
        work[_window(layer_type(module, config), config)] += _width(configs[number]) / most
    return work


def _width(config: Any) -> int:
    """The width of all heads of a layer with this config; 0 if it does not give it."""
    return (getattr(config, "head_dim", None) or 0) * (getattr(config, "num_attention_heads", None) or 0)


def seen(queries: IntArray | FloatArray, window: int | None) -> FloatArray:
    """Keys that the first `queries` tokens of a sequence see, all added up; of each token, itself and those before."""
    full = queries * (queries + 1) / 2
    if window is None:
        return np.asarray(full)
    beyond = np.maximum(0, queries - window)
    return np.asarray(full - beyond * (beyond + 1) / 2)


def _attentions(policy: Policy) -> Iterator[nn.Module]:
    """The outermost attention modules that text uses."""
    skipped = (*(name for name, _ in recurrent_layers(policy.model)), *policy.unused)
    outermost = None
    for name, module in policy.model.named_modules():
        inside = outermost is not None and name.startswith(f"{outermost}.")
        attends = type(module).__name__.endswith(SELF_ATTENTION)
        if attends and not inside and not is_inside(name, skipped):
            outermost = name
            yield module


def _window(kind: str | None, config: Any) -> int | None:
    """The window of a layer of this kind; without kinds, all layers have the model's window."""
    if kind is not None and "chunked" in kind:
        return getattr(config, "attention_chunk_size", None)  # a token sees at most these
    windowed = kind is None or "sliding" in kind
    return getattr(config, "sliding_window", None) if windowed else None
