"""The state space of Mamba2 (Dao and Gu 2024, eq. 2 with a decay per head) over the sequences of a packed row.

    S_t = exp(g_t) S_(t-1) + dt_t b_t x_t',    y_t = S_t' c_t

Sequences with a common prefix share its state (levels.py). `chunk_scan` is the recurrence in plain torch and the
specification. On CUDA in half precision, flash-linear-attention's kernels for simple gated linear attention replace it
if that package is installed: the same recurrence with queries c, keys b and values dt x.

Dimensions: T tokens of the row, N parts of one depth, L tokens of the longest, H heads, G groups of R heads that share
b and c, K and V widths of a head's b and x, C tokens of a chunk, M chunks.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from isopref.ops import fla
from isopref.ops.levels import CHUNK, Level, Levels, in_batches, over_levels


class Inputs(NamedTuple):
    """The recurrence's inputs for each token."""

    c: Tensor  # T, G, K
    b: Tensor  # T, G, K
    x: Tensor  # T, H, V
    dt: Tensor  # T, H: float32 or wider
    g: Tensor  # T, H: logarithm of the decay, float32 or wider


def tree_state_space(inputs: Inputs, levels: Levels) -> Tensor:
    """The recurrence's output for each token of the row: T, H, V."""
    fused = inputs.x.is_cuda and inputs.x.dtype in (torch.bfloat16, torch.float16) and kernel().run is not None
    scan = _fused if fused else chunk_scan

    def rule(given: tuple[Tensor, ...], level: Level, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """In padded batches: padding has dt = g = 0, which leaves the state unchanged."""
        return in_batches(lambda batch, before: scan(Inputs(*batch), before), given, level, state)

    return over_levels(rule, inputs, levels)


def kernel() -> fla.Kernel:
    """flash-linear-attention's simple gated linear attention."""
    return fla.load("simple_gla", "chunk_simple_gla", has_tiles=False)


def _fused(inputs: Inputs, state_NHKV: Tensor | None) -> tuple[Tensor, Tensor]:
    """Takes a padded batch: with `cu_seqlens`, the kernel would wait for the device to count the chunks."""
    share = inputs.x.shape[2] // inputs.b.shape[2]
    values = inputs.x * inputs.dt[..., None]
    out, last = kernel().run(
        inputs.c.repeat_interleave(share, dim=2),
        inputs.b.repeat_interleave(share, dim=2),
        values.to(inputs.x.dtype),
        g=inputs.g,
        scale=1.0,
        initial_state=state_NHKV,
        output_final_state=True,
    )
    return out, last


def chunk_scan(inputs: Inputs, state_NHKV: Tensor | None) -> tuple[Tensor, Tensor]:
    """The recurrence for N sequences of L tokens, from their initial states: the outputs, and the final states.

    Inputs and output have N, L instead of T. Within a chunk, the recurrence is a product with a masked matrix (Dao and
    Gu 2024, sec. 6), whose factor from b and c is the same for all heads of a group.
    """
    length, groups = inputs.b.shape[1:3]
    chunk = min(CHUNK, length)
    wide = torch.promote_types(inputs.x.dtype, torch.float32)

    def chunks(x: Tensor) -> Tensor:  # N, G, R, M, C, ...; R is 1 for b and c
        x = x.to(wide).unflatten(2, (groups, -1)).movedim(1, 3)
        x = pad(x, [*([0, 0] * (x.ndim - 4)), 0, -length % chunk])
        chunked: Tensor = x.unflatten(3, (-1, chunk))
        return chunked

    c, b, x, dt, g = (chunks(one) for one in inputs)
    values = x * dt[..., None]
    # The share of token j's update that is left at token i. Each sum of g starts after j, because a difference of two
    # longer sums would lose digits.
    between = g[..., None].expand(*g.shape, chunk).tril(-1).cumsum(dim=-2).exp().tril()
    started = g.cumsum(dim=-1).exp()[..., None]  # the share of the chunk's initial state that is left at each token
    within = c @ b.mT * between
    added = (b * between[..., -1, :, None]).mT @ values
    state = torch.zeros_like(added[:, :, :, 0])
    if state_NHKV is not None:
        state = state_NHKV.to(wide).unflatten(1, (groups, -1))
    before = []
    for left, more in zip(started[..., -1:, :].unbind(dim=3), added.unbind(dim=3), strict=True):
        before.append(state)
        state = state * left + more
    out = within @ values + c @ torch.stack(before, dim=3) * started
    out = out.flatten(3, 4)[:, :, :, :length].movedim(3, 1).flatten(2, 3)
    return out.to(inputs.x.dtype), state.flatten(1, 2)
