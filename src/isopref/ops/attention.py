"""Attention over the segments of a packed row: one function, a portable path and the CUDA varlen kernel behind it.

Dimensions: H query heads, G key heads (G divides H), T tokens of the row, Q and K queries and keys of one segment,
E width of a head. Query i of a segment sees key j when j <= i + K - Q: causal, aligned at the ends.
"""

from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

from isopref.ops import flash
from isopref.ops.take import take
from isopref.types import Segments

# torch 2.11 takes grouped key heads as they come; later versions want to be told.
GROUPED_HEADS: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}


def segment_attention(
    query_HTE: Tensor,
    key_GTE: Tensor,
    value_GTE: Tensor,
    segments: Segments,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attend within segments. Returns T, H, E.

    `window` is the number of keys a query sees at most, itself included; `softcap` bounds the scores by
    softcap * tanh(score / softcap).
    """
    query, key, value = (x.transpose(0, 1) for x in (query_HTE, key_GTE, value_GTE))
    if segments.key_index is not None and segments.key_copies is not None:
        key, value = (take(x, segments.key_index, segments.key_copies) for x in (key, value))
    half = query.dtype in (torch.bfloat16, torch.float16)
    if query.is_cuda and half and softcap is None:
        return _varlen(query, key, value, segments, scale, window)
    query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    return _portable(query, key, value, segments, scale, window, softcap)


def _varlen(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float, window: int | None) -> Tensor:
    if flash.fits(q, v) and flash.has_flash(q.device):
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
) -> Tensor:
    groups = q.shape[0] // k.shape[0]
    k, v = (x.repeat_interleave(groups, dim=0) if groups > 1 else x for x in (k, v))
    parts = []
    for s in range(len(segments.query_bounds) - 1):
        queries = slice(segments.query_bounds[s], segments.query_bounds[s + 1])
        keys = slice(segments.key_bounds[s], segments.key_bounds[s + 1])
        part_HQE = _one_segment(q[:, queries], k[:, keys], v[:, keys], scale, window, softcap)
        parts.append(part_HQE.transpose(0, 1))
    return torch.cat(parts)  # contiguous: some models take a view of it


def _one_segment(
    q_HQE: Tensor, k_HKE: Tensor, v_HKE: Tensor, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    num_queries, num_keys = q_HQE.shape[1], k_HKE.shape[1]
    windowed = window is not None and window < num_keys
    if num_queries == num_keys and not windowed and softcap is None:
        return scaled_dot_product_attention(q_HQE[None], k_HKE[None], v_HKE[None], is_causal=True, scale=scale)[0]
    mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q_HQE.device).tril(num_keys - num_queries)
    if windowed and window is not None:
        mask = mask.triu(num_keys - num_queries - window + 1)
    if softcap is None:
        return scaled_dot_product_attention(q_HQE[None], k_HKE[None], v_HKE[None], attn_mask=mask, scale=scale)[0]
    scores = softcap * torch.tanh(q_HQE @ k_HKE.transpose(1, 2) * (scale / softcap))
    wide = torch.promote_types(scores.dtype, torch.float32)
    return scores.masked_fill(~mask, float("-inf")).softmax(dim=-1, dtype=wide).to(v_HKE.dtype) @ v_HKE
