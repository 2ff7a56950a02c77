"""The log-prob head's passes over its logits, as Triton kernels: forward reads them once, backward reads and writes.

The sum of squared probabilities, if requested, takes one more read. The specification is `reduce_logits`,
`reduce_squares` and `logits_gradient_` in logprob.py, whose signatures these functions share. One program handles one
token (a row of V logits), so no result depends on how many tokens there are or on their order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

BLOCK = 4096


@triton.jit
def _finish(logits, SCALE: tl.constexpr, SOFTCAP: tl.constexpr):
    x = logits.to(tl.float32) * SCALE
    if SOFTCAP > 0:
        x = libdevice.tanh(x / SOFTCAP) * SOFTCAP
    return x


@triton.jit
def _reduce(logits, target, logp, lse, V, SCALE: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    start = logits + row.to(tl.int64) * V
    highest = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, V, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = _finish(tl.load(start + at, mask=at < V, other=float("-inf")), SCALE, SOFTCAP)
        x = tl.where(at < V, x, float("-inf"))  # a softcap would make the padding finite
        higher = tl.maximum(highest, x)
        # A lane without a value so far has -inf for both, and -inf - -inf is NaN.
        total = total * tl.where(higher == highest, 1.0, tl.exp(highest - higher))
        total += tl.where(x == float("-inf"), 0.0, tl.exp(x - higher))
        highest = higher
    top = tl.max(highest, 0)
    log_sum = top + tl.log(tl.sum(total * tl.exp(highest - top), 0))
    picked = _finish(tl.load(start + tl.load(target + row)), SCALE, SOFTCAP)
    tl.store(lse + row, log_sum)
    tl.store(logp + row, picked - log_sum)


@triton.jit
def _squares(logits, lse, collision, V, SCALE: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    start = logits + row.to(tl.int64) * V
    log_sum = tl.load(lse + row)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, V, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = _finish(tl.load(start + at, mask=at < V, other=0.0), SCALE, SOFTCAP)
        total += tl.where(at < V, tl.exp(2 * (x - log_sum)), 0.0)
    tl.store(collision + row, tl.log(tl.sum(total, 0)))


@triton.jit
def _gradient(logits, target, lse, grad, V, SCALE: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    start = logits + row.to(tl.int64) * V
    column, log_sum, upstream = tl.load(target + row), tl.load(lse + row), tl.load(grad + row)
    for first in range(0, V, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = _finish(tl.load(start + at, mask=at < V, other=0.0), SCALE, SOFTCAP)
        slope = (tl.where(at == column, 1.0, 0.0) - tl.exp(x - log_sum)) * upstream * SCALE
        if SOFTCAP > 0:
            slope *= 1.0 - (x / SOFTCAP) * (x / SOFTCAP)
        tl.store(start + at, slope.to(logits.dtype.element_ty), mask=at < V)


def reduce_logits(logits_CV: Tensor, target_C: Tensor, scale: float, softcap: float | None) -> tuple[Tensor, Tensor]:
    count, vocabulary = logits_CV.shape
    logp, lse = (torch.empty(count, dtype=torch.float32, device=logits_CV.device) for _ in range(2))
    if count:
        _reduce[(count,)](
            logits_CV, target_C, logp, lse, vocabulary, SCALE=scale, SOFTCAP=softcap or 0.0, BLOCK=BLOCK, num_warps=8
        )
    return logp, lse


def reduce_squares(logits_CV: Tensor, lse_C: Tensor, scale: float, softcap: float | None) -> Tensor:
    count, vocabulary = logits_CV.shape
    collision = torch.empty(count, dtype=torch.float32, device=logits_CV.device)
    if count:
        _squares[(count,)](
            logits_CV, lse_C, collision, vocabulary, SCALE=scale, SOFTCAP=softcap or 0.0, BLOCK=BLOCK, num_warps=8
        )
    return collision


def logits_gradient_(
    logits_CV: Tensor, target_C: Tensor, lse_C: Tensor, grad_C: Tensor, scale: float, softcap: float | None
) -> Tensor:
    count, vocabulary = logits_CV.shape
    if count:
        _gradient[(count,)](
            logits_CV,
            target_C,
            lse_C,
            grad_C.contiguous(),
            vocabulary,
            SCALE=scale,
            SOFTCAP=softcap or 0.0,
            BLOCK=BLOCK,
            num_warps=8,
        )
    return logits_CV
