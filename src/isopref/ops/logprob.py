"""Log-probabilities of given tokens from hidden states: the head, its softmax and their gradient in one operation.

`token_logprobs_eager` is the specification. `token_logprobs` gives the same numbers with less memory: between forward
and backward, it keeps only logits, `max_logits` of them at most, in the compute dtype, and writes the gradient over
them. If there are more, they are computed in chunks, and the backward pass recomputes all chunks but the last. On CUDA,
the passes over the logits are Triton kernels.

Dimensions: C completion tokens, D hidden width, V vocabulary.
"""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

MAX_LOGITS = 2**27  # elements held at once: 512 MiB in float32
MAX_LOGITS_FUSED = 2**31  # the kernels make no float32 copy: 4 GiB in bfloat16


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
    return _log_softmax(hidden_CD, weight_VD, bias_V, scale, softcap).gather(1, target_C[:, None])[:, 0]


def token_collisions_eager(
    hidden_CD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None = None,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
) -> Tensor:
    """log of the sum of the squares of that softmax, C: the log-probability that two tokens drawn from it are equal."""
    return torch.logsumexp(2 * _log_softmax(hidden_CD, weight_VD, bias_V, scale, softcap), dim=-1)


def _log_softmax(
    hidden_CD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, scale: float, softcap: float | None
) -> Tensor:
    logits = _wide(linear(hidden_CD, weight_VD, bias_V)) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return logits.log_softmax(dim=-1)


def token_logprobs(
    hidden_CD: Tensor,
    weight_VD: Tensor,
    target_C: Tensor,
    bias_V: Tensor | None = None,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    max_logits: int | None = None,
) -> Tensor:
    """The same as `token_logprobs_eager`, with at most `max_logits` logits in memory. Differentiable once."""
    return _apply(hidden_CD, weight_VD, target_C, bias_V, scale, softcap, max_logits, collisions=False)[0]


