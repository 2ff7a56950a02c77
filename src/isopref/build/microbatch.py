"""Resolves `auto` in the layout once the model is on its device, and logs the choices."""

import logging
import os
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from isopref.batch.packing import Budget, check_budget, tokens_alone
from isopref.build import resolve
from isopref.build.hardware import rounding_dtype
from isopref.build.run import Run
from isopref.data.table import ExampleTable
from isopref.engine.microbatch_probe import LongRows, fit_microbatch
from isopref.errors import ConfigError
from isopref.models.adapter import stored_bytes
from isopref.models.parallel import (
    GradSync,
    can_offload,
    checkpoint_layers,
    decoder_layers,
    has_layers,
    unwrap,
)
from isopref.models.policy import Policy
from isopref.models.tiles import can_tile

CPU_TOKENS = 4096
HOST_SHARE = 0.85  # share of free host memory that activation checkpoints may take

log = logging.getLogger(__name__)


def check_train_budget(run: Run, table: ExampleTable) -> None:
    """Raise ConfigError early if a pair is longer than the requested microbatch."""
    layout = run.config.layout
    if layout.microbatch_tokens != "auto":
        budget = Budget(layout.rows, layout.microbatch_tokens)
        check_budget(table.lengths, budget, setting="layout.microbatch_tokens", name=table.origin)


def settle_layout(run: Run, model: nn.Module, table: ExampleTable) -> Run:
    """Decide when to reduce gradients, how many layers recompute, and how many tokens a microbatch has."""
    layout, policy = run.config.layout, unwrap(model)
    run = replace(run, grad_sync=_grad_sync(run, model))
    tokens = None if layout.microbatch_tokens == "auto" else layout.microbatch_tokens
    on_cpu = run.env.device.type == "cpu"
    may_recompute = layout.checkpointing == "auto" and not on_cpu and has_layers(policy)
    recompute = layout.checkpointing == "full" or may_recompute
    every = len(decoder_layers(policy, "Set layout.checkpointing: none.")) if recompute else 0
    fewest = every if layout.checkpointing == "full" else 0
    offload = layout.offload_activations == "full"
    offloaded = max(0, fewest - 1) if offload else 0
    if on_cpu:
        checkpoint_layers(policy, fewest, offloaded=offloaded)
        longest = int(tokens_alone(table.lengths, layout.rows).max())
        if tokens is None:
            tokens = max(CPU_TOKENS, longest)
            log.info("layout.microbatch_tokens: auto is %d on the CPU", tokens)
        return replace(run, microbatch_tokens=tokens)
    if tokens is not None and layout.checkpointing != "auto":
        _check_host(run, policy, tokens, offloaded)
        checkpoint_layers(policy, fewest, offloaded=offloaded)
        return replace(run, microbatch_tokens=tokens)
    weight = getattr(torch, run.config.model.dtype).itemsize
    fit = fit_microbatch(
        model,
        table,
        layout.rows,
        grad_sync=run.grad_sync,
        layers=(fewest, every),
        tokens=tokens,
        state_share=resolve.state_bytes(run.config.optim.kind, weight) / weight,
        offload=offload,
        allowed=_allowed(run, policy),
        compute_dtype=rounding_dtype(run),
        say=run.display.say,
    )
    _check_host(run, policy, fit.tokens, offloaded)
    if tokens is None:
        run.display.say(f"layout.microbatch_tokens: auto is {fit.tokens}: {fit.why}")
    if layout.checkpointing == "auto":
        run.display.say(f"layout.checkpointing: auto is {fit.layers} of {every} layers")
    if fit.offloaded or fit.tile is not None:
        run.display.say(
            f"layout.offload_activations: auto is {fit.offloaded} of {every} layers, layout.mlp_tile_tokens: auto is "
            f"{fit.tile or 'null'}: otherwise a microbatch of {fit.tokens} tokens would not fit"
        )
    return replace(run, microbatch_tokens=fit.tokens)


def _allowed(run: Run, policy: Policy) -> LongRows:
    """What `auto` may do for pairs that would not fit otherwise."""
    return LongRows(
        offload=run.config.layout.offload_activations == "auto" and can_offload(policy),
        tile=resolve.may_tile(run.config) and can_tile(policy),
        input_bytes=_input_bytes(run, policy),
        host_room=host_room(),
    )


def _input_bytes(run: Run, policy: Policy) -> int:
    """Bytes per token of a layer's input on this rank: ranks that work on the same pairs share its tokens."""
    width: int = policy.model.config.get_text_config().hidden_size
    dtype: torch.dtype = getattr(torch, run.config.model.pass_dtype)
    return width * dtype.itemsize // run.config.layout.ranks_together


def _check_host(run: Run, policy: Policy, tokens: int, layers: int) -> None:
    """Raise ConfigError if the inputs of this many layers do not fit into host memory."""
    size, room = layers * tokens * _input_bytes(run, policy), host_room()
    if size > room:
        raise ConfigError(
            f"layout.offload_activations: full needs {size / 2**30:.1f} GiB of host memory for microbatches of "
            f"{tokens} tokens, but only {room / 2**30:.1f} GiB are free for a rank. Set layout.offload_activations: "
            "auto, or a smaller layout.microbatch_tokens."
        )


def host_room() -> float:
    """Bytes of host memory that this rank may page-lock: its share of what is free, less a reserve."""
    about = Path("/proc/meminfo")
    if not about.exists():  # Linux only
        return 0.0
    lines = about.read_text().splitlines()
    free = next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    group = Path("/sys/fs/cgroup")  # a container's limit, which may be lower than the machine's memory
    try:
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        free = min(free, limit - used)
    except (OSError, ValueError):  # no container, or no limit
        pass
    return HOST_SHARE * free / int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def _grad_sync(run: Run, model: nn.Module) -> GradSync:
    """When to reduce gradients; logged if `auto` chose."""
    config = run.config
    what = "gradient" if config.model.adapter is None else "model"
    whole = sum(stored_bytes(parameter) for parameter in model.parameters())
    trained = sum(stored_bytes(parameter) for parameter in model.parameters() if parameter.requires_grad)
    kept = resolve.kept_whole(config, trained=trained, whole=whole) / config.layout.tensor_parallel
    room = device_memory(run.env.device)
    sharded = isinstance(model, FSDPModule)
    chosen = resolve.grad_sync(config, kept, room, sharded=sharded)
    if sharded and config.layout.grad_sync == "auto":
        run.display.say(
            f"layout.grad_sync: auto is {chosen}: the full {what} takes {kept / 2**30:.1f} of {room / 2**30:.0f} GiB"
        )
    return chosen


def device_memory(device: torch.device) -> int:
    """Bytes of memory per rank."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
