"""Attention over the segments of a packed row: one function, a portable path and the CUDA varlen kernel behind it.

Dimensions: B sequences, H query heads, G key heads (G divides H), T tokens of the row, Q and K queries and keys of one
segment, E width of a head. Query i of a segment sees key j when j <= i + K - Q: causal, aligned at the ends.
"""

from inspect import signature
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import pad, scaled_dot_product_attention

from isopref.ops import exchange, flash
from isopref.ops.sinks import attend_with_sinks
from isopref.ops.take import take
from isopref.types import Segments

# torch 2.11 detects grouped key heads by itself; later versions need an argument.
GROUPED_HEADS: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}

# FlashAttention 4, torch's FlashAttention 2 over packed rows, or torch's attention for one segment after another.
Kernel = Literal["flash-attn-4", "varlen_attn", "segments"]
WIDEST, MULTIPLE = 256, 8  # of a head, for torch's kernel over packed rows


def kernel_for(query_width: int, value_width: int, *, half: bool, softcap: float | None, newer: bool) -> Kernel:
    """The attention kernel to use on a CUDA card, for a run and for `isopref plan`.

    `half`: in bfloat16 or float16; `newer`: flash-attn-4 can be used and supports the card.
    """
    width = max(query_width, value_width)  # narrower ones are padded
    if not half or softcap is not None or width > WIDEST or width % MULTIPLE:
        return "segments"
    return "flash-attn-4" if newer and flash.takes(query_width, value_width) else "varlen_attn"


def segment_attention(
    query_HTE: Tensor,
    key_GTE: Tensor,
    value_GTE: Tensor,
    segments: Segments,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend within segments. Returns T, H, E.

    If ranks split the row, T is the number of this rank's tokens; the ranks exchange tokens for heads and back.
    `window` is the number of keys a query sees at most, itself included; `softcap` bounds the scores by
    softcap * tanh(score / softcap). `sinks` (H) give each head one more key that every query sees, with this score and
    a value of zero: it takes a share of the attention and adds nothing.
    """
    query, key, value = (x.transpose(0, 1) for x in (query_HTE, key_GTE, value_GTE))
    group = segments.context
    if group is None:
        return _attend(query, key, value, segments, scale, window, softcap, sinks)
    key, value = (exchange.repeated(x, 1, group) for x in (key, value))
    query, key, value = exchange.to_heads((query, key, value), group)
    own_sinks = None if sinks is None else exchange.own_heads(sinks, group)
    out = _attend(query, key, value, segments, scale, window, softcap, own_sinks)
    return exchange.from_heads(out, group)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """`segment_attention` of complete rows: T, H, E in and out."""
    if segments.key_index is not None and segments.key_copies is not None:
        key, value = (take(x, segments.key_index, segments.key_copies) for x in (key, value))
    half = query.dtype in (torch.bfloat16, torch.float16)
    if query.is_cuda:
        newer = flash.has_flash(query.device)
        kernel = kernel_for(query.shape[-1], value.shape[-1], half=half, softcap=softcap, newer=newer)
        if kernel != "segments":
            return _varlen(kernel, query, key, value, segments, scale, window, sinks)
    query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    return _portable(query, key, value, segments, scale, window, softcap, sinks)


def batch_attention(
    query_BHQE: Tensor,
    key_BGQE: Tensor,
    value_BGQE: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention in a right-padded batch, with the options of `segment_attention`. Returns B, Q, H, E."""
    groups = query_BHQE.shape[1] // key_BGQE.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) if groups > 1 else x for x in (key_BGQE, value_BGQE))
    out: Tensor = _one_segment(query_BHQE, key, value, scale, window, softcap, sinks)
    return out.transpose(1, 2).contiguous()


def _varlen(
    kernel: Kernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Segments,
    scale: float,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    width = v.shape[-1]
    if q.shape[-1] != width:  # as in DeepSeek-V3. The kernels know one width; zeros change neither scores nor sums
        most = max(q.shape[-1], width)
        q, k, v = (pad(x, (0, most - x.shape[-1])) for x in (q, k, v))
        return _varlen(kernel, q, k, v, segments, scale, window, sinks)[..., :width].contiguous()
    if sinks is not None:
        return attend_with_sinks(q, k, v, sinks, segments, scale, window)
    if kernel == "flash-attn-4":
        return flash.attend(q, k, v, segments, scale, window)
    out = varlen_attn(
        q,
        k,
        v,
        segments.query_offsets,
        segments.key_offsets,
        segments.longest,
        segments.longest,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        **GROUPED_HEADS,
    )
    assert isinstance(out, Tensor)
    return out


def _portable(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Segments,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    groups = q.shape[0] // k.shape[0]
    k, v = (x.repeat_interleave(groups, dim=0) if groups > 1 else x for x in (k, v))
    parts = []
    for s in range(len(segments.query_bounds) - 1):
        queries = slice(segments.query_bounds[s], segments.query_bounds[s + 1])
        keys = slice(segments.key_bounds[s], segments.key_bounds[s + 1])
        part_HQE = _one_segment(q[None, :, queries], k[None, :, keys], v[None, :, keys], scale, window, softcap, sinks)
        parts.append(part_HQE[0].transpose(0, 1))
    return torch.cat(parts)  # contiguous, because some models call view() on the result


def _one_segment(
    q_BHQE: Tensor,
    k_BHKE: Tensor,
    v_BHKE: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    num_queries, num_keys = q_BHQE.shape[2], k_BHKE.shape[2]
    windowed = window is not None and window < num_keys
    plain = softcap is None and sinks_H is None
    if plain and num_queries == num_keys and not windowed:
        return scaled_dot_product_attention(q_BHQE, k_BHKE, v_BHKE, is_causal=True, scale=scale)
    mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q_BHQE.device).tril(num_keys - num_queries)
    if windowed and window is not None:
        mask = mask.triu(num_keys - num_queries - window + 1)
    if plain:
        return scaled_dot_product_attention(q_BHQE, k_BHKE, v_BHKE, attn_mask=mask, scale=scale)
    scores = q_BHQE @ k_BHKE.transpose(2, 3)
    scores = scores * scale if softcap is None else softcap * torch.tanh(scores * (scale / softcap))
    wide = torch.promote_types(scores.dtype, torch.float32)
    scores = scores.masked_fill(~mask, float("-inf")).to(wide)
    if sinks_H is not None:
        sink = sinks_H.to(wide)[None, :, None, None].expand(*scores.shape[:3], 1)
        return torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1].to(v_BHKE.dtype) @ v_BHKE
    return scores.softmax(dim=-1).to(v_BHKE.dtype) @ v_BHKE
