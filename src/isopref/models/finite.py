"""Finds weights that contain NaN or Inf, sharded or not, on the device they are on, before anything uses them."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from isopref.errors import ModelError
from isopref.ranks import num_ranks


def check_finite(model: nn.Module, name: str) -> None:
    """Raise ModelError if a weight is NaN or Inf. All ranks call this together; each checks its own shards.

    `name` is what the model is called in the message.
    """
    if bad := bad_weights(model):
        raise ModelError(
            f"{name}: the weights contain NaN or Inf, in {some_of(bad)}. The files are damaged, or training had "
            "diverged before they were written. Download the model again, or use an earlier checkpoint."
        )


def bad_weights(model: nn.Module, *, trained_only: bool = False) -> list[str]:
    """Names of parameters and buffers with NaN or Inf on any rank. One pass over memory; waits for the device."""
    named: list[tuple[str, Tensor]] = [
        (name, one) for name, one in model.named_parameters() if one.requires_grad or not trained_only
    ]
    if not trained_only:
        named += [(name, one) for name, one in model.named_buffers() if one.is_floating_point()]
    device = named[0][1].device
    bad = torch.stack([_is_bad(parameter.detach()).to(device) for _, parameter in named]).int()
    if num_ranks() > 1:
        dist.all_reduce(bad, dist.ReduceOp.MAX)
    return [name for (name, _), is_bad in zip(named, bad.tolist(), strict=True) if is_bad]


def some_of(names: Sequence[str]) -> str:
    """The first of these tensors, and how many more there are."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more tensors"


def _is_bad(tensor: Tensor) -> Tensor:
    """Whether a tensor, or this rank's shard of it, contains NaN or Inf; the result stays on its device."""
    if isinstance(tensor, DTensor):
        return _is_bad(tensor.to_local())
    if hasattr(tensor, "__tensor_flatten__"):  # in four bits: the scales are floating-point numbers
        parts, _ = tensor.__tensor_flatten__()
        return torch.stack([_is_bad(getattr(tensor, part)) for part in parts]).any()
    if not tensor.is_floating_point() or not tensor.numel():
        return torch.zeros((), dtype=torch.bool, device=tensor.device)
    # Both are NaN if any number is. Ten times as fast as isfinite, and it takes no memory.
    lowest, highest = tensor.aminmax()
    return ~(lowest.isfinite() & highest.isfinite())
