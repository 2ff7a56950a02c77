"""Linear layers that multiply in float8, by torchao: about a quarter faster on Hopper GPUs and newer.

Every token and every output row of a weight has its own scale, so the product of a token does not depend on what else
is in the batch, and the layout cannot change it. (One scale per tensor would be faster still, but would depend on how
the batch is split.) Weight gradients are computed in the compute dtype. Weights keep their dtype: layers cast them for
each product, so sharding, checkpoints and export are unaware of float8.
"""

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from isopref import optional
from isopref.errors import ConfigError
from isopref.models.parts import decoder_of
from isopref.models.unused import is_inside, without_gradient

RECIPE = "rowwise_with_gw_hp"
CAPABILITY = (9, 0)  # Hopper: the first generation with kernels for one scale per row
MULTIPLE = 16  # of both sides of a matrix, for those kernels
ROUTERS = ("router", "gate")  # parts of their names; routers choose experts by small differences
ADAPTERS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector")


def check_device(device: torch.device) -> None:
    """Raise ConfigError if the GPU has no float8 kernels or torchao is missing."""
    if device.type != "cuda":
        raise ConfigError(
            f"model.compute_dtype: float8 needs an NVIDIA GPU of the Hopper generation or newer, and this run is on "
            f"the {device.type}. Use bfloat16 or float32."
        )
    found = torch.cuda.get_device_capability(device)
    if found < CAPABILITY:
        raise ConfigError(
            f"model.compute_dtype: float8 needs an NVIDIA GPU of the Hopper generation or newer (compute capability "
            f"{'.'.join(map(str, CAPABILITY))}), and {torch.cuda.get_device_name(device)} has "
            f"{'.'.join(map(str, found))}. Use bfloat16."
        )
    _torchao()


def compute_in_float8(model: PreTrainedModel, *, emulate: bool = False) -> int:
    """Make the decoder's linear layers multiply in float8. Returns how many weights they hold. Raises ConfigError.

    An adapter must already be in place: its own matrices keep the compute dtype, the frozen layers under it do not.
    `emulate` rounds to float8 and multiplies in float32, on any device: for tests.
    """
    chosen = {id(layer): layer.weight.numel() for layer in float8_layers(model)}
    if not chosen:
        raise ConfigError(
            f"model.compute_dtype: float8 has no effect on {type(model).__name__}: its decoder has no linear layer "
            f"whose widths are multiples of {MULTIPLE}. Use bfloat16."
        )
    torchao = _torchao()
    recipe = torchao.Float8LinearConfig.from_recipe_name(RECIPE)
    torchao.convert_to_float8_training(
        model,
        config=replace(recipe, emulate=emulate),
        module_filter_fn=lambda layer, _name: id(layer) in chosen,
    )
    return sum(chosen.values())


def float8_layers(model: PreTrainedModel) -> Iterator[nn.Linear]:
    """The decoder's plain linear layers, without the head, routers, adapter matrices and parts that text does not use.

    A subclass of nn.Linear may compute something else, so it is left alone.
    """
    parts = without_gradient(model)
    inside = {id(module) for module in decoder_of(model).modules()}
    for name, layer in model.named_modules():
        names = name.split(".")
        fits = type(layer) is nn.Linear and not (layer.in_features % MULTIPLE or layer.out_features % MULTIPLE)
        special = any(part in (*ROUTERS, *ADAPTERS) for part in names) or is_inside(name, parts)
        if fits and id(layer) in inside and not special and not _in_router(model, names):
            assert isinstance(layer, nn.Linear)
            yield layer


def _in_router(model: nn.Module, names: list[str]) -> bool:
    """Whether a module, or one that contains it, has a router's class name."""
    parents = (model.get_submodule(".".join(names[:count])) for count in range(1, len(names)))
    return any("Router" in type(parent).__name__ for parent in parents)


def _torchao() -> Any:
    logging.getLogger("torchao").setLevel(logging.ERROR)  # it warns of missing kernels, which are not used here
    return optional.require("torchao.float8", extra="adapters", why="model.compute_dtype is float8")
