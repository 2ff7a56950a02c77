"""The parts of a causal LM: the decoder, and what the model does to the logits of its head.

Both are found in the model's structure and config, under the names that transformers' models use. The probe (probe.py)
compares the result with the model's own log-probabilities, so if they are misread, training is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from isopref.errors import ModelError

if TYPE_CHECKING:
    from isopref.models.native import NativeModel  # OLMo-core takes seconds to import

# Cohere, Falcon-H1 and Muse multiply their logits by a factor; Granite, MiniCPM and Inkling divide them.
MULTIPLIERS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")
MULTIPLIES_BY_SCALING = ("hyperclovax",)  # its `logits_scaling` is a factor
SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")


def decoder_of(model: PreTrainedModel | NativeModel) -> Any:
    """The module that turns tokens into the last hidden states. Raises ModelError if the head is part of it."""
    if not isinstance(model, PreTrainedModel) or model.base_model is not model:
        return model.base_model
    # Llama 4's decoder does not have the name in `base_model_prefix`, so `base_model` is the whole model.
    embedding: Any = model.get_input_embeddings()
    holders = [child for child in model.children() if any(part is embedding for part in child.modules())]
    if len(holders) == 1 and isinstance(holders[0], PreTrainedModel):
        return holders[0]
    raise ModelError(
        f"{type(model).__name__} cannot be trained: it has no decoder separate from its head (no part called "
        f"{model.base_model_prefix!r}, and its embedding is in {_names(holders)}). Use another model."
    )


def layer_configs(config: PreTrainedConfig) -> list[Any]:
    """The config of each decoder layer if they differ, as in Gemma 4; else the model's, once."""
    return list(config.per_layer_config) if getattr(config, "is_heterogeneous", False) else [config]


def widest_attention(config: PreTrainedConfig) -> Any:
    """The config of the layers with the widest heads. In Gemma 4, those attend to everything, the others in windows."""
    return max(layer_configs(config), key=lambda one: getattr(one, "head_dim", None) or 0)


def _names(modules: list[nn.Module]) -> str:
    return " and ".join(type(module).__name__ for module in modules) or "none of its parts"


class LogitChanges(NamedTuple):
    """What a model does to its head's output: cap * tanh(scale * logits / cap), for the first `vocabulary` tokens."""

    scale: float
    softcap: float | None
    vocabulary: int | None  # None: all tokens of the head


def logit_changes(config: PreTrainedConfig) -> LogitChanges:
    """Read the changes from the config of a model's text decoder."""
    multiplies = config.model_type in MULTIPLIES_BY_SCALING
    scale = 1.0
    for name in MULTIPLIERS:
        scale *= float(getattr(config, name, None) or 1.0)
    for name in DIVISORS:
        number = float(getattr(config, name, None) or 1.0)
        scale = scale * number if multiplies else scale / number
    caps = [getattr(config, name, None) for name in SOFTCAPS]
    return LogitChanges(scale, next((cap for cap in caps if cap), None), getattr(config, "unpadded_vocab_size", None))
