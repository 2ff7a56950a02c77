"""Log-probabilities of given tokens from hidden states: the head, its softmax and their gradient in one operation.

`token_logprobs_eager` is the specification. `token_logprobs` gives the same numbers with less memory: between forward
and backward only the logits are kept, in the compute dtype; above `max_logits` of them not even those: they are
computed in chunks, and again in the backward pass.

Dimensions: C completion tokens, D hidden width, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

MAX_LOGITS = 2**27  # elements held at once: 512 MiB in float32


def token_logprobs_eager(
    hidden_CD: Tensor,
    weight_VD: Tensor,
    target_C: Tensor,
    bias_V: Tensor | None = None,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
) -> Tensor:
    """log softmax(cap(scale * (hidden @ weight.T + bias)))[target], C, in float32 or wider."""
    logits = _wide(linear(hidden_CD, weight_VD, bias_V)) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return logits.log_softmax(dim=-1).gather(1, target_C[:, None])[:, 0]


def token_logprobs(
    hidden_CD: Tensor,
    weight_VD: Tensor,
    target_C: Tensor,
    bias_V: Tensor | None = None,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    max_logits: int = MAX_LOGITS,
) -> Tensor:
    """The same as `token_logprobs_eager`, holding at most `max_logits` logits at a time. Differentiable once."""
    chunk = max(1, max_logits // weight_VD.shape[0])
    logp_C: Tensor = _TokenLogprobs.apply(hidden_CD, weight_VD, bias_V, target_C, scale, softcap, chunk)  # type: ignore[no-untyped-call]
    return logp_C


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _finish(logits: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Scaled and capped, in float32 or wider: the matmul's result is rounded once."""
    wide = _wide(logits) if scale == 1.0 else _wide(logits) * scale
    return wide if softcap is None else torch.tanh(wide / softcap) * softcap


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        scale: float,
        softcap: float | None,
        chunk: int,
    ) -> Tensor:
        logp = hidden.new_empty(len(hidden), dtype=_wide(hidden[:0]).dtype)
        lse = torch.empty_like(logp)
        logits = None
        for at in (slice(i, i + chunk) for i in range(0, len(hidden), chunk)):
            logits = linear(hidden[at], weight, bias)
            finished = _finish(logits, scale, softcap)
            lse[at] = torch.logsumexp(finished, dim=-1)
            logp[at] = finished.gather(1, target[at, None])[:, 0] - lse[at]
        ctx.save_for_backward(hidden, weight, bias, target, lse)
        ctx.scale, ctx.softcap, ctx.chunk = scale, softcap, chunk
        ctx.kept_logits = logits if len(hidden) <= chunk and any(ctx.needs_input_grad) else None
        return logp

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logp: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, target, lse = ctx.saved_tensors
        chunk, whole = ctx.chunk, len(hidden) <= ctx.chunk
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        # Chunks add up in float32: a bfloat16 sum would lose the small ones.
        sum_dtype = weight.dtype if whole else _wide(weight[:0]).dtype
        grad_weight = torch.zeros_like(weight, dtype=sum_dtype) if need_weight else None
        grad_bias = torch.zeros_like(bias, dtype=sum_dtype) if need_bias and bias is not None else None
        for at in (slice(i, i + chunk) for i in range(0, len(hidden), chunk)):
            logits = ctx.kept_logits
            ctx.kept_logits = None
            if logits is None:
                logits = linear(hidden[at], weight, bias)
            finished = _finish(logits, ctx.scale, ctx.softcap)
            slope = ctx.scale if ctx.softcap is None else ctx.scale * (1 - (finished / ctx.softcap) ** 2)
            grad = finished.sub_(lse[at, None]).exp_().neg_()  # d logp / d logits = onehot - softmax
            grad.scatter_add_(1, target[at, None], torch.ones_like(grad[:, :1]))
            grad = grad.mul_(slope * grad_logp[at, None]).to(weight.dtype)
            if grad_hidden is not None:
                grad_hidden[at] = grad @ weight
            if grad_weight is not None:
                grad_weight += grad.T @ hidden[at]
            if grad_bias is not None:
                grad_bias += grad.sum(dim=0)
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        if grad_bias is not None:
            grad_bias = grad_bias.to(weight.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None
