"""How large a microbatch the device's memory takes: measured on the run's own pairs, not guessed.

What a step takes is near enough a line in the tokens of its microbatches, and a line in the number of layers that
recompute their activations. So rows of two sizes are run, with no layer recomputing and, where that leaves too little
room, with all; the rest follows.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from isopref.batch.packing import RowKind, tokens_alone
from isopref.batch.rows import build_microbatch
from isopref.data.table import ExampleTable
from isopref.engine.oom_retry import ran_out
from isopref.errors import ConfigError, shorter_pairs
from isopref.models.parallel import GradSync, checkpoint_layers, device_of, gradient_sync, unwrap
from isopref.ranks import num_ranks
from isopref.types import Microbatch

HEADROOM = 0.08  # of the device's memory: for fragments, and for what a long row does otherwise than a short one
PROBE_TOKENS = 1024  # small: a row that does not fit ends the run, for FSDP and DDP do not survive it
LEAST_TOKENS = 8192  # a smaller microbatch leaves a GPU idle; recomputing some layers costs less
MOST_TOKENS = 24576  # a larger one is no faster
GIB = 2.0**30
WAYS_OUT = (
    "Spread the model over more GPUs (layout.parallel: fsdp, layout.grad_sync: every), recompute activations "
    f"(layout.checkpointing: auto or full), or shorten the pairs: {shorter_pairs()}"
)


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
    """Tokens of a microbatch, and how many layers recompute, with the reason."""

    tokens: int
    layers: int
    why: str


def choose(
    measured: tuple[StepMemory, StepMemory],
    layers: tuple[int, int],
    room: float,
    *,
    longest: int,
    tokens: int | None = None,
) -> Fit:
    """The fewest recomputing layers with which a microbatch of enough tokens fits into `room` bytes.

    `measured` is with the fewest and the most `layers` recomputing. `longest` is the pair that must fit; `tokens` is a
    size that was asked for. Raises ConfigError where nothing fits.
    """
    few, many = measured
    wanted = _wanted(longest, tokens)
    over, saved = few.at(wanted) - room, few.at(wanted) - many.at(wanted)
    share = 0.0 if over <= 0 else min(1.0, over / saved) if saved > 0 else 1.0
    count = layers[0] + math.ceil(share * (layers[1] - layers[0]))
    share = (count - layers[0]) / max(1, layers[1] - layers[0])
    line = StepMemory(*(a + share * (b - a) for a, b in ((few.fixed, many.fixed), (few.per_token, many.per_token))))
    most = int((room - line.fixed) / line.per_token)
    if most < (tokens or longest):
        raise ConfigError(
            f"a microbatch of {tokens or longest} tokens does not fit into the {room / GIB:.1f} GiB that weights and "
            f"optimizer leave: a step takes {line}, with {count} layers recomputing. {WAYS_OUT}"
            + (" Or set a smaller layout.microbatch_tokens." if tokens else "")
        )
    why = f"a step takes {line}; {room / GIB:.1f} GiB are free for it"
    return Fit(tokens or max(longest, min(most, MOST_TOKENS)), count, why)


def _wanted(longest: int, tokens: int | None) -> int:
    """Tokens of a microbatch for which layers may recompute; more is welcome, but not for that."""
    return tokens or max(longest, LEAST_TOKENS)


def fit_microbatch(
    model: nn.Module,
    table: ExampleTable,
    kind: RowKind,
    *,
    grad_sync: GradSync,
    layers: tuple[int, int],
    tokens: int | None,
    state_share: float = 2.0,
) -> Fit:
    """Measure on this device, choose (the same on all ranks, who call this together) and set the layers that recompute.

    `layers`: the fewest and the most layers that may recompute. `state_share`: bytes of the optimizer for each byte of
    what is trained; 2 are AdamW's averages.
    """
    device = device_of(model)
    few = many = _measure(model, table, kind, grad_sync, layers[0])
    room = _least(_room(model, device, state_share), device)
    longest = int(tokens_alone(table.lengths, kind).max())
    if layers[0] < layers[1] and few.at(_wanted(longest, tokens)) > room:
        many = _measure(model, table, kind, grad_sync, layers[1])  # compiles once more
    fit = choose((few, many), layers, room, longest=longest, tokens=tokens)
    checkpoint_layers(unwrap(model), fit.layers)
    return fit


def _measure(model: nn.Module, table: ExampleTable, kind: RowKind, grad_sync: GradSync, layers: int) -> StepMemory:
    """What rows take with so many layers recomputing. Raises ConfigError where not even these small ones fit."""
    device = device_of(model)
    checkpoint_layers(unwrap(model), layers)
    rows = _rows(table, kind)
    try:
        _peak(model, rows[0][1], grad_sync)  # compiles, which takes memory of its own
        sizes = [(tokens, _peak(model, row, grad_sync)) for tokens, row in rows]
    except RuntimeError as error:
        if not ran_out(error):
            raise
        raise ConfigError(
            f"not even a microbatch of {rows[1][0]} tokens fits into this GPU's memory with {layers} layers "
            f"recomputing. {WAYS_OUT}"
        ) from error
    return StepMemory.through(*((tokens, -_least(-peak, device)) for tokens, peak in sizes))


def _rows(table: ExampleTable, kind: RowKind) -> list[tuple[int, Microbatch]]:
    """Two rows of pairs of usual length, the second with twice the pairs, each with its tokens."""
    alone = tokens_alone(table.lengths, kind)
    order = np.argsort(np.abs(alone - np.median(alone)), kind="stable")
    count = max(1, int(PROBE_TOKENS / np.median(alone)))
    indices = [np.resize(order, pairs) for pairs in (count, 2 * count)]
    microbatches = [build_microbatch([table.example(int(i)) for i in index], kind) for index in indices]
    return [(sum(one.input_ids.numel() for one in microbatch.passes), microbatch) for microbatch in microbatches]


def _peak(model: nn.Module, microbatch: Microbatch, grad_sync: GradSync) -> float:
    """Bytes that a step of two such microbatches takes at its peak."""
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
    """Bytes left for a step once the optimizer has its state of what is trained here."""
    free, total = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    local = (p.to_local() if isinstance(p, DTensor) else p for p in model.parameters() if p.requires_grad)
    state = state_share * sum(p.numel() * p.element_size() for p in local if p.is_cuda)
    return free + cached - state - HEADROOM * total


def _least(value: float, device: torch.device) -> float:
    """The smallest of all ranks' values: every rank must cut a batch the same way."""
    if num_ranks() == 1:
        return value
    least = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return float(least)
