"""Small packed rows, written as lists, with random queries, keys and values.

H query heads, G key heads, T tokens of a row, E width of a head.
"""

import torch
from torch import Tensor

from isopref.types import Segments

# A segment: how many tokens it adds to the row, and the earlier tokens that it sees besides itself.
Layout = list[tuple[int, list[int]]]

SHARED_PAIRS: Layout = [(7, []), (4, [0, 1, 2]), (5, []), (6, [11])]  # prompts of 3 and 1 tokens
PADDED_ROW: Layout = [*SHARED_PAIRS, (9, [])]
ONE_BY_ONE: Layout = [(5, []), (1, []), (8, [])]


def keys_of(layout: Layout) -> list[list[int]]:
    """For each segment, the row's tokens that are its keys."""
    keys, start = [], 0
    for length, seen in layout:
        keys.append([*seen, *range(start, start + length)])
        start += length
    return keys


def segments_of(layout: Layout) -> Segments:
    keys = keys_of(layout)
    queries = [0]
    bounds = [0]
    for (length, _), own in zip(layout, keys, strict=True):
        queries.append(queries[-1] + length)
        bounds.append(bounds[-1] + len(own))
    shared = any(seen for _, seen in layout)
    flat = [t for own in keys for t in own]
    places = [[k for k, t in enumerate(flat) if t == token] for token in range(queries[-1])]
    most = max(2, *map(len, places))
    copies = [[*at, *[-1] * (most - len(at))] for at in places]
    return Segments(
        query_offsets=torch.tensor(queries, dtype=torch.int32),
        key_offsets=torch.tensor(bounds, dtype=torch.int32),
        key_index=torch.tensor(flat) if shared else None,
        key_copies=torch.tensor(copies).T.contiguous() if shared else None,
        query_bounds=tuple(queries),
        key_bounds=tuple(bounds),
        follows=tuple(seen[-1] if seen else -1 for _, seen in layout),
        longest=max(map(len, keys)),
    )


def random_qkv(layout: Layout, heads: int, groups: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    num_tokens = sum(length for length, _ in layout)

    def draw(count: int) -> Tensor:
        return torch.randn(count, num_tokens, 4, dtype=torch.float64, generator=generator).requires_grad_()

    return draw(heads), draw(groups), draw(groups)


def random_sinks(heads: int) -> Tensor:
    return torch.linspace(-1.5, 2.5, heads, dtype=torch.float64).requires_grad_()
