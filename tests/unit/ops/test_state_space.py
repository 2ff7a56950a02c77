"""The state space of Mamba2 over a row, against its recurrence over each sequence and transformers' own function."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus

from isopref.models.tree import levels_of
from isopref.ops import state_space
from isopref.ops.fla import Kernel
from isopref.ops.levels import CHUNK
from isopref.ops.state_space import Inputs, chunk_scan, tree_state_space
from support.recurrences import ROW_TOKENS, gradients, one_by_one, segments_of_trees

LENGTHS = [1, 7, CHUNK, 2 * CHUNK + 3]


def inputs(*tokens: int, seed: int = 0) -> Inputs:
    """Two groups of two heads; some states decay slowly, some fast."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((2, 6), (2, 6), (4, 5), (4,))
    c, b, x, dt = (torch.randn(*tokens, *shape, dtype=torch.float64, generator=generator) for shape in shapes)
    dt = softplus(dt)
    g = -dt * torch.tensor([0.01, 0.1, 1.0, 8.0], dtype=torch.float64)
    return Inputs(*(one.requires_grad_() for one in (c, b, x, dt, g)))


def recurrence(given: Inputs, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """One sequence, token by token, straight from the equation: T, ... in and out."""
    c, b = (one.repeat_interleave(2, dim=1) for one in (given.c, given.b))
    state = torch.zeros(4, 6, 5, dtype=torch.float64) if state is None else state
    out = []
    for t in range(len(c)):
        added = torch.einsum("h,hk,hv->hkv", given.dt[t], b[t], given.x[t])
        state = given.g[t].exp()[:, None, None] * state + added
        out.append(torch.einsum("hkv,hk->hv", state, c[t]))
    return torch.stack(out), state


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("started", [False, True])
def test_chunks_are_the_recurrence(length: int, started: bool) -> None:
    """Outputs, last state, and the gradients of all inputs, the first state among them."""
    given = inputs(1, length)
    generator = torch.Generator().manual_seed(1)
    state = torch.randn(1, 4, 6, 5, dtype=torch.float64, generator=generator).requires_grad_() if started else None
    found = chunk_scan(given, state)
    expected = recurrence(Inputs(*(x[0] for x in given)), None if state is None else state[0])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one[0], other, rtol=0, atol=1e-11)
    leaves = [*given, *([] if state is None else [state])]
    ours, theirs = gradients([x[0] for x in found], leaves), gradients(expected, leaves)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def test_fast_decay_costs_no_digits() -> None:
    """In float32, tokens after one that erases the state are as exact as the first ones."""
    given = inputs(1, CHUNK)
    with torch.no_grad():
        given.g[:, :8] = -500.0
        given.g[:, 8:] = -0.001
    narrow = Inputs(*(x.detach().float() for x in given))
    found = chunk_scan(narrow, None)[0]
    expected = recurrence(Inputs(*(x[0].double() for x in narrow)), None)[0]
    error = (found[0].double() - expected).norm(dim=(1, 2)) / expected.norm(dim=(1, 2))
    assert float(error.max()) <= 5e-7


def test_chunks_are_transformers_own() -> None:
    from transformers.models.bamba import modeling_bamba as own

    c, b, x, dt, _ = (one.detach().float() for one in inputs(2, 150))
    decay = -torch.tensor([0.01, 0.1, 1.0, 8.0])
    state = torch.randn(2, 4, 6, 5, generator=torch.Generator().manual_seed(1))
    scan: Any = own.mamba2_chunk_scan
    out, last = scan(x, dt, decay, b, c, 16, initial_states=state.mT, return_final_states=True)
    found = chunk_scan(Inputs(c, b, x, dt, dt * decay), state)
    torch.testing.assert_close(found[0], out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[1], last.mT, rtol=1e-5, atol=1e-5)


def simple_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, *, scale: float, initial_state: Tensor | None, output_final_state: bool
) -> tuple[Tensor, Tensor]:
    """What flash-linear-attention documents for its kernel: N, L and as many heads of queries and keys as of values."""
    assert output_final_state
    assert q.dtype == k.dtype == v.dtype
    assert g.dtype == torch.float64
    state = torch.zeros(len(v), v.shape[2], q.shape[-1], v.shape[-1], dtype=v.dtype)
    state = state if initial_state is None else initial_state
    out = []
    for t in range(q.shape[1]):
        state = g[:, t].exp()[..., None, None] * state + k[:, t, :, :, None] * v[:, t, :, None]
        out.append(torch.einsum("nhkv,nhk->nhv", state, q[:, t] * scale))
    return torch.stack(out, dim=1), state


@pytest.mark.parametrize("started", [False, True])
def test_the_kernel_is_given_what_the_recurrence_says(started: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the formula of the kernel; the kernel itself is compared in tests/gpu."""
    monkeypatch.setattr(state_space, "kernel", lambda: Kernel(simple_gla))
    given = inputs(3, 40)
    state = torch.randn(3, 4, 6, 5, dtype=torch.float64) if started else None
    for one, other in zip(state_space._fused(given, state), chunk_scan(given, state), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-11)


@pytest.mark.parametrize("kind", ["shared", "packed"])
def test_every_sequence_of_a_row_is_computed_as_if_alone(kind: Any) -> None:
    """Trees of several depths: outputs, and gradients that reach a prompt through the states of its answers."""
    row = segments_of_trees(kind)
    given = inputs(ROW_TOKENS)
    found = tree_state_space(given, levels_of(row))
    expected = one_by_one(row, given, lambda own: recurrence(Inputs(*own), None)[0])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)
    for one, other in zip(gradients([found], given), gradients([expected], given), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)
