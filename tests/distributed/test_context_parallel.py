"""Ranks that split the tokens of every row: the operations, whole runs of steps, and what is refused.

One batch's gradient, loss and metrics are in the matrix (test_exactness.py), planted bugs in test_mutations.py.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from isopref.batch.packing import Budget
from isopref.data.table import ExampleTable
from isopref.models.policy import Policy
from isopref.models.shape import shape_of
from isopref.ops.attention import segment_attention
from isopref.plan.layout import ONE_GPU
from isopref.plan.network import HOP_S, Network
from isopref.plan.together import Exchange
from isopref.score import score_table
from isopref.testing.cells import Cell
from isopref.testing.models import random_pairs, tiny_model
from isopref.testing.oracle import relative_error
from isopref.testing.ranks import Ranks
from support import moving, splitting, trajectory
from support.mistakes import error_of
from support.segments import SHARED_PAIRS, random_qkv, random_sinks, segments_of

SPLIT = Cell(parallel="fsdp", context_parallel=2)


@pytest.fixture(scope="module")
def expected() -> trajectory.Weights:
    return trajectory.by_oracle()


def check(ranks: Ranks, cell: Cell, expected: trajectory.Weights) -> None:
    for weights in ranks(trajectory.by_layout, cell):
        assert relative_error(weights, expected) <= 1e-8


def test_between_exchanges_a_rank_has_all_tokens_of_its_heads_in_order(four_ranks: Ranks) -> None:
    x = torch.randn(12, 8, 3)
    for rank, (heads, back) in enumerate(four_ranks(splitting.there_and_back, x)):
        assert torch.equal(heads, x[:, 2 * rank : 2 * rank + 2])
        assert torch.equal(back, x[rank::4])


@pytest.mark.parametrize("architecture", ["llama", "bamba", "lfm2", "olmo_hybrid"])
def test_ranks_exchange_what_a_plan_counts(four_ranks: Ranks, architecture: str) -> None:
    """As often, and as much: on four ranks, also of heads that are repeated."""
    model = tiny_model(architecture)
    layout = replace(ONE_GPU, parallel="ddp", ranks=4, context=4, compute_bytes=4)
    planned = Exchange.of(shape_of(model), layout, Network(inside=np.inf, between=np.inf))
    for sizes in four_ranks(splitting.exchanged_bytes, architecture, 128):
        assert len(sizes) == pytest.approx(planned.calls_s / HOP_S)
        assert sum(sizes) == pytest.approx(planned.of_token * 128)


def test_a_compiled_exchange_is_one_graph(two_ranks: Ranks) -> None:
    for out, gradient, own_out, own_gradient in two_ranks(splitting.compiled, torch.randn(10, 4, 3)):
        assert torch.equal(out, own_out)
        assert torch.equal(gradient, own_gradient)


@pytest.mark.parametrize("options", [{}, {"window": 3}, {"softcap": 2.0}])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_attention_and_its_gradients(
    four_ranks: Ranks, options: dict[str, Any], with_sinks: bool, key_heads: int
) -> None:
    """On more ranks than key heads, too."""
    layout = [*SHARED_PAIRS, (-sum(length for length, _ in SHARED_PAIRS) % 4 + 4, [])]
    segments = segments_of(layout)
    q, k, v = (x.detach() for x in random_qkv(layout, heads=4, groups=key_heads))
    sinks = random_sinks(4).detach() if with_sinks else None
    weight = torch.randn(q.shape[1], 4, v.shape[2], dtype=q.dtype)
    options = {"scale": 0.3, **options}

    trained = [x.clone().requires_grad_() for x in ([q, k, v] if sinks is None else [q, k, v, sinks])]
    query, key, value, *_ = trained
    out = segment_attention(query, key, value, segments, sinks=None if sinks is None else trained[3], **options)
    expected = torch.autograd.grad((out * weight).sum(), trained)

    found = four_ranks(splitting.attended, (q, k, v), sinks, segments, weight, options)
    for rank, (own_out, gradients) in enumerate(found):
        torch.testing.assert_close(own_out, out[rank::4].detach(), rtol=0, atol=1e-12)
        for one, whole in zip(gradients[:3], expected[:3], strict=True):
            torch.testing.assert_close(one, whole[:, rank::4], rtol=0, atol=1e-12)
    if sinks is not None:  # each rank has the gradient of its own heads
        total = torch.stack([gradients[3] for _, gradients in found]).sum(dim=0)
        torch.testing.assert_close(total, expected[3], rtol=0, atol=1e-12)


def test_heads_that_ranks_do_not_divide_are_refused(four_ranks: Ranks) -> None:
    for error in four_ranks(splitting.wrong_heads):
        assert error.startswith(
            "ModelError: layout.context_parallel: 4 does not divide 5 heads (or channels) of a layer"
        )
        assert error.endswith("one of 1, 5.")


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_twenty_steps_on_two_ranks(two_ranks: Ranks, expected: trajectory.Weights, parallel: Any) -> None:
    check(two_ranks, replace(SPLIT, ranks=2, parallel=parallel), expected)


@pytest.mark.parametrize("size", [2, 4])
def test_twenty_steps_on_four_ranks(four_ranks: Ranks, expected: trajectory.Weights, size: int) -> None:
    check(four_ranks, replace(SPLIT, ranks=4, context_parallel=size), expected)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_reference_that_moves(two_ranks: Ranks, parallel: Any) -> None:
    """The moving reference of a model under DDP is on every rank; it splits rows as the model does, or not at all."""
    cell = replace(SPLIT, ranks=2, parallel=parallel, cut="pair", grad_sync="every")
    for found in two_ranks(moving.trained, cell, 2, 0.6):
        for one, other in zip(found, moving.by_oracle(2, 0.6), strict=True):
            assert relative_error(one, other) <= 1e-8


def test_every_pair_is_scored_and_stored_once(four_ranks: Ranks) -> None:
    table = ExampleTable.from_tokens(random_pairs(9))
    expected = score_table(Policy(tiny_model("qwen3")), table, Budget("padded", 4096), device=torch.device("cpu"))
    found = four_ranks(splitting.scores)
    for scores, _ in found:
        np.testing.assert_allclose(scores.chosen, expected.chosen, rtol=1e-5)
        np.testing.assert_allclose(scores.rejected, expected.rejected, rtol=1e-5)
    assert sorted(answer for _, stored in found for answer in stored) == list(range(18))


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("context_and_tensor", "layout.context_parallel cannot be combined with layout.tensor_parallel."),
        ("context_of_three", "layout.context_parallel: 3 does not divide the number of processes, 2"),
        (
            "context_with_states",
            "MambaForCausalLM has layers whose sequences cannot be split (backbone.layers.0.mixer)",
        ),
        ("padded_batch_split", "tensor and context parallelism need packed rows, but the batch is padded."),
        ("padded_row_split", "context parallelism needs packed rows (layout.rows: shared or packed)"),
        ("loader_of_all_ranks", "the ExampleLoader's dp_world_size is 2, but it must be 1"),
    ],
)
def test_what_cannot_work_is_refused(two_ranks: Ranks, mistake: str, message: str) -> None:
    for error in two_ranks(error_of, mistake):
        assert error.startswith("ConfigError")
        assert message in error
