"""Taking rows of a tensor when no row is taken more than twice, with a gradient that needs no atomic additions.

A prompt's keys serve two answers, and its last token predicts two tokens; nothing in a pair is used more often. So the
gradient of a row is nothing, one value or the sum of two, and comes out the same every time.
"""

from typing import Any

import torch
from torch import Tensor


def take(x: Tensor, index_K: Tensor, copies_2T: Tensor) -> Tensor:
    """x[index] along the first of x's dimensions, whose size is T.

    `copies`: where each row of x is in the result, the first and the second time; -1 for a copy there is not.
    """
    taken: Tensor = _Take.apply(x, index_K, copies_2T)  # type: ignore[no-untyped-call]
    return taken


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index_K: Tensor, copies_2T: Tensor) -> Tensor:
        ctx.save_for_backward(copies_2T)
        return x.index_select(0, index_K)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        copies_2T = ctx.saved_tensors[0]
        if grad.shape[0] == 0:  # a filler predicts nothing
            return grad.new_zeros(copies_2T.shape[1], *grad.shape[1:]), None, None
        first, second = (_pick(grad, copy_T) for copy_T in copies_2T)
        return first + second, None, None


def _pick(grad: Tensor, copy_T: Tensor) -> Tensor:
    """grad[copy], zero where that is -1."""
    there = (copy_T >= 0).view(-1, *(1 for _ in grad.shape[1:]))
    return torch.where(there, grad.index_select(0, copy_T.clamp(min=0)), 0)
