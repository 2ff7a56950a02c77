"""Attention sinks on top of a kernel that knows none, against the twin that has them. In float64, on the CPU.

The kernel is a stand-in that computes what FlashAttention's papers say its passes compute; the CUDA kernels themselves
are compared in tests/gpu.
"""

import pytest
import torch
from torch import Tensor

from isopref.ops import sinks
from isopref.ops.attention import segment_attention
from isopref.ops.take import take
from support.segments import PADDED_ROW, SHARED_PAIRS, Layout, random_qkv, random_sinks, segments_of


def scores_of(q: Tensor, k: Tensor, offsets: tuple[Tensor, Tensor], scale: float, window: int | None) -> Tensor:
    """H, T, K: of every query with every key, -inf where it does not see it."""
    queries, keys = (x.tolist() for x in offsets)
    sees = torch.zeros(q.shape[0], k.shape[0], dtype=torch.bool)
    for s in range(len(queries) - 1):
        for i in range(queries[s], queries[s + 1]):
            last = keys[s + 1] - (queries[s + 1] - i)
            sees[i, max(keys[s], 0 if window is None else last - window + 1) : last + 1] = True
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    return (torch.einsum("the,khe->htk", q, k) * scale).masked_fill(~sees, -torch.inf)


def forward(
    q: Tensor, k: Tensor, v: Tensor, at_q: Tensor, at_k: Tensor, _longest: int, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    scores = scores_of(q, k, (at_q, at_k), scale, window)
    v = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    return torch.einsum("htk,khe->the", scores.softmax(dim=-1), v), scores.logsumexp(dim=-1)


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    at_q: Tensor,
    at_k: Tensor,
    _longest: int,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """FlashAttention-2, algorithm 2: P = exp(S - lse), D = rowsum(dO * O), dS = P * (dO V' - D)."""
    heads, groups = q.shape[1], k.shape[1]
    weights = (scores_of(q, k, (at_q, at_k), scale, window) - lse[..., None]).exp()
    k, v = (x.repeat_interleave(heads // groups, dim=1) for x in (k, v))
    pull = torch.einsum("the,khe->htk", grad, v) - (grad * out).sum(dim=-1).T[..., None]
    dq = scale * torch.einsum("htk,khe->the", weights * pull, k)
    dk = scale * torch.einsum("htk,the->khe", weights * pull, q)
    dv = torch.einsum("htk,the->khe", weights, grad)
    return dq, *(x.unflatten(1, (groups, -1)).sum(dim=2) for x in (dk, dv))


@pytest.mark.parametrize("layout", [SHARED_PAIRS, PADDED_ROW], ids=["shared", "padding"])
@pytest.mark.parametrize(("heads", "groups"), [(2, 2), (4, 2)])
@pytest.mark.parametrize("window", [None, 1, 3])
def test_a_kernel_without_sinks_gives_those_with_sinks(
    layout: Layout, heads: int, groups: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sinks, "forward", forward)
    monkeypatch.setattr(sinks, "backward", backward)
    segments, qkv, sunk = segments_of(layout), random_qkv(layout, heads, groups), random_sinks(heads)
    assert segments.key_index is not None
    assert segments.key_copies is not None
    query, key, value = (x.transpose(0, 1) for x in qkv)
    key, value = (take(x, segments.key_index, segments.key_copies) for x in (key, value))
    found = sinks.attend_with_sinks(query, key, value, sunk, segments, 0.7, window)
    expected = segment_attention(*qkv, segments, scale=0.7, window=window, sinks=sunk)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    upstream = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    grads, expected_grads = (torch.autograd.grad(out, (*qkv, sunk), upstream) for out in (found, expected))
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad, rtol=1e-11, atol=1e-11)
