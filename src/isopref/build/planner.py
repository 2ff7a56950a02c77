"""What a run would need on a given card, without using a GPU or reading weights."""

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Literal

import numpy as np

from isopref.batch.packing import Budget, RowKind, check_budget, tokens_alone
from isopref.build import plan_notes, resolve
from isopref.build.data import pair_tables, read_tokenizer
from isopref.build.lengths_file import read_lengths
from isopref.build.plan_alternatives import alternatives
from isopref.build.plan_shape import model_shape
from isopref.build.run import loss_of
from isopref.build.run_plan import Hardware, RunPlan
from isopref.cards import GIB
from isopref.config.schema import Config
from isopref.data import schedule
from isopref.data.table import ExampleTable
from isopref.engine.display import Display
from isopref.engine.microbatch_probe import (
    HEADROOM,
    LEAST_TOKENS,
    MOST_TOKENS,
    TILE_TOKENS,
    Fit,
    LongRows,
    StepMemory,
    choose,
    choose_for_long,
)
from isopref.errors import ConfigError
from isopref.examples import Lengths
from isopref.models.parallel import check_shard
from isopref.models.shape import ModelShape
from isopref.objectives.loss import Loss
from isopref.ops import flash
from isopref.ops.attention import Kernel, kernel_for
from isopref.plan.attention import NAMES
from isopref.plan.layout import Layout, Loads, step_loads
from isopref.plan.long_rows import Reach, Setting, settings
from isopref.plan.memory import NF4_BYTES, Memory, loading_memory, peak_memory
from isopref.plan.scale import Forecast, forecast
from isopref.plan.together import check_context, check_tensor, contexts
from isopref.types import IntArray

FORECAST_STEPS = 20  # spread over the first epoch
BYTES = {"float32": 4, "bfloat16": 2}


def make_plan(
    config: Config, hardware: Hardware, display: Display, *, lengths_file: Path | None = None, ranks: Sequence[int] = ()
) -> RunPlan:
    """Plan the run of a config. Reads the model's config and the data's lengths only. Raises UserError."""
    shape = model_shape(config, hardware)
    if lengths_file is not None:
        return Planner(config, hardware, shape, read_lengths(lengths_file)).plan(ranks)
    tokenizer = read_tokenizer(config, display)
    table = pair_tables(config, tokenizer, display).train
    return Planner(config, hardware, shape, table.lengths, table.unit).plan(ranks)


def reaches(config: Config, hardware: Hardware, table: ExampleTable) -> list[Reach]:
    """How long an example may be on that hardware, by setting, and how many are longer. Raises UserError."""
    return Planner(config, hardware, model_shape(config, hardware), table.lengths, table.unit).reaches()


