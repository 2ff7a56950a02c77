"""The gated delta rule (Gated DeltaNet: Yang et al. 2024, eq. 10) over the sequences of a packed row.

    S_t = exp(g_t) (I - beta_t k_t k_t') S_(t-1) + beta_t k_t v_t',    o_t = S_t' q_t / sqrt(width),    q, k of length 1

Sequences with a common prefix share its state (levels.py). `chunk_rule` is the rule in plain torch and the
specification. On CUDA in half precision, the kernels of flash-linear-attention replace it if that package is installed.

Dimensions: T tokens of the row, N parts of one depth, L tokens of the longest, H heads, K and V widths of a head's keys
and values, C tokens of a chunk, M chunks.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from isopref.ops import fla
from isopref.ops.levels import CHUNK, Level, Levels, in_batches, over_levels

EPSILON = 1e-6  # for normalising queries and keys, as in all models with this rule


class Inputs(NamedTuple):
    """The rule's inputs for each token. Queries and keys have length 1 (`unit`), and may have fewer heads."""

    q: Tensor  # T, H, K
    k: Tensor  # T, H, K
    v: Tensor  # T, H, V
    g: Tensor  # T, H: logarithm of the decay
    beta: Tensor  # T, H


def unit(x: Tensor) -> Tensor:
    """Queries or keys, scaled to length 1. In a compiled layer this is part of the kernel that makes them."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt((wide * wide).sum(dim=-1, keepdim=True) + EPSILON)).to(x.dtype)


def tree_delta_rule(inputs: Inputs, levels: Levels) -> Tensor:
    """The rule's output for each token of the row: T, H, V."""
    fused = inputs.q.is_cuda and inputs.q.dtype in (torch.bfloat16, torch.float16) and kernel().run is not None
    rule = _fused if fused else _eager
    return over_levels(lambda given, level, state: rule(Inputs(*given), level, state), inputs, levels)


def kernel() -> fla.Kernel:
    """flash-linear-attention's rule."""
    return fla.load("gated_delta_rule", "chunk_gated_delta_rule", has_tiles=True)


def _fused(inputs: Inputs, level: Level, state: Tensor | None) -> tuple[Tensor, Tensor]:
    out, final = kernel().run(
        *(x[None] for x in inputs),
        initial_state=state,
        output_final_state=True,
        cu_seqlens=level.offsets,
        chunk_indices=level.chunks,  # otherwise they would be computed on the host, which waits for the device
    )
    return out[0], final


def _eager(inputs: Inputs, level: Level, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """In padded batches: padding has beta = g = 0, which leaves the state unchanged."""
    return in_batches(lambda given, before: chunk_rule(Inputs(*given), before), inputs, level, state)


def chunk_rule(inputs: Inputs, state_NHKV: Tensor | None) -> tuple[Tensor, Tensor]:
    """The rule for N sequences of L tokens, from their initial states: the output of each token, and the final states.

    Inputs and output have N, L instead of T. Within a chunk, the updates of the state are one triangular system (the UT
    transform of Yang et al. 2024, sec. 3.3).
    """
    _, length, heads, _ = inputs.v.shape
    chunk = min(CHUNK, length)
    wide = torch.promote_types(inputs.q.dtype, torch.float32)

    def chunks(x: Tensor) -> Tensor:  # N, H, M, C, ...
        x = x.to(wide).repeat_interleave(heads // x.shape[2], dim=2).transpose(1, 2)
        x = pad(x, [*([0, 0] * (x.ndim - 3)), 0, -length % chunk])
        return x.reshape(*x.shape[:2], -1, chunk, *x.shape[3:])

    q, k, v, g, beta = (chunks(x) for x in inputs)
    q = q * q.shape[-1] ** -0.5
    decay = g.cumsum(dim=-1)  # log of the share of the chunk's initial state that is left at each token
    between = (decay[..., :, None] - decay[..., None, :]).tril().exp().tril()  # the share of token j's update left at i
    system = (k * beta[..., None]) @ k.mT * between
    started = decay.exp()[..., None]
    solved = torch.linalg.solve_triangular(
        system, beta[..., None] * torch.cat([v, k * started], dim=-1), upper=False, unitriangular=True
    )
    added, removed = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    within = q @ k.mT * between
    from_state = q * started
    left = (decay[..., -1:] - decay).exp()[..., None]  # the share of each token's update left at the end of the chunk
    state = v.new_zeros(len(v), heads, k.shape[-1], v.shape[-1]) if state_NHKV is None else state_NHKV.to(wide)
    outputs = []
    for m in range(q.shape[2]):
        update = added[:, :, m] - removed[:, :, m] @ state
        outputs.append(from_state[:, :, m] @ state + within[:, :, m] @ update)
        state = state * started[:, :, m, -1:] + (k * left)[:, :, m].mT @ update
    out = torch.cat(outputs, dim=2)[:, :, :length].transpose(1, 2)
    return out.to(inputs.v.dtype), state
