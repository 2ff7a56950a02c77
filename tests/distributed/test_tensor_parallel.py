"""Ranks that compute every layer together: the same weights as one process, and every pair counted once.

One batch's gradient, loss and metrics are in the matrix (test_exactness.py).
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from isopref.batch.packing import Budget
from isopref.data.table import ExampleTable
from isopref.engine.optim import Kind
from isopref.models.policy import Policy
from isopref.models.shape import shape_of
from isopref.plan.layout import ONE_GPU
from isopref.plan.network import HOP_S, Network
from isopref.plan.together import Exchange
from isopref.score import score_table
from isopref.testing import matrix
from isopref.testing.cells import Cell
from isopref.testing.exactness import measure
from isopref.testing.models import random_pairs, tiny_model
from isopref.testing.oracle import relative_error
from isopref.testing.ranks import Ranks
from support import moving, trajectory
from support.mistakes import error_of
from support.native import EVEN_VOCABULARY, exchanges_of_two, tensor_parallel_scores

NATIVE = Cell(architecture="llama", native=True, parallel="fsdp", tensor_parallel=2)


@pytest.fixture(scope="module")
def expected() -> trajectory.Weights:
    return trajectory.by_oracle("llama")


def check(ranks: Ranks, cell: Cell, expected: trajectory.Weights) -> None:
    for weights in ranks(trajectory.by_layout, cell):
        assert relative_error(weights, expected) <= 1e-6  # norms and angles compute in float32 inside


def test_twenty_steps_on_two_ranks(two_ranks: Ranks, expected: trajectory.Weights) -> None:
    check(two_ranks, replace(NATIVE, ranks=2), expected)


@pytest.mark.parametrize("optim", ["adamw_skip", "muon"])
def test_optimizers_end_in_the_same_weights(two_ranks: Ranks, optim: Kind) -> None:
    alone = trajectory.by_layout(replace(NATIVE, parallel="single", tensor_parallel=1, cut="whole"), 0, optim)
    for weights in two_ranks(trajectory.by_layout, replace(NATIVE, ranks=2), 0, optim):
        assert relative_error(weights, alone) <= 1e-6


@pytest.mark.soak
def test_8bit_state_differs_by_its_rounding(two_ranks: Ranks) -> None:
    """A part of a matrix that is cut by columns has other blocks."""
    wide = replace(NATIVE, architecture="llama_wide", dtype="float32")
    alone = trajectory.by_layout(replace(wide, parallel="single", tensor_parallel=1, cut="whole"), 0, "adamw_8bit")
    first, second = two_ranks(trajectory.by_layout, replace(wide, ranks=2), 0, "adamw_8bit")
    assert 1e-4 < relative_error(first, alone) <= 2e-3
    assert relative_error(first, second) == 0.0


def test_a_reference_that_moves(two_ranks: Ranks) -> None:
    for found in two_ranks(moving.trained, replace(NATIVE, ranks=2, cut="pair", grad_sync="every"), 2, 0.6):
        for one, other in zip(found, moving.by_oracle(2, 0.6, "llama"), strict=True):
            assert relative_error(one, other) <= 1e-6


def test_replicas_of_shards_of_layers_in_parts() -> None:
    """Two replicas, two shards of each, two ranks to a layer; a tied weight, recomputing, reducing every time."""
    cell = Cell(
        architecture="llama_tied",
        native=True,
        dtype="float32",  # as all cells of OLMo-core's modules
        ranks=8,
        parallel="hsdp",
        tensor_parallel=2,
        cut="pair",
        grad_sync="every",
        checkpointing=True,
        own_weights=True,
    )
    with Ranks(8) as ranks:
        for found in ranks(measure, cell):
            assert max(found.gradient_error, found.loss_error, found.metric_error) <= matrix.bound(cell)


@pytest.mark.parametrize("parallel", ["fsdp", pytest.param("hsdp", marks=pytest.mark.soak)])
def test_twenty_steps_on_two_by_two(four_ranks: Ranks, expected: trajectory.Weights, parallel: Any) -> None:
    check(four_ranks, replace(NATIVE, ranks=4, parallel=parallel), expected)


def test_every_pair_is_scored_and_stored_once(four_ranks: Ranks) -> None:
    table = ExampleTable.from_tokens(random_pairs(9))
    expected = score_table(Policy(tiny_model("qwen3")), table, Budget("padded", 4096), device=torch.device("cpu"))
    found = four_ranks(tensor_parallel_scores)
    for scores, _ in found:
        np.testing.assert_allclose(scores.chosen, expected.chosen, rtol=1e-5)
        np.testing.assert_allclose(scores.rejected, expected.rejected, rtol=1e-5)
    assert sorted(answer for _, stored in found for answer in stored) == list(range(18))


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "olmo2"])
def test_ranks_exchange_what_a_plan_counts(two_ranks: Ranks, architecture: str) -> None:
    """As often; and of Llama, which has no norms of queries and keys, as much. On CPUs, other calls exchange those."""
    shape, tokens = shape_of(tiny_model(architecture, vocab_size=EVEN_VOCABULARY)), np.array([[128.0]])
    together = replace(ONE_GPU, parallel="fsdp", ranks=2, tensor=2)
    network = Network(inside=np.inf, between=np.inf)
    planned = Exchange.of(shape, together, network)
    for numbers in two_ranks(exchanges_of_two, architecture, 0):
        assert len(numbers) == pytest.approx(planned.seconds(tokens).item() / HOP_S)
        if architecture == "llama":
            assert sum(numbers) * 2 / 2 == planned.sent_bytes(tokens).item()
    again = replace(together, recompute=shape.layers)
    for numbers in two_ranks(exchanges_of_two, architecture, shape.layers):
        # torch may stop before the last reduction of a layer.
        counted = Exchange.of(shape, again, network).seconds(tokens).item() / HOP_S
        assert counted - shape.layers - 0.5 < len(numbers) < counted + 0.5


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("tensor_of_transformers", "is for OLMo-core's own modules. Set model.native: true"),
        ("tensor_with_ddp", "needs layout.parallel: fsdp or hsdp, not ddp"),
        ("padded_batch_in_parts", "tensor and context parallelism need packed rows, but the batch is padded."),
        ("tensor_of_three", "layout.tensor_parallel: 3 does not divide the number of processes, 2"),
    ],
)
def test_what_cannot_work_is_refused(two_ranks: Ranks, mistake: str, message: str) -> None:
    for error in two_ranks(error_of, mistake):
        assert error.startswith("ConfigError")
        assert message in error
