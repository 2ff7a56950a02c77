"""Settings that make room for longer examples, from the fastest to the one that takes the least memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


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


def settings(layers: int, tile: int | None, contexts: Sequence[int] = ()) -> list[Setting]:
    """The settings for a model of `layers` layers. `tile`: tokens of an MLP tile; None if it cannot be tiled.

    `contexts`: numbers of ranks that could split a row, in increasing order.
    """
    full, offload = "layout.checkpointing=full", "layout.offload_activations=full"
    kept = {"recompute": 0, "offloaded": 0, "tile": None}
    offloaded = {"recompute": layers, "offloaded": layers - 1}
    found = [
        Setting(("layout.checkpointing=none",), kept),
        Setting((full,), {**kept, "recompute": layers}),
        Setting((full, offload), {**kept, **offloaded}),
    ]
    if tile is not None:
        found.append(Setting((full, offload, f"layout.mlp_tile_tokens={tile}"), {**offloaded, "tile": tile}))
    most = found[-1]
    for size in contexts:
        found.append(Setting((*most.overrides, f"layout.context_parallel={size}"), {**most.changes, "context": size}))
    return found
