"""Ways to split the tokens of one row over ranks, on two CPU ranks: python benchmarks/context_parallel.py

In each case, every rank has a part of a row's queries, keys and values. What attention returns, and the gradients of
queries, keys and values, are compared with those of one process. The result led to the decision in docs/decisions.md:
the last line but one was built (layout.context_parallel).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.experimental import _attention as cp
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from isopref.batch.rows import build_microbatch, copies_of
from isopref.ops.attention import segment_attention
from isopref.testing.models import examples, random_pairs
from isopref.testing.ranks import RankError, Ranks
from isopref.types import ContextGroup, Segments

HEADS, WIDTH, TOKENS = 4, 8, 256
PATIENCE_S = 20

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # of 1, H, T, E each
Context = Callable[[], AbstractContextManager[None]]


def _row(tokens: int = TOKENS) -> tuple[Segments, list[Tensor]]:
    """A row of pairs with shared prompts; its queries, keys, values, and the weights with which the loss sums them."""
    (one,) = build_microbatch(examples(random_pairs(8)), "shared", row_tokens=tokens).passes
    assert one.segments is not None
    generator = torch.Generator().manual_seed(0)
    return one.segments, [torch.randn(1, HEADS, tokens, WIDTH, generator=generator) for _ in range(4)]


def _seen(segments: Segments) -> Tensor:
    """Which keys each query of the row sees: T, T."""
    index, queries, keys = segments.key_index, segments.query_bounds, segments.key_bounds
    assert index is not None
    seen = torch.zeros(queries[-1], queries[-1], dtype=torch.bool)
    for s in range(len(queries) - 1):
        for i in range(queries[s], queries[s + 1]):
            seen[i, index[keys[s] : keys[s + 1] - (queries[s + 1] - 1 - i)]] = True
    return seen


def _ours(segments: Segments) -> Attend:
    return lambda query, key, value: segment_attention(
        query[0], key[0], value[0], segments, scale=WIDTH**-0.5
    ).transpose(0, 1)[None]


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def _here(tensor: Tensor) -> Tensor:
    return tensor.chunk(dist.get_world_size(), dim=2)[dist.get_rank()]


def _dealt(tensor: Tensor) -> Tensor:
    return tensor[:, :, dist.get_rank() :: dist.get_world_size()]


def _compare(
    tensors: list[Tensor],
    whole: Attend,
    part: Attend,
    context: Context = nullcontext,
    here: Callable[[Tensor], Tensor] = _here,
) -> str:
    """`whole` attends over the row, `part` over what each rank has of it."""
    *inputs, weight = tensors
    inputs = [x.requires_grad_() for x in inputs]
    expected = whole(*inputs)
    gradients = torch.autograd.grad((expected * weight).sum(), inputs)
    mine = [here(x).detach().clone() for x in inputs]
    words = ""
    try:
        with context(), torch.no_grad():
            words = _off(part(*mine), here(expected))
        with context():
            loss = (part(*(x.requires_grad_() for x in mine)) * here(weight)).sum()
            found = torch.autograd.grad(loss, mine)
    except Exception as error:  # any failure is a finding, and goes into the table
        return f"{words} | {_short(error)}" if words else f"{_short(error)} | "
    return f"{words} | {', '.join(_off(x, here(y)) for x, y in zip(found, gradients, strict=True))}"


def _off(found: Tensor, expected: Tensor) -> str:
    return f"{float((found - expected).abs().max()):.0e}"


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"


def _torchs() -> AbstractContextManager[None]:
    cp._cp_options.enable_load_balance = False  # otherwise tokens change places, but the columns of a mask do not
    return cp.context_parallel(_mesh(), buffers=[torch.arange(TOKENS)], buffer_seq_dims=[0])  # a buffer is required


def one_sequence() -> str:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True)

    return _compare(_row()[1], attend, attend, _torchs)


def by_mask(products: bool) -> str:
    segments, tensors = _row()
    mask = _here(_seen(segments)[None, None])  # four dimensions: to torch, the third is that of the queries
    backends = [SDPBackend.MATH] if products else [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with sdpa_kernel(backends):
            return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    return _compare(tensors, _ours(segments), attend, _torchs)


class _Flex(nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, block_mask: BlockMask) -> Tensor | tuple[Tensor, ...]:
        return flex_attention(query, key, value, block_mask=block_mask)


def by_blocks(tokens: int) -> str:
    segments, tensors = _row(tokens)
    seen, mesh = _seen(segments), _mesh()
    blocks = create_block_mask(lambda _b, _h, i, j: seen[i, j], 1, 1, tokens, tokens, device="cpu")
    style = cp._ContextParallel(seq_dim=2, attention_type=cp._ContextParallel.AttentionType.FLEX)
    module = parallelize_module(_Flex(), mesh, style)
    try:
        (here,) = cp._context_parallel_shard(mesh, [blocks], [2])
    except NotImplementedError as error:
        return f"{_short(error)} | "
    return _compare(tensors, _ours(segments), lambda q, k, v: module(q, k, v, block_mask=here))


def keys_gathered() -> str:
    segments, tensors = _row()
    size, mesh = TOKENS // dist.get_world_size(), _mesh()
    attend = _ours(_part(segments, dist.get_rank() * size, (dist.get_rank() + 1) * size))

    def gathered(mine: Tensor) -> Tensor:
        return DTensor.from_local(mine, mesh, [Shard(2)]).full_tensor(grad_placements=[Partial()])

    return _compare(tensors, _ours(segments), lambda q, k, v: attend(q, gathered(k), gathered(v)))


def heads_exchanged() -> str:
    segments, tensors = _row()
    group = ContextGroup(_mesh().get_group().group_name, dist.get_rank(), dist.get_world_size())
    return _compare(tensors, _ours(segments), _ours(replace(segments, context=group)), here=_dealt)


def _part(whole: Segments, start: int, stop: int) -> Segments:
    """The segments of the queries from start to stop, each with the keys up to that of its last query in this range."""
    index, queries, keys, kept, follows = whole.key_index, [0], [0], [], []
    assert index is not None
    for s in range(len(whole.query_bounds) - 1):
        first, last = whole.query_bounds[s], whole.query_bounds[s + 1]
        count = min(stop, last) - max(start, first)
        if count > 0:
            kept.append(index[whole.key_bounds[s] : whole.key_bounds[s + 1] - (last - min(stop, last))])
            queries.append(queries[-1] + count)
            keys.append(keys[-1] + len(kept[-1]))
            follows.append(int(kept[-1][-count - 1]) if len(kept[-1]) > count else -1)
    taken = torch.cat(kept)
    return Segments(
        query_offsets=torch.tensor(queries, dtype=torch.int32),
        key_offsets=torch.tensor(keys, dtype=torch.int32),
        key_index=taken,
        key_copies=torch.from_numpy(copies_of(taken.numpy(), TOKENS)),
        query_bounds=tuple(queries),
        key_bounds=tuple(keys),
        follows=tuple(follows),
        longest=TOKENS,
    )


CASES: list[tuple[str, Callable[..., str], tuple[object, ...]]] = [
    ("context_parallel, one causal sequence", one_sequence, ()),
    ("context_parallel, a mask, attention by plain products", by_mask, (True,)),
    ("_ContextParallel FLEX, a BlockMask", by_blocks, (TOKENS,)),
    ("_ContextParallel FLEX, a BlockMask, 384 tokens", by_blocks, (384,)),
    ("keys and values gathered, our attention", keys_gathered, ()),
    ("tokens dealt, heads exchanged, our attention", heads_exchanged, ()),
    ("context_parallel, a mask, attention as torch chooses", by_mask, (False,)),  # last: the ranks do not survive it
]


def main() -> None:
    print("| | forward off by | gradients of queries, keys, values off by |\n|---|---|---|")
    with Ranks(2) as ranks:
        for name, case, arguments in CASES:
            try:
                found = ranks(case, *arguments, timeout_s=PATIENCE_S if arguments == (False,) else 60)[0]
            except RankError as error:
                found = f"{str(error).splitlines()[0]} | "
            print(f"| {name} | {found} |", flush=True)


if __name__ == "__main__":
    main()
