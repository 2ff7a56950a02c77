"""A causal depthwise convolution along the sequences of a packed row, including those that branch off from others.

A token sees itself and those before it in its own sequence: the first tokens of an answer see the last ones of their
prompt, wherever those are in the row. Tables of positions allow any prefix tree in one pass, in which no token is
computed twice and the gradient needs no atomic additions (as in take.py). In a compiled layer, forward and backward are
one kernel each.

Dimensions: T tokens of the row, D channels, J taps, R copies of a token at most.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Taps(NamedTuple):
    """Positions in the row of the tokens before and after each token."""

    before: Tensor  # J, T: the token j places before each token, in its own sequence; -1 if there is none
    after: Tensor  # J, R, T: the tokens j places after each token, copy by copy; -1 if there are fewer copies


def tree_convolution(x_TD: Tensor, weight_DJ: Tensor, bias_D: Tensor | None, taps: Taps) -> Tensor:
    """For each token, the sum over j of weight[:, J - 1 - j] * x[j tokens before], plus the bias: T, D.

    Summed in float32 or wider, in the order of the taps.
    """
    out: Tensor = _TreeConvolution.apply(x_TD, weight_DJ, bias_D, *taps)  # type: ignore[no-untyped-call]
    return out


class _TreeConvolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, weight_DJ: Tensor, bias_D: Tensor | None, index_JT: Tensor, copies_JRT: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x_TD, weight_DJ, bias_D, index_JT, copies_JRT)
        wide = torch.promote_types(x_TD.dtype, torch.float32)
        weight_JD = weight_DJ.to(wide).T.flip(0)
        total = _pick(x_TD, index_JT[0]).to(wide) * weight_JD[0]
        for j in range(1, len(index_JT)):
            total = total + _pick(x_TD, index_JT[j]).to(wide) * weight_JD[j]
        if bias_D is not None:
            total = total + bias_D.to(wide)
        # Without the condition, layers compiled by torch 2.11 in float32 get no gradient, because it loses track of an
        # output that was cast to its own dtype. torch 2.13 does not.
        return total if total.dtype == x_TD.dtype else total.to(x_TD.dtype)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, weight_DJ, bias_D, index_JT, copies_JRT = ctx.saved_tensors
        wide = torch.promote_types(x_TD.dtype, torch.float32)
        weight_JD = weight_DJ.to(wide).T.flip(0)
        grad = grad_TD.to(wide)
        grad_x = torch.zeros_like(grad)
        grad_weight = []
        for j in range(len(index_JT)):
            for r in range(copies_JRT.shape[1]):
                grad_x = grad_x + _pick(grad_TD, copies_JRT[j, r]).to(wide) * weight_JD[j]
            grad_weight.append((_pick(x_TD, index_JT[j]).to(wide) * grad).sum(dim=0))
        grad_bias = None if bias_D is None else grad.sum(dim=0).to(bias_D.dtype)
        return (
            grad_x.to(x_TD.dtype),
            torch.stack(grad_weight[::-1], dim=1).to(weight_DJ.dtype),
            grad_bias,
            None,
            None,
        )


def _pick(x_TD: Tensor, index_T: Tensor) -> Tensor:
    """x[index], zero where the index is -1."""
    return torch.where((index_T >= 0)[:, None], x_TD.index_select(0, index_T.clamp(min=0)), 0)
