"""Finds the largest microbatch that fits into device memory by measuring the run's own pairs.

A step's memory is close to linear in the tokens of its microbatches and in the number of layers that recompute their
activations. So the probe runs rows of two sizes, first with no layer recomputing and, if that leaves too little memory,
with all of them, and interpolates.

If the longest pair still does not fit, layer inputs move to host memory, which saves exactly their size, and then MLPs
are computed in tiles, which is measured on rows of several tiles.
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from isopref.batch.packing import RowKind, tokens_alone
from isopref.batch.rows import build_microbatch
from isopref.data.table import ExampleTable
from isopref.errors import ConfigError, ModelError, shorter_pairs
from isopref.examples import Example
from isopref.models.parallel import GradSync, checkpoint_layers, device_of, gradient_sync, unwrap
from isopref.models.probe import check_tiles
from isopref.models.tiles import tile_mlps
from isopref.ops.memory import ran_out
from isopref.ranks import num_ranks
from isopref.types import IntArray, Microbatch

HEADROOM = 0.08  # of device memory: for fragmentation, and for differences between long and short rows
PROBE_TOKENS = 1024  # small: a row that does not fit ends the run, because FSDP and DDP cannot recover from it
LEAST_TOKENS = 8192  # a smaller microbatch leaves a GPU idle; recomputing some layers costs less
MOST_TOKENS = 24576  # a larger one is no faster
SHORTENED = 4096  # tokens: rows are measured on pairs of typical length, but no longer than this
TILE_TOKENS = 4096  # MLP tile that `auto` picks: large enough for matrix products at full speed
GIB = 2.0**30
SPREAD = "Spread the model over more GPUs (layout.parallel: fsdp, layout.grad_sync: every)"
RECOMPUTE = "recompute activations (layout.checkpointing: auto or full)"
FOR_LONG = "offload inputs and tile MLPs (layout.offload_activations and layout.mlp_tile_tokens: auto)"
SPLIT = "split rows over GPUs (layout.context_parallel), which works for most models"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepMemory:
    """Bytes of a step beyond weights and optimizer, as a line in the tokens of its microbatches."""

    fixed: float
    per_token: float

    @classmethod
    def through(cls, few: tuple[int, float], many: tuple[int, float]) -> "StepMemory":
        """The line through two measurements, each (tokens, bytes)."""
        slope = max(1.0, (many[1] - few[1]) / max(1, many[0] - few[0]))
        return cls(max(0.0, few[1] - slope * few[0]), slope)

    def at(self, tokens: int) -> float:
        return self.fixed + self.per_token * tokens

    def __str__(self) -> str:
        return f"{self.fixed / GIB:.1f} GiB and {1000 * self.per_token / GIB:.2f} GiB for every 1,000 tokens"


@dataclass(frozen=True)
class Fit:
    """Tokens per microbatch, the number of recomputing layers, why, and what a long pair needs beyond that."""

    tokens: int
    layers: int
    why: str
    offloaded: int = 0  # layers whose inputs are in host memory
    tile: int | None = None  # tokens of a tile of an MLP


@dataclass(frozen=True)
class LongRows:
    """What the run may do if a pair does not fit with all layers recomputing."""

    offload: bool
    tile: bool
    input_bytes: float  # of a layer's input, for each token
    host_room: float  # bytes of host memory for a rank

    def tiles(self, wanted: int, sharing: int) -> bool:
        """Whether tiles are worth trying: shorter rows gain little, and measuring would take rows that do not fit."""
        return self.tile and wanted >= 2 * TILE_TOKENS * sharing

    def most_offloaded(self, layers: int) -> int:
        """How many of the recomputing layers may offload: two inputs are on the device, one in use, one on its way."""
        return max(0, min(1, layers - 1), layers - 2) if self.offload else 0


NOTHING_MORE = LongRows(offload=False, tile=False, input_bytes=0.0, host_room=0.0)


def choose(
    measured: tuple[StepMemory, StepMemory],
    layers: tuple[int, int],
    room: float,
    *,
    longest: int,
    tokens: int | None = None,
    sharing: int = 1,
    tried: Sequence[str] = (),
) -> Fit:
    """The fewest recomputing layers with which a microbatch of enough tokens fits into `room` bytes.

    `measured` holds results for the fewest and the most `layers` recomputing. `longest` is the pair that must fit;
    `tokens` is a requested size. `sharing` is the number of ranks that split each row, and `tried` what else did not
    make a long pair fit. Raises ConfigError if nothing fits.
    """
    few, many = measured
    wanted = _wanted(longest, tokens, sharing)
    over, saved = few.at(wanted) - room, few.at(wanted) - many.at(wanted)
    share = 0.0 if over <= 0 else min(1.0, over / saved) if saved > 0 else 1.0
    # The first recomputing layer saves nothing: its backward pass holds everything that it did not keep, all at once.
    paying = max(0, layers[1] - layers[0] - 1)
    count = layers[0] if over <= 0 else min(layers[1], layers[0] + 1 + math.ceil(share * paying))
    share = max(0, count - layers[0] - 1) / paying if paying else float(count > layers[0])
    line = StepMemory(*(a + share * (b - a) for a, b in ((few.fixed, many.fixed), (few.per_token, many.per_token))))
    most = int((room - line.fixed) / line.per_token)
    if most < (tokens or longest):
        raise ConfigError(
            f"a microbatch of {tokens or longest} tokens does not fit into the {room / GIB:.1f} GiB that weights and "
            f"optimizer leave: a step takes {line}, with {count} layers recomputing. {_ways_out(count, tried)}"
            + (" Or set a smaller layout.microbatch_tokens." if tokens else "")
        )
    why = f"a step takes {line}; {room / GIB:.1f} GiB are free for it"
    return Fit(tokens or max(longest, min(most, MOST_TOKENS * sharing)), count, why)


def choose_for_long(
    recomputing: StepMemory,
    tiled: Callable[[], StepMemory | None],
    layers: int,
    room: float,
    allowed: LongRows,
    *,
    wanted: int,
    sharing: int = 1,
) -> tuple[Fit | None, list[str]]:
    """The fewest measures that make `wanted` tokens fit with all `layers` recomputing, and the measures tried.

    None if they do not fit. `recomputing` and `tiled`: a step's memory with MLPs computed at once and in tiles; None if
    a model cannot tile. Offloading comes first, because its copies overlap with compute.
    """
    most = allowed.most_offloaded(layers)
    tried = ["offloading layer inputs"] if most else []
    in_host = allowed.input_bytes * wanted  # for each layer
    for tile in (None, TILE_TOKENS) if allowed.tiles(wanted, sharing) else (None,):
        line = recomputing if tile is None else tiled()
        if line is None:
            break
        if tile is not None:
            tried.append("computing MLPs in tiles")
        over = line.at(wanted) - room
        count = 0 if over <= 0 else math.ceil(over / in_host) if in_host else layers
        if count <= most and count * in_host <= allowed.host_room:
            why = (
                f"a step takes {line}, with {layers} layers recomputing; {room / GIB:.1f} GiB are free for it, and "
                f"{count} layers leave {in_host / GIB:.2f} GiB each in host memory"
            )
            return Fit(wanted, layers, why, offloaded=count, tile=tile), tried
    return None, tried


def _ways_out(recomputing: int, tried: Sequence[str]) -> str:
    """What makes a microbatch fit, beyond what was tried."""
    not_enough = f"{' and '.join(tried)} does not free enough memory. " if tried else ""
    ways = [SPREAD, *([] if recomputing else [RECOMPUTE]), SPLIT if tried else FOR_LONG]
    return f"{not_enough[:1].upper()}{not_enough[1:]}{', '.join(ways)}, or shorten the pairs: {shorter_pairs()}"


def _wanted(longest: int, tokens: int | None, sharing: int) -> int:
    """Microbatch tokens worth recomputing layers for; larger microbatches are used only if they fit anyway."""
    return tokens or max(longest, LEAST_TOKENS * sharing)


def fit_microbatch(
    model: nn.Module,
    table: ExampleTable,
    kind: RowKind,
    *,
    grad_sync: GradSync,
    layers: tuple[int, int],
    tokens: int | None,
    state_share: float = 2.0,
    offload: bool = False,
    allowed: LongRows = NOTHING_MORE,
    compute_dtype: torch.dtype | None = None,
    say: Callable[[str], None] = log.info,
) -> Fit:
    """Measure on this device, choose (all ranks call this together and agree) and set up the recomputing layers.

    `layers`: the fewest and the most layers that may recompute. `state_share`: bytes of optimizer state per byte of
    trained weights; 2 for AdamW's averages. `offload`: all recomputing layers but the last keep their inputs in host
    memory. `allowed`: what else the run may do if the longest pair does not fit. `compute_dtype` bounds the rounding of
    MLPs in tiles. `say` prints why there are no tiles. All sizes are of complete rows, also where ranks split them.
    """
    device, sharing = device_of(model), _sharing(model)
    few = many = _measure(model, table, kind, grad_sync, layers[0], offload=offload)
    room = _least(_room(model, device, state_share), device)
    longest = int(tokens_alone(table.lengths, kind).max())
    if layers[0] < layers[1] and few.at(_wanted(longest, tokens, sharing)) > room:
        many = _measure(model, table, kind, grad_sync, layers[1], offload=offload)  # recompiles
    fit, tried = None, list[str]()
    if many.at(tokens or longest) > room:
        allowed = replace(allowed, host_room=_least(allowed.host_room, device))
        measure = partial(_measure, model, table, kind, grad_sync, layers[1], offload=offload)
        tiled = partial(_measure_tiled, model, kind, measure, tokens or longest, compute_dtype, say)
        fit, tried = choose_for_long(many, tiled, layers[1], room, allowed, wanted=tokens or longest, sharing=sharing)
    if fit is None:
        fit = choose((few, many), layers, room, longest=longest, tokens=tokens, sharing=sharing, tried=tried)
    if allowed.tile:
        tile_mlps(unwrap(model), fit.tile)
    checkpoint_layers(unwrap(model), fit.layers, offloaded=_offloaded(fit.layers) if offload else fit.offloaded)
    return fit


def _sharing(model: nn.Module) -> int:
    """The number of ranks that split each row."""
    context = unwrap(model).context
    return 1 if context is None else context.size


def _offloaded(layers: int) -> int:
    """How many recomputing layers offload: all but the last, whose input is needed again immediately."""
    return max(0, layers - 1)


def _measure_tiled(
    model: nn.Module,
    kind: RowKind,
    measure: Callable[..., StepMemory],
    wanted: int,
    compute_dtype: torch.dtype | None,
    say: Callable[[str], None],
) -> StepMemory | None:
    """Measure with MLPs in tiles, on rows of several tiles, but no longer than the one that must fit.

    None if the model's MLPs cannot be computed in tiles.
    """
    tile_mlps(unwrap(model), TILE_TOKENS)
    try:
        check_tiles(model, kind, compute_dtype=compute_dtype)
    except ModelError as error:
        tile_mlps(unwrap(model), None)
        say(f"layout.mlp_tile_tokens: auto is null: {error}")
        return None
    return measure(tokens=min(2 * TILE_TOKENS * _sharing(model), wanted // 2))  # the second row has twice as many


def _measure(
    model: nn.Module,
    table: ExampleTable,
    kind: RowKind,
    grad_sync: GradSync,
    layers: int,
    *,
    offload: bool = False,
    tokens: int | None = None,
) -> StepMemory:
    """Memory of rows with this many layers recomputing. Raises ConfigError if not even these small rows fit."""
    device = device_of(model)
    checkpoint_layers(unwrap(model), layers, offloaded=_offloaded(layers) if offload else 0)
    rows = _rows(table, kind, tokens or PROBE_TOKENS * _sharing(model))
    try:
        _peak(model, rows[0][1], grad_sync)  # compiles, which itself takes memory
        sizes = [(tokens, _peak(model, row, grad_sync)) for tokens, row in rows]
    except RuntimeError as error:
        if not ran_out(error):
            raise
        raise ConfigError(
            f"not even a microbatch of {rows[1][0]} tokens fits into this GPU's memory with {layers} layers "
            f"recomputing. {_ways_out(layers, ())}"
        ) from error
    return StepMemory.through(*((tokens, -_least(-peak, device)) for tokens, peak in sizes))


def _rows(table: ExampleTable, kind: RowKind, tokens: int) -> list[tuple[int, Microbatch]]:
    """Two rows of pairs of typical length, each with its token count; the second has twice the pairs."""
    alone = tokens_alone(table.lengths, kind)
    order = np.argsort(np.abs(alone - np.median(alone)), kind="stable")
    order = order[: (len(order) + 1) // 2]  # a small table is repeated without its longest examples
    count = max(1, int(tokens / min(SHORTENED, np.median(alone))))
    indices = [np.resize(order, pairs) for pairs in (count, 2 * count)]
    microbatches = [build_microbatch([_shortened(table.example(int(i))) for i in index], kind) for index in indices]
    return [(sum(one.input_ids.numel() for one in microbatch.passes), microbatch) for microbatch in microbatches]


def _shortened(example: Example) -> Example:
    """The example, thinned out to at most about SHORTENED tokens: a longer row may not fit.

    Tokens are left out evenly, and at the same positions of all answers, so that trained tokens and shared beginnings
    keep their share of the row. Cutting off the end would not: the last turn may be the only one that is trained, or
    the only difference between two answers.
    """
    share = SHORTENED / sum(len(part) for part in example.parts)
    if share >= 1:
        return example
    prompt, *answers = (part[_evenly(len(part), share)] for part in example.parts)
    weights = tuple(one[_evenly(len(one), share)] for one in example.weights)
    return example._replace(prompt=prompt, answers=tuple(answers), weights=weights)


def _evenly(length: int, share: float) -> IntArray:
    """This share of the indices below `length`, at least one. A smaller length gives a prefix of the same indices."""
    chosen: IntArray = np.flatnonzero(np.diff(np.floor(share * np.arange(length + 1))))
    return chosen if len(chosen) else np.arange(min(1, length))


def _peak(model: nn.Module, microbatch: Microbatch, grad_sync: GradSync) -> float:
    """Peak bytes of a step that runs this microbatch twice."""
    device = device_of(model)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    model.train()
    for last in (False, True):
        with gradient_sync(model, grad_sync, last=last):
            model(microbatch.to(device)).logp.sum().backward()
    peak = torch.cuda.max_memory_allocated(device) - before
    for parameter in model.parameters():
        parameter.grad = None
    return float(peak)


def _room(model: nn.Module, device: torch.device, state_share: float) -> float:
    """Bytes left for a step once the optimizer state of this rank's trained weights is allocated."""
    free, total = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    local = (p.to_local() if isinstance(p, DTensor) else p for p in model.parameters() if p.requires_grad)
    state = state_share * sum(p.numel() * p.element_size() for p in local if p.is_cuda)
    return free + cached - state - HEADROOM * total


def _least(value: float, device: torch.device) -> float:
    """The minimum over all ranks: every rank must split a batch in the same way."""
    if num_ranks() == 1:
        return value
    least = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return float(least)
