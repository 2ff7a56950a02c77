"""Recurrences over a packed row, computed one sequence at a time."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from isopref.batch.packing import RowKind
from isopref.batch.rows import build_microbatch
from isopref.testing.models import tree_examples
from isopref.types import Segments

ROW_TOKENS = 500


def segments_of_trees(kind: RowKind) -> Segments:
    """A row with trees of several depths."""
    found = build_microbatch(tree_examples(), kind, row_tokens=ROW_TOKENS).passes[0].segments
    assert found is not None
    return found


def one_by_one(row: Segments, given: Sequence[Tensor], recurrence: Callable[[list[Tensor]], Tensor]) -> Tensor:
    """What each token of the row gets from `recurrence` over each of its sequences, prompt and all."""
    index = torch.arange(row.query_bounds[-1]) if row.key_index is None else row.key_index
    parts = []
    for s in range(len(row.query_bounds) - 1):
        keys = index[row.key_bounds[s] : row.key_bounds[s + 1]]
        own = row.query_bounds[s + 1] - row.query_bounds[s]
        parts.append(recurrence([x[keys] for x in given])[len(keys) - own :])
    return torch.cat(parts)


def gradients(outputs: Sequence[Tensor], leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The gradients of a random mix of the outputs."""
    generator = torch.Generator().manual_seed(9)
    mix = [torch.randn(x.shape, dtype=x.dtype, generator=generator) for x in outputs]
    return torch.autograd.grad(outputs, leaves, mix)
