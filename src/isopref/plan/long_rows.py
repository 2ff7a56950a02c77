"""Settings that make room for longer examples, from the fastest to the one that takes the least memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from isopref.models.shape import ModelShape


@dataclass(frozen=True)
class Setting:
    """Config overrides, and the equivalent changes to a `Layout`."""

    overrides: tuple[str, ...]
    changes: dict[str, Any]


@dataclass(frozen=True)
class Reach:
    """The longest example that fits with a setting."""

    overrides: str
    tokens: int  # of the longest example that fits, alone in its row; 0 if none does
    too_long: int  # examples that are longer


def settings(shape: ModelShape, tile: int | None, contexts: Sequence[int] = ()) -> list[Setting]:
    """The settings for a model. `tile`: tokens of an MLP tile; None if it cannot be tiled.

    `contexts`: numbers of ranks that could split a row, in increasing order.
    """
    found = [Setting(("layout.checkpointing=none",), {"recompute": 0, "offloaded": 0, "tile": None})]
    if shape.has_layers:
        found.append(Setting(("layout.checkpointing=full",), {**found[0].changes, "recompute": shape.layers}))
    if shape.has_layers and shape.can_offload:
        found.append(_and(found[-1], "layout.offload_activations=full", offloaded=shape.layers - 1))
    if shape.has_layers and tile is not None:
        found.append(_and(found[-1], f"layout.mlp_tile_tokens={tile}", tile=tile))
    most = found[-1]
    return [*found, *(_and(most, f"layout.context_parallel={size}", context=size) for size in contexts)]


def _and(before: Setting, override: str, **changes: Any) -> Setting:
    return Setting((*before.overrides, override), {**before.changes, **changes})
