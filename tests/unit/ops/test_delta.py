"""The gated delta rule over a row, against its recurrence over each sequence and transformers' own function."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus

from isopref.models.tree import levels_of
from isopref.ops.delta import Inputs, chunk_rule, tree_delta_rule, unit
from isopref.ops.levels import CHUNK
from support.recurrences import ROW_TOKENS, gradients, one_by_one, segments_of_trees


def inputs(*tokens: int, seed: int = 0) -> Inputs:
    """Two heads of queries and keys, four of values."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((2, 6), (2, 6), (4, 5), (4,), (4,))
    drawn = [torch.randn(*tokens, *shape, dtype=torch.float64, generator=generator) for shape in shapes]
    drawn[3], drawn[4] = -softplus(drawn[3] - 2), drawn[4].sigmoid()
    return Inputs(*(x.requires_grad_() for x in drawn))


def scaled(given: Inputs) -> Inputs:
    return given._replace(q=unit(given.q), k=unit(given.k))


def recurrence(given: Inputs, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """One sequence, token by token, straight from the equation: T, ... in and out."""
    q, k = (
        (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(2, dim=1) for x in (given.q, given.k)
    )
    state = torch.zeros(4, 6, 5, dtype=torch.float64) if state is None else state
    out = []
    for t in range(len(q)):
        state = given.g[t].exp()[:, None, None] * state
        known = torch.einsum("hkv,hk->hv", state, k[t])
        state = state + torch.einsum("hk,hv->hkv", k[t], given.beta[t][:, None] * (given.v[t] - known))
        out.append(torch.einsum("hkv,hk->hv", state, q[t]) / 6**0.5)
    return torch.stack(out), state


@pytest.mark.parametrize("length", [1, 7, CHUNK, 2 * CHUNK + 3])
@pytest.mark.parametrize("started", [False, True])
def test_chunks_are_the_recurrence(length: int, started: bool) -> None:
    """Outputs, last state, and the gradients of all inputs, the first state among them."""
    given = inputs(1, length)
    state = (
        torch.randn(1, 4, 6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) if started else None
    )
    leaves = [*given, *([] if state is None else [state.requires_grad_()])]
    found = chunk_rule(scaled(given), state)
    expected = recurrence(Inputs(*(x[0] for x in given)), None if state is None else state[0])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one[0], other, rtol=0, atol=1e-11)
    ours, theirs = gradients([x[0] for x in found], leaves), gradients(list(expected), leaves)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def test_chunks_are_transformers_own() -> None:
    from transformers.models.qwen3_next import modeling_qwen3_next as own

    q, k, v, g, beta = (x.detach().float() for x in inputs(2, 150))
    state = torch.randn(2, 4, 6, 5)
    rule: Any = getattr(own.torch_chunk_gated_delta_rule, "__wrapped__", own.torch_chunk_gated_delta_rule)
    expected = rule(
        q.repeat_interleave(2, dim=2), k.repeat_interleave(2, dim=2), v, g=g, beta=beta, initial_state=state,
        output_final_state=True, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    for one, other in zip(chunk_rule(Inputs(unit(q), unit(k), v, g, beta), state), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["shared", "packed"])
def test_every_sequence_of_a_row_is_computed_as_if_alone(kind: Any) -> None:
    """Trees of several depths: outputs, and gradients that reach a prompt through the states of its answers."""
    row = segments_of_trees(kind)
    given = inputs(ROW_TOKENS)
    found = tree_delta_rule(scaled(given), levels_of(row))
    expected = one_by_one(row, given, lambda own: recurrence(Inputs(*own), None)[0])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)
    for one, other in zip(gradients([found], given), gradients([expected], given), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)
