"""Attention sinks (gpt-oss and others) over segments, with the stock CUDA kernels, which do not support them.

A sink is the score of one more key, whose value is zero. It takes a share of the attention, so the kernel's output
shrinks by sigmoid(lse - sink), where lse is the logarithm of the kernel's sum of exponentials. The kernels' backward
passes compute every weight from lse as exp(score - lse): given the new output and the new lse, they return the exact
gradients with the sink. The eager twin that defines this is in attention.py.

Dimensions: H query heads, T tokens of the row, E width of a head.
"""

from typing import Any

import torch
from torch import Tensor

from isopref.ops import flash
from isopref.types import Segments


def attend_with_sinks(
    q: Tensor, k: Tensor, v: Tensor, sinks_H: Tensor, segments: Segments, scale: float, window: int | None
) -> Tensor:
    """`segment_attention` of keys and values that are already gathered: T, H, E in and out."""
    newer = flash.fits(q, v) and flash.has_flash(q.device)
    offsets = (segments.query_offsets, segments.key_offsets, segments.longest)
    out: Tensor = _Sinks.apply(q, k, v, sinks_H, *offsets, scale, window, newer)  # type: ignore[no-untyped-call]
    return out


class _Sinks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks_H: Tensor,
        query_offsets: Tensor,
        key_offsets: Tensor,
        longest: int,
        scale: float,
        window: int | None,
        newer: bool,
    ) -> Tensor:
        kernel = flash.forward if newer else forward
        out_THE, lse_HT = kernel(q, k, v, query_offsets, key_offsets, longest, scale, window)
        with_sink_HT = torch.logaddexp(lse_HT, sinks_H.to(lse_HT.dtype)[:, None])
        share_THE = (lse_HT - with_sink_HT).exp().T[..., None]
        out_THE = (out_THE * share_THE).to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks_H, out_THE, with_sink_HT, query_offsets, key_offsets)
        ctx.rest = longest, scale, window
        ctx.newer = newer
        return out_THE

    @staticmethod
    def backward(ctx: Any, grad_THE: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks_H, out_THE, lse_HT, query_offsets, key_offsets = ctx.saved_tensors
        kernel = flash.backward if ctx.newer else backward
        grad_THE = grad_THE.contiguous()
        grads = kernel(grad_THE, q, k, v, out_THE, lse_HT, query_offsets, key_offsets, *ctx.rest)
        # d out / d sink = -out * exp(sink - lse)
        pull_TH = (grad_THE.to(lse_HT.dtype) * out_THE).sum(dim=-1)
        weight_HT = (sinks_H.to(lse_HT.dtype)[:, None] - lse_HT).exp()
        grad_sinks = -(weight_HT * pull_TH.T).sum(dim=1).to(sinks_H.dtype)
        return (*grads, grad_sinks, None, None, None, None, None, None)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_offsets: Tensor,
    key_offsets: Tensor,
    longest: int,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """Torch's own kernel: the output of each query (T, H, E), and the logarithm of its sum of exponentials (H, T)."""
    causal = window is None
    # The operator that `varlen_attn` calls, to match the one of `backward`. Both take grouped key heads.
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        query_offsets,
        key_offsets,
        longest,
        longest,
        0.0,
        causal,
        False,
        scale=scale,
        window_size_left=-1 if window is None else window - 1,
        window_size_right=0,
    )
    return out, lse


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    query_offsets: Tensor,
    key_offsets: Tensor,
    longest: int,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values, as torch's own kernel computes them from `out` and `lse`."""
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        grad,
        q,
        k,
        v,
        out,
        lse,
        query_offsets,
        key_offsets,
        longest,
        longest,
        0.0,
        window is None,
        no_dropout,
        torch.empty(0, device=q.device),
        scale=scale,
        window_size_left=-1 if window is None else window - 1,
        window_size_right=0,
    )
    return dq, dk, dv
