"""What torch's context parallelism does with rows of pairs, on two CPU ranks: python benchmarks/context_parallel.py

Each case splits a sequence over the ranks and compares attention with that of one process. The result is the reason for
the decision in docs/decisions.md.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import context_parallel_unshard
from torch.nn import functional

from isopref.data.rows import _copies, build_microbatch
from isopref.ops.attention import segment_attention
from isopref.testing.models import random_pairs
from isopref.testing.ranks import Ranks
from isopref.types import Segments

HEADS, WIDTH, TOKENS = 4, 8, 96


def _tensors() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, HEADS, TOKENS, WIDTH, generator=generator) for _ in range(3)]


def _row() -> tuple[Tensor, Tensor]:
    """A row with shared prompts: who sees whom (T, T), and its attention by one process."""
    (one,) = build_microbatch(random_pairs(4), "shared", row_tokens=TOKENS).passes
    assert one.segments is not None
    query, key, value = (x[0] for x in _tensors())
    out = segment_attention(query, key, value, one.segments, scale=WIDTH**-0.5).transpose(0, 1)[None]
    index = torch.arange(TOKENS) if one.segments.key_index is None else one.segments.key_index
    seen = torch.zeros(TOKENS, TOKENS, dtype=torch.bool)
    queries, keys = one.segments.query_bounds, one.segments.key_bounds
    for segment in range(len(queries) - 1):
        for i in range(queries[segment], queries[segment + 1]):
            seen[i, index[keys[segment] : keys[segment + 1] - (queries[segment + 1] - 1 - i)]] = True
    return seen, out


def _split(attend: Callable[..., Tensor], expected: Tensor, mask: Tensor | None) -> str:
    """Attention of a sequence that is split over the ranks, against the whole."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    query, key, value = _tensors()
    buffers = [query, key, value] + ([] if mask is None else [mask])
    dims = [2, 2, 2] + ([] if mask is None else [0])
    try:
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=dims):
            part = attend(query, key, value, mask)
            (found,) = context_parallel_unshard(mesh, [part], [2])
    except Exception as error:  # whatever it is, it is the finding
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return f"off by {float((found - expected).abs().max()):.1g}"


def causal() -> str:
    """One plain sequence."""
    query, key, value = _tensors()
    expected = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    return _split(lambda q, k, v, _: functional.scaled_dot_product_attention(q, k, v, is_causal=True), expected, None)


def shared_by_mask() -> str:
    """A row with shared prompts, by a mask."""
    seen, expected = _row()
    query, key, value = _tensors()
    whole = functional.scaled_dot_product_attention(query, key, value, attn_mask=seen)
    assert torch.allclose(whole, expected, atol=1e-5), "the mask is not the row's"
    return _split(
        lambda q, k, v, mask: functional.scaled_dot_product_attention(q, k, v, attn_mask=mask), expected, seen.clone()
    )


def shared_as_causal() -> str:
    """A row with shared prompts, as one causal sequence: what is left if no mask is passed."""
    _, expected = _row()
    return _split(lambda q, k, v, _: functional.scaled_dot_product_attention(q, k, v, is_causal=True), expected, None)


def keys_gathered() -> str:
    """A row with shared prompts, each rank with a part of the queries and all keys, by our own attention."""
    (one,) = build_microbatch(random_pairs(4), "shared", row_tokens=TOKENS).passes
    _, expected = _row()
    assert one.segments is not None
    size = TOKENS // dist.get_world_size()
    start = dist.get_rank() * size
    query, key, value = (x[0] for x in _tensors())
    here = slice(start, start + size)

    def gathered(mine: Tensor) -> Tensor:
        every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(every, mine.contiguous())
        return torch.cat(every, dim=1)

    seen = _part(one.segments, start, start + size)
    out = segment_attention(query[:, here], gathered(key[:, here]), gathered(value[:, here]), seen, scale=WIDTH**-0.5)
    return f"off by {float((out.transpose(0, 1) - expected[0, :, here]).abs().max()):.1g}"


def _part(whole: Segments, start: int, stop: int) -> Segments:
    """What the queries from start to stop see: of each segment, the keys up to those of its last query among them."""
    index = torch.arange(TOKENS) if whole.key_index is None else whole.key_index
    queries, keys, kept = [0], [0], []
    for segment in range(len(whole.query_bounds) - 1):
        first, last = whole.query_bounds[segment], whole.query_bounds[segment + 1]
        count = min(stop, last) - max(start, first)
        if count > 0:
            begin, end = whole.key_bounds[segment], whole.key_bounds[segment + 1] - (last - min(stop, last))
            kept.append(index[begin:end])
            queries.append(queries[-1] + count)
            keys.append(keys[-1] + end - begin)
    taken = torch.cat(kept)
    copies = torch.from_numpy(_copies(taken.numpy(), TOKENS))
    return Segments(
        query_offsets=torch.tensor(queries, dtype=torch.int32),
        key_offsets=torch.tensor(keys, dtype=torch.int32),
        key_index=taken,
        key_copies=copies,
        query_bounds=tuple(queries),
        key_bounds=tuple(keys),
        longest=TOKENS,
    )


def main() -> None:
    with Ranks(2) as ranks:
        for case in (causal, shared_by_mask, shared_as_causal, keys_gathered):
            print(f"{case.__doc__}  {ranks(case)}")


if __name__ == "__main__":
    main()
