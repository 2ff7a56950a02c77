"""Layouts that fit, for a plan that does not: on the same GPUs if possible, or on more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from isopref.build.run_plan import Alternative
from isopref.cards import GIB
from isopref.config.schema import Config
from isopref.engine.microbatch_probe import LEAST_TOKENS, MOST_TOKENS
from isopref.plan.layout import Layout
from isopref.plan.together import tensor_sizes

if TYPE_CHECKING:
    from isopref.build.planner import Planner


def alternatives(planner: Planner) -> list[Alternative]:
    """Two layouts that fit on these GPUs, or one on the fewest additional GPUs."""
    given = planner.hardware.gpus
    for gpus in _more(given, planner.config.layout.ranks_together):
        for changed, other in _regrouped(planner, gpus):
            if found := list(_fitting(other, gpus, changed)):
                return found[: 2 if gpus == given else 1]
    return []


def _regrouped(planner: Planner, gpus: int) -> Iterator[tuple[list[str], Planner]]:
    """The planner itself, then with more ranks computing each layer, then with none doing so: those may split rows."""
    yield [], planner
    asked = planner.config.layout
    if asked.tensor_parallel == 1:
        return
    sizes = tensor_sizes(planner.shape, planner.hardware.network, gpus)
    for size in [*(n for n in sizes if n > asked.tensor_parallel), 1]:
        layout = asked.model_copy(update={"tensor_parallel": size})
        config = planner.config.model_copy(update={"layout": layout})
        yield [f"layout.tensor_parallel={size}"], replace(planner, config=config)


def _fitting(planner: Planner, gpus: int, regrouped: list[str]) -> Iterator[Alternative]:
    """Layouts that fit on this many GPUs: large rows, small rows, recomputation, and what long pairs need.

    Rows are split only if nothing else fits.
    """
    fits = False
    sharded, changed = _sharded(planner, gpus)
    more = [] if gpus == planner.hardware.gpus else [f"--gpus {gpus}"]
    for setting in planner.settings(sharded):
        layout = planner.with_setting(sharded, setting)
        if fits and layout.context > sharded.context:
            return
        for size in _sizes(planner, layout):
            run = planner.forecast(layout, size)
            if run.fits:
                fits = True
                asked = [f"layout.microbatch_tokens={size}", *_reset(planner.config, layout), *setting.overrides]
                overrides = " ".join(changed + regrouped + asked + more)
                yield Alternative(overrides, run.memory.total / GIB, run.examples_per_s)


def _reset(config: Config, layout: Layout) -> list[str]:
    """Overrides for what the config asks for and the layout does without."""
    found = []
    if config.layout.offload_activations == "full" and not layout.offloaded:
        found.append("layout.offload_activations=none")
    if isinstance(config.layout.mlp_tile_tokens, int) and layout.tile is None:
        found.append("layout.mlp_tile_tokens=null")
    return found


def _sizes(planner: Planner, layout: Layout) -> list[int]:
    """Tokens of a large and a small microbatch if they fit; else, if layers recompute, of the largest or a pair."""
    longest, most = planner.longest, planner.largest(layout)
    sizes = dict.fromkeys(max(size * layout.context, longest) for size in (MOST_TOKENS, LEAST_TOKENS))
    fitting = [size for size in sizes if size <= most]
    return fitting or ([max(longest, most)] if layout.recompute else [])


def _sharded(planner: Planner, gpus: int) -> tuple[Layout, list[str]]:
    """The layout that needs the least memory on this many GPUs, and the overrides for it."""
    config = planner.config
    if gpus == 1 and not config.model.is_mixed:
        return planner.layout(1), []
    layout = replace(planner.layout(gpus, "fsdp"), grad_sync="every")
    changed = ["layout.parallel=fsdp", "layout.grad_sync=every"]
    return layout, changed + (["layout.hsdp_shard=null"] if config.layout.hsdp_shard else [])


def _more(gpus: int, together: int) -> list[int]:
    """This many GPUs, then 8, 16, 32, ... if that is more and groups of `together` ranks divide it."""
    return [gpus, *(8 * 2**n for n in range(8) if 8 * 2**n > gpus and 8 * 2**n % together == 0)]