@dataclass(frozen=True)
class Planner:
    """One config, card, model shape and table of lengths."""

    config: Config
    hardware: Hardware
    shape: ModelShape
    lengths: Lengths
    unit: str = "pair"  # what an example is called

    def plan(self, ranks: Sequence[int] = ()) -> RunPlan:
        layout, fit, why_not = self._settled(self.layout(self.hardware.gpus))
        run = self._settled_forecast(layout, fit, why_not)
        shared, packed = (int(tokens_alone(self.lengths, kind).sum()) for kind in ("shared", "packed"))
        steps = resolve.num_steps(self.config.optim, len(self.lengths))
        return RunPlan(
            parameters=self.shape.parameters,
            unit=self.unit,
            examples=len(self.lengths),
            steps=steps,
            saved_by_sharing=1 - shared / packed,
            microbatch_tokens=fit.tokens,
            largest_fit=self._largest_fit(layout, fit, run),
            recompute=layout.recompute,
            offloaded=layout.offloaded,
            tile=layout.tile,
            layers=self.shape.layers,
            grad_sync=layout.grad_sync,
            attention=NAMES[layout.kernel] if layout.rows in ("shared", "packed") else "the model's own",
            usable=self.usable,
            run=run,
            hours=steps * run.time.total / 3600 if run.fits else None,
            score_hours=self._score_hours(layout, run) if run.fits else None,
            notes=list(self._notes(layout, run, why_not)),
            alternatives=[] if run.fits else alternatives(self),
            reaches=self.reaches(layout),
            scale=[one for count in ranks for one in self._at(count)],
        )

    @property
    def usable(self) -> float:
        return (1 - HEADROOM) * self.hardware.card.memory

    @property
    def batches(self) -> list[Lengths]:
        """Lengths of some of the first epoch's global batches."""
        return [self.lengths.select(index) for index in self._batches]

    @cached_property
    def _batches(self) -> list[IntArray]:
        """The examples of those batches."""
        optim = self.config.optim
        order = schedule.epoch_order(len(self.lengths), seed=optim.seed, epoch=1)
        count = schedule.num_batches(len(self.lengths), optim.batch_size)
        # The last batch may be short, so it is used only if there is no other.
        numbers = np.unique(np.linspace(0, max(0, count - 2), FORECAST_STEPS).astype(int))
        return [schedule.batch(order, optim.batch_size, int(number)) for number in numbers]

    def forecast(self, layout: Layout, tokens: int) -> Forecast:
        return forecast(
            self.shape,
            layout,
            self.hardware.card,
            self.hardware.network,
            self.batches,
            self._budget(tokens),
            answers=len(self.lengths.answer),
            attention_share=resolve.attention_share(self.shape.width),
            room=self.usable,
        )

    @property
    def _shard_per_node(self) -> int:
        """Ranks of a machine that can share one copy of the weights, or of their part of them."""
        return self.hardware.network.every(self.config.layout.tensor_parallel).ranks_per_node

    def _budget(self, tokens: int) -> Budget:
        return Budget(self.config.layout.rows, tokens)

    @property
    def longest(self) -> int:
        return int(tokens_alone(self.lengths, self.config.layout.rows).max())

    def layout(self, ranks: int, parallel: Literal["fsdp", "hsdp"] | None = None) -> Layout:
        """The config's layout on this many ranks, with `auto` resolved."""
        model, asked = self.config.model, self.config.layout
        weight, compute = BYTES[model.dtype], BYTES[model.pass_dtype]
        quantised = model.adapter is not None and model.adapter.quantize is not None
        in_four_bits = self.shape.frozen_in_maps / max(1, self.shape.frozen_parameters) if quantised else 0.0
        frozen = in_four_bits * NF4_BYTES + (1 - in_four_bits) * (weight if model.adapter is None else compute)
        trained, rest = weight * self.shape.trained_parameters, frozen * self.shape.frozen_parameters
        whole, room = trained + rest, self.hardware.card.memory
        loss, references = loss_of(self.config), resolve.num_references(self.config)
        state = resolve.training_bytes(self.config, trained=trained, whole=whole)
        chosen = parallel or resolve.parallel(self.config, state, room, ranks=ranks)
        if chosen == "single" and ranks > 1:
            raise ConfigError(
                f"layout.parallel: single, but this is a plan for {ranks} GPUs. Set layout.parallel: auto."
            )
        sharded = chosen in ("fsdp", "hsdp")
        tensor = asked.tensor_parallel
        if tensor > 1:
            check_tensor(self.shape, tensor, self.hardware.network, ranks)
        check_context(self.shape, asked.context_parallel, ranks)
        averaging, node = ranks // tensor, self._shard_per_node
        shard = (
            check_shard(asked.hsdp_shard or node, averaging, tensor_parallel=tensor) if chosen == "hsdp" else averaging
        )
        kept = resolve.kept_whole(self.config, trained=trained, whole=whole) / tensor
        wrapped, balanced = self.shape.has_wrapped_parameters, bool(loss.balance_weight)
        can = resolve.can_compile(self.config, on_cuda=True, balanced=balanced, wrapped=wrapped)
        compiled = resolve.compiles(self.config, can=can, has_layers=self.shape.has_layers)
        spread = asked.offload or (sharded and ranks > 1)
        from_host = resolve.from_host(whole, room, sharded=spread and tensor == 1)
        return Layout(
            rows=asked.rows,
            parallel=chosen,
            ranks=ranks,
            shard=shard if sharded else 1,
            grad_sync=resolve.grad_sync(self.config, kept, room, sharded=sharded),
            compiled=can and compiled,
            kernel=self._kernel(compute),
            recompute=self.shape.layers if asked.checkpointing == "full" else 0,
            offloaded=self.shape.layers - 1 if asked.offload_activations == "full" else 0,
            tile=asked.mlp_tile_tokens if isinstance(asked.mlp_tile_tokens, int) else None,
            weight_bytes=weight,
            compute_bytes=compute,
            frozen_bytes=frozen,
            quantised=quantised,
            state_bytes=resolve.state_bytes(self.config.optim.kind, weight, in_matrices=self.shape.share_in_matrices),
            offload=asked.offload,
            from_host=from_host and not quantised,  # layers are quantised to 4 bits on the device, one by one
            references=references,
            float8=model.is_float8,
            forwards=references + first_pass(loss, self.lengths, asked.rows) * (1 + references),
            tensor=tensor,
            context=asked.context_parallel,
        )

    def _kernel(self, compute_bytes: int) -> Kernel:
        """The attention kernel that the card would run, with what is installed here."""
        newer = flash.covers(self.hardware.card.capability) and flash.load().kernels is not None
        heads = (self.shape.head_width, self.shape.value_width)
        return kernel_for(*heads, half=compute_bytes == 2, softcap=self.shape.softcap, newer=newer)

    def _score_hours(self, layout: Layout, run: Forecast) -> float:
        """Hours to score the training examples with a fixed reference before the first step."""
        if layout.references or not loss_of(self.config).needs_reference:
            return 0.0
        forward = run.time.forward * 3 / (3 + layout.forwards)
        return len(self.lengths) / run.batch_size * forward / 3600

    def _settled(self, layout: Layout) -> tuple[Layout, Fit, str | None]:
        """The layout with the recomputing layers and the microbatch that the run would choose; or why nothing fits."""
        asked = self.config.layout
        tokens = None if asked.microbatch_tokens == "auto" else asked.microbatch_tokens
        if tokens is not None:
            check_budget(self.lengths, self._budget(tokens), setting="layout.microbatch_tokens")
        if tokens is not None and asked.checkpointing != "auto":
            return layout, Fit(tokens, layout.recompute, ""), None
        most = self.shape.layers if asked.checkpointing == "auto" else layout.recompute
        fewest, layout = layout.recompute, replace(layout, recompute=most)
        lines = self._line(replace(layout, recompute=fewest)), self._line(layout)
        wanted, room, allowed = tokens or self.longest, self._room(layout), self._allowed(layout)
        try:
            if room <= 0:
                raise ConfigError(f"weights and optimizer alone take {(self.usable - room) / GIB:.1f} GiB.")
            fit, tried = None, list[str]()
            if lines[1].at(wanted) > room:
                tiled = partial(self._line, replace(layout, tile=TILE_TOKENS))
                sharing = layout.context
                fit, tried = choose_for_long(lines[1], tiled, most, room, allowed, wanted=wanted, sharing=sharing)
            if fit is None:
                fit = choose(
                    lines,
                    (fewest, most),
                    room,
                    longest=self.longest,
                    tokens=tokens,
                    sharing=layout.context,
                    tried=tried,
                )
        except ConfigError as error:  # show what it takes with all that `auto` may do
            offloaded = allowed.most_offloaded(most) or layout.offloaded
            tile = TILE_TOKENS if allowed.tiles(wanted, layout.context) else layout.tile
            fit = Fit(tokens or max(self.longest, LEAST_TOKENS * layout.context), most, "")
            return replace(layout, offloaded=offloaded, tile=tile), fit, str(error)
        offloaded, tile = fit.offloaded or layout.offloaded, fit.tile or layout.tile
        return replace(layout, recompute=fit.layers, offloaded=offloaded, tile=tile), fit, None

    def _allowed(self, layout: Layout) -> LongRows:
        """What `auto` may do for pairs that would not fit otherwise."""
        return LongRows(
            offload=self.config.layout.offload_activations == "auto" and self.shape.can_offload,
            tile=self._may_tile,
            input_bytes=self.shape.width * layout.compute_bytes / layout.context,
            host_room=math.inf,  # not known here; a note says how much is needed
        )

    def _memory(self, layout: Layout, tokens: int) -> Memory:
        return peak_memory(self.shape, layout, self._usual.scaled(tokens), answers=len(self.lengths.answer))

    @cached_property
    def _usual(self) -> Loads:
        """All batches as one microbatch."""
        budget = self._budget(max(MOST_TOKENS, self.longest))
        every = self.lengths.select(np.concatenate(self._batches))
        windows = self.shape.flops.windows
        return step_loads(every, budget, ranks=1, attention_share=0.0, windows=windows).summed

    def _line(self, layout: Layout) -> StepMemory:
        """A step's memory as a line in its tokens.

        Between its ends, the line overestimates: parts peak at different times, and only the largest counts.
        """
        least, most = LEAST_TOKENS * layout.context, max(MOST_TOKENS * layout.context, self.longest)
        few, many = (self._memory(layout, tokens).of_step for tokens in (least, most))
        return StepMemory.through((least, few), (most, many))

    def _room(self, layout: Layout) -> float:
        fixed = self._memory(layout, LEAST_TOKENS)
        return self.usable - fixed.weights - fixed.optimizer - fixed.cache

    def settings(self, layout: Layout) -> list[Setting]:
        tile = TILE_TOKENS if self._may_tile else None
        return settings(self.shape, tile, contexts(self.shape, layout))

    @property
    def _may_tile(self) -> bool:
        return resolve.may_tile(self.config) and self.shape.can_tile

    def with_setting(self, layout: Layout, setting: Setting) -> Layout:
        """The layout with a setting; null does not compile layers of ranks that split rows."""
        changed = replace(layout, **setting.changes)
        compiled = changed.compiled and (changed.context == 1 or self.config.layout.compile is True)
        return replace(changed, compiled=compiled)

    def reaches(self, layout: Layout | None = None) -> list[Reach]:
        """How long an example may be with each setting, and how many are longer."""
        asked = layout or self.layout(self.hardware.gpus)
        alone = tokens_alone(self.lengths, asked.rows)
        found = []
        for setting in self.settings(asked):
            most = self.largest(self.with_setting(asked, setting))
            found.append(Reach(" ".join(setting.overrides), most, int((alone > most).sum())))
        return found

    def largest(self, layout: Layout) -> int:
        """Tokens in the largest microbatch that fits; 0 if none does."""
        if loading_memory(self.shape, layout) > self.usable:
            return 0
        return bisect_right(range(1, 2**32), self.usable, key=lambda tokens: self._memory(layout, tokens).total)

    def _largest_fit(self, layout: Layout, fit: Fit, run: Forecast) -> int:
        """Tokens of the largest microbatch that fits: by the run's linear fit or by the plan, whichever allows more."""
        known = (fit.tokens if fit.why else int(run.largest_tokens)) if run.fits else 0
        return max(known, self.largest(layout))

    def _notes(self, layout: Layout, run: Forecast, why_not: str | None) -> Iterator[str]:
        if why_not is None and run.loading > self.usable:
            why_not = f"loading the model alone takes {run.loading / GIB:.1f} GiB of a rank."
        if why_not is not None:
            yield from plan_notes.way_out(self.config, layout, why_not)
        yield from plan_notes.host_memory(self.hardware, self.shape, layout, run)
        yield from plan_notes.left_out(self.config, layout)
        yield from plan_notes.kernels(self.hardware, self.shape, layout)
        batch_size = self.config.optim.batch_size
        if (idle := layout.groups - batch_size) > 0:
            who = "ranks" if layout.together == 1 else f"groups of {layout.together} ranks"
            yield f"{layout.groups} {who} share {batch_size} {self.unit}s a step; {idle} or more stay idle"

    def _at(self, ranks: int) -> Iterator[Forecast]:
        """The run on this many ranks: as configured, and also with the other kind of sharding if possible."""
        layout = self.layout(ranks)
        others: tuple[Literal["fsdp", "hsdp"], ...] = ("fsdp", "hsdp")
        node = self.config.layout.hsdp_shard or self._shard_per_node
        yield self._settled_forecast(*self._settled(layout))
        for other in others:
            if other != layout.parallel and layout.averaging > node > 1 and layout.averaging % node == 0:
                yield self._settled_forecast(*self._settled(self.layout(ranks, other)))

    def _settled_forecast(self, layout: Layout, fit: Fit, why_not: str | None) -> Forecast:
        found = self.forecast(layout, fit.tokens)
        return found if why_not is None else replace(found, fits=False)


def first_pass(loss: Loss, lengths: Lengths, rows: RowKind) -> float:
    """Tokens scored before the pass with gradients, per token of the batch in rows of this kind."""
    matched = int(tokens_alone(lengths, rows).sum())
    mismatched = int(lengths.prompt.sum() + lengths.answer.mean() * len(lengths))
    return loss.scores_twice + loss.needs_mismatched * mismatched / matched
