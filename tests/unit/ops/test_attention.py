"""segment_attention against a dense T x T mask written from the definition, in float64.

H query heads, G key heads, T tokens of a row, E width of a head.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from isopref.ops import attention
from isopref.ops.attention import batch_attention, segment_attention
from isopref.types import Segments
from support.segments import (
    ONE_BY_ONE,
    PADDED_ROW,
    SHARED_PAIRS,
    Layout,
    keys_of,
    random_qkv,
    random_sinks,
    segments_of,
)


def dense_mask(layout: Layout, window: int | None) -> Tensor:
    """mask[t, u]: token t sees token u. A query sees the keys up to itself, of those the last `window`."""
    num_tokens = sum(length for length, _ in layout)
    mask = torch.zeros(num_tokens, num_tokens, dtype=torch.bool)
    t = 0
    for (length, seen), keys in zip(layout, keys_of(layout), strict=True):
        for i in range(length):
            visible = keys[: len(seen) + i + 1]
            for u in visible if window is None else visible[-window:]:
                mask[t, u] = True
            t += 1
    return mask


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """softmax(mask(cap(scale q k))) v, head by head; a sink adds exp(sink) to the denominator. Returns T, H, E."""
    heads = []
    for h in range(q.shape[0]):
        g = h * k.shape[0] // q.shape[0]
        scores = scale * q[h] @ k[g].T
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        weights = scores.masked_fill(~mask, -torch.inf).exp()
        total = weights.sum(dim=-1, keepdim=True)
        heads.append(weights / (total if sinks is None else total + sinks[h].exp()) @ v[g])
    return torch.stack(heads, dim=1)


def assert_same(
    layout: Layout,
    heads: int,
    groups: int,
    window: int | None,
    softcap: float | None,
    seed: int = 0,
    sunk: bool = False,
) -> None:
    """Values and gradients of all inputs."""
    qkv = random_qkv(layout, heads, groups, seed)
    sinks = random_sinks(heads) if sunk else None
    found = segment_attention(*qkv, segments_of(layout), scale=0.7, window=window, softcap=softcap, sinks=sinks)
    expected = dense_attention(*qkv, dense_mask(layout, window), scale=0.7, softcap=softcap, sinks=sinks)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    upstream = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + 1))
    leaves = qkv if sinks is None else (*qkv, sinks)
    grads, expected_grads = (torch.autograd.grad(out, leaves, upstream) for out in (found, expected))
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("layout", [SHARED_PAIRS, PADDED_ROW, ONE_BY_ONE], ids=["shared", "padding", "in_order"])
@pytest.mark.parametrize(("heads", "groups"), [(2, 2), (4, 2), (3, 1)])
@pytest.mark.parametrize("window", [None, 1, 3, 7, 100])
@pytest.mark.parametrize(("softcap", "sunk"), [(None, False), (1.5, False), (None, True), (1.5, True)])
def test_against_the_dense_mask(
    layout: Layout, heads: int, groups: int, window: int | None, softcap: float | None, sunk: bool
) -> None:
    assert_same(layout, heads, groups, window, softcap, sunk=sunk)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("sunk", [False, True])
def test_a_padded_batch_attends_as_its_sequences_do(window: int | None, sunk: bool) -> None:
    """Sequences of 5, 1 and 8 tokens as a row, and as a batch whose padding is large."""
    row = random_qkv(ONE_BY_ONE, 4, 2)
    sinks = random_sinks(4) if sunk else None
    expected = segment_attention(*row, segments_of(ONE_BY_ONE), scale=0.7, window=window, sinks=sinks)
    batch = []
    for x in row:
        padded = torch.full((3, x.shape[0], 8, 4), 1e6, dtype=torch.float64)
        for b, (start, end) in enumerate(((0, 5), (5, 6), (6, 14))):
            padded[b, :, : end - start] = x[:, start:end].detach()
        batch.append(padded)
    query, key, value = batch
    found = batch_attention(query, key, value, scale=0.7, window=window, sinks=sinks)
    real = torch.cat([found[0, :5], found[1, :1], found[2]])
    torch.testing.assert_close(real, expected, rtol=1e-12, atol=1e-12)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Any segments, but a token is seen by one later segment at most: a prompt has two answers."""
    layout: Layout = []
    unseen: list[int] = []
    num_tokens = 0
    for length in draw(st.lists(st.integers(1, 8), min_size=1, max_size=6)):
        seen = sorted(draw(st.lists(st.sampled_from(unseen), unique=True, max_size=8))) if unseen else []
        layout.append((length, seen))
        unseen = [t for t in unseen if t not in seen] + list(range(num_tokens, num_tokens + length))
        num_tokens += length
    return layout


