"""Resolves `auto` in the layout once the model is on its device, and logs the choices."""

import logging
import os
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from isopref.batch.packing import Budget, check_budget, tokens_alone
from isopref.build import resolve
from isopref.build.run import Run
from isopref.data.table import ExampleTable
from isopref.engine.microbatch_probe import fit_microbatch
from isopref.models.adapter import stored_bytes
from isopref.models.parallel import GradSync, checkpoint_layers, decoder_layers, has_layers, unwrap

CPU_TOKENS = 4096

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
    if on_cpu:
        checkpoint_layers(policy, fewest)
        longest = int(tokens_alone(table.lengths, layout.rows).max())
        if tokens is None:
            tokens = max(CPU_TOKENS, longest)
            log.info("layout.microbatch_tokens: auto is %d on the CPU", tokens)
        return replace(run, microbatch_tokens=tokens)
    if tokens is not None and layout.checkpointing != "auto":
        checkpoint_layers(policy, fewest)
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
    )
    if tokens is None:
        run.display.say(f"layout.microbatch_tokens: auto is {fit.tokens}: {fit.why}")
    if layout.checkpointing == "auto":
        run.display.say(f"layout.checkpointing: auto is {fit.layers} of {every} layers")
    return replace(run, microbatch_tokens=fit.tokens)


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
            f"layout.grad_sync: auto is {chosen}: the whole {what} takes {kept / 2**30:.1f} of {room / 2**30:.0f} GiB"
        )
    return chosen


def device_memory(device: torch.device) -> int:
    """Bytes of memory per rank."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
