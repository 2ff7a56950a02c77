"""The layer that reads a model's last hidden states: the output head of a language model, the head of a reward model.

Transformers calls the former output embeddings; a model for sequence classification has none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import PreTrainedModel

if TYPE_CHECKING:
    from isopref.models.native import NativeModel  # OLMo-core takes seconds to import

REWARD_HEADS = ("score", "classifier")  # its names in transformers and peft


def head_of(model: PreTrainedModel | NativeModel) -> Any:
    """The head of either kind of model; None if it has none."""
    found = model.get_output_embeddings()
    name = None if found is not None else reward_head_name(model)
    return found if name is None else getattr(model, name)


def reward_head_name(model: PreTrainedModel | NativeModel) -> str | None:
    """The name of a reward model's head; None for a language model."""
    own: dict[str, Any] = dict(model.named_children())
    return next((name for name in REWARD_HEADS if isinstance(own.get(name), nn.Linear)), None)
