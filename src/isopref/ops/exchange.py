"""Tokens for heads: ranks that split a row exchange tokens, so that each has all tokens of some of the heads.

Outside of attention, rank r of N has tokens r, r + N, r + 2 N, ... of the row (batch/deal.py). Attention needs all
tokens but treats each head by itself, as a convolution does its channels and a recurrence its heads. So there is one
all-to-all before such an operation and one after it, and the operation itself knows nothing about ranks. An all-to-all
of equal parts is its own transpose, hence its own gradient.

The collectives are functional ones, which can be part of a compiled layer.

Dimensions: N ranks, T tokens of the row, L = T / N tokens of a rank, H heads, E width of a head.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import _functional_collectives as functional

from isopref.errors import ModelError
from isopref.types import ContextGroup


def to_heads(tensors_LHE: Sequence[Tensor], group: ContextGroup) -> list[Tensor]:
    """All tokens of this rank's heads, from this rank's tokens of all heads: each T, H / N, E.

    Rank r gets the r-th of N equal blocks of heads. Tensors of the same dtype are sent in one message. Raises
    ModelError if N does not divide a number of heads.
    """
    for tensor in tensors_LHE:
        check_heads(tensor.shape[1], group)
    found: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors_LHE):
        some = {number: one for number, one in enumerate(tensors_LHE) if one.dtype == dtype}
        blocks_NLX = [one.unflatten(1, (group.size, -1)).transpose(0, 1).flatten(2) for one in some.values()]
        widths = [block.shape[2] for block in blocks_NLX]
        received_NLX = _exchange(torch.cat(blocks_NLX, dim=2), group).split(widths, dim=2)
        for (number, one), part_NLX in zip(some.items(), received_NLX, strict=True):
            # Token i of rank r is token i N + r of the row.
            found[number] = part_NLX.transpose(0, 1).flatten(0, 1).unflatten(1, (-1, one.shape[2]))
    return [found[number] for number in range(len(tensors_LHE))]


def from_heads(x_THE: Tensor, group: ContextGroup) -> Tensor:
    """The reverse of `to_heads`: this rank's tokens of all heads, from all tokens of this rank's heads: L, N H, E."""
    blocks_NLX = x_THE.flatten(1).unflatten(0, (-1, group.size)).transpose(0, 1)
    received_LNX = _exchange(blocks_NLX, group).transpose(0, 1)
    heads_LHE: Tensor = received_LNX.flatten(1).unflatten(1, (-1, x_THE.shape[2]))
    return heads_LHE


def own_heads(x_H: Tensor, group: ContextGroup) -> Tensor:
    """This rank's block of a tensor that all ranks have for all heads, such as weights: H / N, ..."""
    check_heads(x_H.shape[0], group)
    return x_H.chunk(group.size)[group.rank]


def repeated(x: Tensor, dim: int, group: ContextGroup) -> Tensor:
    """Repeat heads that serve several others, such as key heads, until the number of ranks divides their number.

    Each rank's block then has the key heads of its query heads, if the number of ranks divides that of query heads.
    """
    times = group.size // math.gcd(group.size, x.shape[dim])
    return x.repeat_interleave(times, dim=dim) if times > 1 else x


def check_heads(heads: int, group: ContextGroup) -> None:
    """Raise ModelError if the ranks cannot divide the heads equally."""
    if heads % group.size:
        raise ModelError(
            f"layout.context_parallel: {group.size} does not divide {heads} heads (or channels) of a layer. Set it to "
            f"one of {', '.join(str(n) for n in range(1, heads + 1) if heads % n == 0)}."
        )


def summed(x: Tensor, group: ContextGroup) -> Tensor:
    """The sum over the group of each rank's result for its own tokens, for a loss that all of them compute alike.

    DDP and FSDP average gradients over all ranks. The ranks of a group have the gradients of their own tokens only,
    which must be added up instead. Hence the factor N in the gradient.
    """
    if x.numel() == 0:  # a filler has no answers
        return x
    total: Tensor = _Summed.apply(x, group.name, group.size)  # type: ignore[no-untyped-call]
    return total


def _exchange(x_NLX: Tensor, group: ContextGroup) -> Tensor:
    """Send x[r] to rank r. Part r of the result comes from rank r."""
    received: Tensor = _Exchange.apply(x_NLX, group.name)  # type: ignore[no-untyped-call]
    return received


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NLX: Tensor, name: str) -> Tensor:
        ctx.name = name
        return _all_to_all(x_NLX, name)

    @staticmethod
    def backward(ctx: Any, grad_NLX: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(grad_NLX, ctx.name), None


def _all_to_all(x: Tensor, name: Any) -> Tensor:
    received: Tensor = functional.wait_tensor(functional.all_to_all_single(x.contiguous(), None, None, name))
    return received


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: Any, size: int) -> Tensor:
        ctx.size = size
        total: Tensor = functional.wait_tensor(functional.all_reduce(x.contiguous(), "sum", name))
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad * ctx.size, None, None
