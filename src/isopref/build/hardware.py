"""Checks a config against its processes and devices, and resolves the precision a run computes in."""

import torch

from isopref.build.run import Run
from isopref.errors import ConfigError
from isopref.models.float8 import check_device, compute_in_float8
from isopref.models.parallel import check_shard
from isopref.models.policy import Policy
from isopref.ops import flash


def check_hardware(run: Run) -> None:
    """Raise ConfigError if the number of processes does not fit the layout, or the devices the precision."""
    layout, ranks = run.config.layout, run.env.world_size
    if layout.parallel == "single" and ranks > 1:
        raise ConfigError(
            f"layout.parallel: single, but {ranks} processes were started. Set layout.parallel: auto, or start one."
        )
    if layout.offload and run.env.device.type == "cpu":
        raise ConfigError("layout.offload: true has no effect on the CPU, which already uses host memory. Remove it.")
    for name in ("tensor_parallel", "context_parallel"):
        if ranks % getattr(layout, name):
            raise ConfigError(
                f"layout.{name}: {getattr(layout, name)} does not divide the number of processes, {ranks}. "
                f"Change --nproc or layout.{name}."
            )
    if layout.hsdp_shard is not None:
        tensor_parallel = layout.tensor_parallel
        check_shard(layout.hsdp_shard, ranks // tensor_parallel, tensor_parallel=tensor_parallel)
    if run.config.model.is_float8:
        check_device(run.env.device)


def say_attention(run: Run) -> None:
    """Tell the user about the attention kernels for their card."""
    model, rows = run.config.model, run.config.layout.rows
    half = model.pass_dtype == "bfloat16"
    if not (half and rows in ("shared", "packed") and flash.knows(run.env.device)):
        return
    kernels, fault = flash.load()
    if fault is not None:
        run.display.say(
            f"warning: the package flash-attn-4 is installed but cannot be imported ({fault}). Attention uses torch's "
            "own kernel, which is slower. Reinstall it: pip install 'isopref[flash]'; or remove it: pip uninstall "
            "flash-attn-4"
        )
    elif kernels is None:
        run.display.say("note: a faster attention kernel is available for this card. Try: pip install 'isopref[flash]'")


def use_float8(run: Run, policy: Policy, compiled: bool) -> None:
    """Make the policy's linear layers multiply in float8, and log how much of the model that covers."""
    count, every = compute_in_float8(policy.model), sum(weight.numel() for weight in policy.parameters())
    run.display.say(
        f"float8  {count:,} of {every:,} weights are in layers that multiply in float8 ({count / every:.0%})"
    )
    if not compiled:
        run.display.say(
            "warning: without compiled layers, float8 is slower than bfloat16: every cast is a kernel of its own. Use "
            "packed rows and layout.compile: null, or model.compute_dtype: bfloat16"
        )


def say_precision(run: Run) -> None:
    """Warn about unexpected effects of the chosen dtypes."""
    model, rows = run.config.model, run.config.layout.rows
    half = model.pass_dtype == "bfloat16"
    if run.env.device.type == "cuda" and rows in ("shared", "packed") and not half:
        run.display.say(
            "note: attention runs segment by segment, because the CUDA kernel supports only bfloat16. For speed, set "
            "model.compute_dtype: bfloat16"
        )
    if model.dtype == "bfloat16":
        run.display.say(
            "warning: with bfloat16 weights, small updates are rounded away (nearly all of them at learning rates like "
            "1e-6) and gradients accumulate in bfloat16. Safer: model.dtype: float32 with model.compute_dtype: bfloat16"
        )


def compute_dtype(run: Run) -> torch.dtype | None:
    """The dtype of the forward and backward pass, if it differs from the weights' dtype."""
    model = run.config.model
    return getattr(torch, model.pass_dtype) if model.is_mixed else None


def rounding_dtype(run: Run) -> torch.dtype | None:
    """The compute dtype, or float8 if products are rounded to it: sets how much two correct scores may differ."""
    return torch.float8_e4m3fn if run.config.model.is_float8 else compute_dtype(run)