@settings(max_examples=150, deadline=None)
@given(
    layout=layouts(),
    groups=st.integers(1, 2),
    repeats=st.integers(1, 2),
    window=st.one_of(st.none(), st.integers(1, 12)),
    softcap=st.sampled_from([None, None, 2.0]),
    seed=st.integers(0, 99),
)
def test_any_layout_against_the_dense_mask(
    layout: Layout, groups: int, repeats: int, window: int | None, softcap: float | None, seed: int
) -> None:
    assert_same(layout, groups * repeats, groups, window, softcap, seed)


@pytest.mark.parametrize(("query_width", "value_width"), [(6, 4), (4, 6), (4, 4)])
@pytest.mark.parametrize("sunk", [False, True])
@pytest.mark.parametrize("window", [None, 3])
def test_kernels_of_one_width_take_heads_of_two(
    query_width: int, value_width: int, sunk: bool, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA's kernels refuse keys and values of different widths; here a stand-in does."""

    def kernel(q: Tensor, k: Tensor, v: Tensor, segments: Segments, sinks: Tensor | None) -> Tensor:
        assert q.shape[-1] == k.shape[-1] == v.shape[-1]
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        return attention._portable(q, k, v, segments, 0.7, window, None, sinks)

    segments = segments_of(ONE_BY_ONE)
    monkeypatch.setattr(attention, "varlen_attn", lambda q, k, v, *_, **_options: kernel(q, k, v, segments, None))
    monkeypatch.setattr(attention, "attend_with_sinks", lambda q, k, v, sinks, *_: kernel(q, k, v, segments, sinks))
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()
        for shape in ((4, 14, query_width), (2, 14, query_width), (2, 14, value_width))
    )
    sinks = random_sinks(4) if sunk else None
    rows = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
    found = attention._varlen("varlen_attn", *rows, segments, 0.7, window, sinks)
    expected = segment_attention(q, k, v, segments, scale=0.7, window=window, sinks=sinks)
    assert found.is_contiguous()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    upstream = torch.randn(expected.shape, dtype=torch.float64, generator=generator)
    for one, other in zip(*(torch.autograd.grad(out, (q, k, v), upstream) for out in (found, expected)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_the_mask_by_hand() -> None:
    """The oracle itself: prompt a, chosen b c, rejected d e; and the same with a window of two keys."""
    layout: Layout = [(3, []), (2, [0])]
    rows = ["a....", "ab...", "abc..", "a..d.", "a..de"]
    narrow = ["a....", "ab...", ".bc..", "a..d.", "...de"]
    for window, drawn in ((None, rows), (2, narrow)):
        assert dense_mask(layout, window).tolist() == [[letter != "." for letter in row] for row in drawn]


def test_what_a_query_does_not_see_does_not_reach_it() -> None:
    """Other keys and values for chosen answers, other pairs and padding: the rejected answer stays, bit for bit."""
    q, k, v = (x.detach() for x in random_qkv(PADDED_ROW, 4, 2))
    segments = segments_of(PADDED_ROW)
    rejected = slice(7, 11)  # sees tokens 0, 1, 2 and itself
    before = segment_attention(q, k, v, segments, scale=0.5)[rejected]
    unseen = [t for t in range(k.shape[1]) if t not in (0, 1, 2, 7, 8, 9, 10)]
    k[:, unseen], v[:, unseen] = 1e6, torch.nan
    assert torch.equal(segment_attention(q, k, v, segments, scale=0.5)[rejected], before)


def test_index_and_order_are_the_same_where_nothing_is_shared() -> None:
    q, k, v = random_qkv(ONE_BY_ONE, 2, 2)
    in_order = segments_of(ONE_BY_ONE)
    by_index = replace(in_order, key_index=torch.arange(q.shape[1]))
    assert torch.equal(segment_attention(q, k, v, in_order, scale=1.0), segment_attention(q, k, v, by_index, scale=1.0))


@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_dtype_of_the_model_is_kept(dtype: torch.dtype, softcap: float | None) -> None:
    q, k, v = (x.detach().to(dtype) for x in random_qkv(SHARED_PAIRS, 4, 2))
    low = segment_attention(q, k, v, segments_of(SHARED_PAIRS), scale=0.5, softcap=softcap)
    assert low.dtype == dtype
    mask = dense_mask(SHARED_PAIRS, None)
    exact = dense_attention(q.double(), k.double(), v.double(), mask, scale=0.5, softcap=softcap)
    # Scores below 8 are rounded by half a unit in the last place: e^(8 eps) - 1 in weights, then once more in values.
    torch.testing.assert_close(low.double(), exact, rtol=0, atol=10 * torch.finfo(dtype).eps * float(v.abs().max()))