def token_logprobs_and_collisions(
    hidden_CD: Tensor,
    weight_VD: Tensor,
    target_C: Tensor,
    bias_V: Tensor | None = None,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    max_logits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`token_logprobs`, and `token_collisions_eager` without a gradient, for one more pass over the logits."""
    return _apply(hidden_CD, weight_VD, target_C, bias_V, scale, softcap, max_logits, collisions=True)


def _apply(
    hidden_CD: Tensor,
    weight_VD: Tensor,
    target_C: Tensor,
    bias_V: Tensor | None,
    scale: float,
    softcap: float | None,
    max_logits: int | None,
    *,
    collisions: bool,
) -> tuple[Tensor, Tensor]:
    kernels = _kernels(hidden_CD)
    if max_logits is None:
        max_logits = MAX_LOGITS if kernels is None else MAX_LOGITS_FUSED
    chunk = max(1, max_logits // weight_VD.shape[0])
    found: tuple[Tensor, Tensor] = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_CD, weight_VD, bias_V, target_C, scale, softcap, chunk, collisions
    )
    return found


def reduce_logits(logits_CV: Tensor, target_C: Tensor, scale: float, softcap: float | None) -> tuple[Tensor, Tensor]:
    """Log-probability of the target, and the log of the softmax's denominator: C and C, float32 or wider."""
    finished = _finish(logits_CV, scale, softcap)
    lse_C = torch.logsumexp(finished, dim=-1)
    return finished.gather(1, target_C[:, None])[:, 0] - lse_C, lse_C


def reduce_squares(logits_CV: Tensor, lse_C: Tensor, scale: float, softcap: float | None) -> Tensor:
    """log of the sum of squares of the softmax, whose denominator has the logarithm `lse`: C, float32 or wider."""
    # The largest probability is at least 1/V, so the sum of squares does not underflow.
    return _finish(logits_CV, scale, softcap).sub_(lse_C[:, None]).mul_(2).exp_().sum(dim=-1).log()


def logits_gradient_(
    logits_CV: Tensor, target_C: Tensor, lse_C: Tensor, grad_C: Tensor, scale: float, softcap: float | None
) -> Tensor:
    """Gradient of sum(grad * logp) in the logits, which it may overwrite: (onehot - softmax) * slope * grad."""
    finished = _finish(logits_CV, scale, softcap)
    slope = scale if softcap is None else scale * (1 - (finished / softcap) ** 2)
    grad = finished.sub_(lse_C[:, None]).exp_().neg_()
    grad.scatter_add_(1, target_C[:, None], torch.ones_like(grad[:, :1]))
    return grad.mul_(slope * grad_C[:, None]).to(logits_CV.dtype)


def _kernels(x: Tensor) -> ModuleType | None:
    """The Triton twins of `reduce_logits`, `reduce_squares` and `logits_gradient_`; None if they cannot run."""
    if not x.is_cuda or x.dtype == torch.float64:
        return None
    from isopref.ops import logprob_triton  # Triton comes with torch for CUDA, and only there

    return logprob_triton


def _chunks(count: int, size: int) -> list[slice]:
    """All tokens in slices, the last tokens first. Only the slice of the first tokens may be smaller than `size`."""
    return [slice(max(0, end - size), end) for end in range(count, 0, -size)]


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _finish(logits: Tensor, scale: float, softcap: float | None) -> Tensor:
    """A new tensor, scaled and capped in float32 or wider, so that only the matmul's result is rounded."""
    wide = logits.to(_wide(logits[:0]).dtype, copy=True)
    if scale != 1.0:
        wide *= scale
    return wide if softcap is None else wide.div_(softcap).tanh_().mul_(softcap)


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
        collisions: bool,
    ) -> tuple[Tensor, Tensor]:
        kernels = _kernels(hidden)
        reduce = getattr(kernels, "reduce_logits", reduce_logits)
        squares = getattr(kernels, "reduce_squares", reduce_squares)
        logp = hidden.new_empty(len(hidden), dtype=_wide(hidden[:0]).dtype)
        lse = torch.empty_like(logp)
        collision = torch.empty_like(logp if collisions else logp[:0])
        logits = None
        for at in reversed(_chunks(len(hidden), chunk)):
            logits = None  # free this chunk before the next one is computed
            logits = linear(hidden[at], weight, bias)
            logp[at], lse[at] = reduce(logits, target[at], scale, softcap)
            if collisions:
                collision[at] = squares(logits, lse[at], scale, softcap)
        ctx.save_for_backward(hidden, weight, bias, target, lse)
        ctx.scale, ctx.softcap, ctx.chunk = scale, softcap, chunk
        ctx.kept_logits = logits if any(ctx.needs_input_grad) else None
        ctx.mark_non_differentiable(collision)
        return logp, collision

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logp: Tensor, _grad_collision: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, target, lse = ctx.saved_tensors
        chunk, whole = ctx.chunk, len(hidden) <= ctx.chunk
        gradient_ = getattr(_kernels(hidden), "logits_gradient_", logits_gradient_)
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        # Chunks are added up in float32: a bfloat16 sum would lose small ones.
        sum_dtype = weight.dtype if whole else _wide(weight[:0]).dtype
        grad_weight = torch.zeros_like(weight, dtype=sum_dtype) if need_weight and not whole else None
        grad_bias = torch.zeros_like(bias, dtype=sum_dtype) if need_bias and bias is not None else None
        logits, ctx.kept_logits = ctx.kept_logits, None
        for at in _chunks(len(hidden), chunk):
            if logits is None:
                logits = linear(hidden[at], weight, bias)
            grad = gradient_(logits, target[at], lse[at], grad_logp[at], ctx.scale, ctx.softcap)
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[at])
            if need_weight:
                grad_weight = grad.T @ hidden[at] if grad_weight is None else grad_weight.add_(grad.T @ hidden[at])
            if grad_bias is not None:
                grad_bias += grad.sum(dim=0)
            logits = grad = None
        if need_weight:
            grad_weight = torch.zeros_like(weight) if grad_weight is None else grad_weight.to(weight.dtype)
        if grad_bias is not None:
            grad_bias = grad_bias.to(weight.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None, None
