"""Randomness in a model's forward pass in training mode, which would depend on the layout: dropout and jitter."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import nn
from transformers import PreTrainedModel

if TYPE_CHECKING:
    from isopref.models.native import NativeModel


def disable_dropout(model: "PreTrainedModel | NativeModel") -> None:
    """Disable all dropout: layers, rates stored in modules, and rates read from the config.

    Dropout masks depend on a token's position in the row, so the gradient would depend on the layout. `own_rates`
    restores the rates.
    """
    rates: list[tuple[object, str, float]] = vars(model).setdefault("dropout_rates", [])
    for holder in (model.config.get_text_config(), *model.modules()):
        for name, rate in list(vars(holder).items()):
            is_rate = "drop" in name or (name == "p" and isinstance(holder, nn.Dropout))
            if is_rate and isinstance(rate, float) and rate:
                rates.append((holder, name, rate))
                setattr(holder, name, 0.0)


@contextmanager
def own_rates(model: PreTrainedModel) -> Iterator[None]:
    """Restore the model's original dropout rates while the context is open."""
    rates: list[tuple[object, str, float]] = vars(model).get("dropout_rates", [])
    for holder, name, rate in rates:
        setattr(holder, name, rate)
    try:
        yield
    finally:
        for holder, name, _ in rates:
            setattr(holder, name, 0.0)


def noisy_modules(model: "PreTrainedModel | NativeModel") -> list[nn.Module]:
    """Modules that add noise in training mode, such as the routers of Mixtral and Phi-MoE: those with a jitter.

    The jitter cannot simply be set to 0: Phi-MoE also uses it as a threshold in eval mode, and samples without it too.
    """
    return [module for module in model.modules() if any("jitter" in name for name in vars(module))]
