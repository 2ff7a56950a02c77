"""Taking rows of a tensor, each any number of times, with a gradient that needs no atomic additions.

The keys of a prompt serve all its answers, and its last token predicts the first token of each. The gradient of a row
is the sum over its copies, always in the same order, so the result is reproducible. More than two copies are added up
in float32, so that a sum of many is as exact as a sum of two.
"""

from typing import Any

import torch
from torch import Tensor


def take(x: Tensor, index_K: Tensor, copies_RT: Tensor) -> Tensor:
    """x[index] along the first dimension of x, whose size is T.

    `copies[r, t]` is the place in the result of copy r of x[t], or -1 if x[t] has no such copy.
    """
    taken: Tensor = _Take.apply(x, index_K, copies_RT)  # type: ignore[no-untyped-call]
    return taken


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index_K: Tensor, copies_RT: Tensor) -> Tensor:
        ctx.save_for_backward(copies_RT)
        return x.index_select(0, index_K)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        copies_RT = ctx.saved_tensors[0]
        if grad.shape[0] == 0:  # a filler predicts nothing
            return grad.new_zeros(copies_RT.shape[1], *grad.shape[1:]), None, None
        first, second, *others = (_pick(grad, copy_T) for copy_T in copies_RT)
        if not others:
            return first + second, None, None
        wide = torch.promote_types(grad.dtype, torch.float32)
        total = first.to(wide) + second
        for other in others:
            total = total + other
        return total.to(grad.dtype), None, None


def _pick(grad: Tensor, copy_T: Tensor) -> Tensor:
    """grad[copy], zero where the copy is -1."""
    there = (copy_T >= 0).view(-1, *(1 for _ in grad.shape[1:]))
    return torch.where(there, grad.index_select(0, copy_T.clamp(min=0)), 0)
