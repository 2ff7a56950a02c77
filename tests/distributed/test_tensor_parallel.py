"""Ranks that compute every layer together: the same weights as one process, and every pair counted once.

One batch's gradient, loss and metrics are in the matrix (test_exactness.py).
"""

import numpy as np
import pytest
import torch

from isopref.data.packing import Budget
from isopref.data.table import PairTable
from isopref.models.policy import Policy
from isopref.score import score_table
from isopref.testing import trajectory
from isopref.testing.exactness import Cell
from isopref.testing.mistakes import error_of
from isopref.testing.models import random_pairs, tiny_model
from isopref.testing.native import tensor_parallel_scores
from isopref.testing.oracle import relative_error
from isopref.testing.ranks import Ranks

NATIVE = Cell(architecture="llama", native=True, parallel="fsdp", tensor_parallel=2)


@pytest.fixture(scope="module")
def expected() -> trajectory.Weights:
    return trajectory.by_oracle("llama")


def check(ranks: Ranks, cell: Cell, expected: trajectory.Weights) -> None:
    for weights in ranks(trajectory.by_layout, cell):
        assert relative_error(weights, expected) <= 1e-6  # norms and angles compute in float32 inside


def test_twenty_steps_on_two_ranks(two_ranks: Ranks, expected: trajectory.Weights) -> None:
    check(two_ranks, Cell(**{**vars(NATIVE), "ranks": 2}), expected)


@pytest.mark.parametrize("parallel", ["fsdp", "hsdp"])
def test_twenty_steps_on_two_by_two(four_ranks: Ranks, expected: trajectory.Weights, parallel: str) -> None:
    check(four_ranks, Cell(**{**vars(NATIVE), "ranks": 4, "parallel": parallel}), expected)


def test_every_pair_is_scored_and_stored_once(four_ranks: Ranks) -> None:
    table = PairTable.from_tokens(random_pairs(9))
    expected = score_table(Policy(tiny_model("qwen3")), table, Budget("padded", 4096), device=torch.device("cpu"))
    found = four_ranks(tensor_parallel_scores)
    for scores, _ in found:
        np.testing.assert_allclose(scores.chosen, expected.chosen, rtol=1e-5)
        np.testing.assert_allclose(scores.rejected, expected.rejected, rtol=1e-5)
    assert sorted(pair for _, stored in found for pair in stored) == list(range(9))


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("tensor_of_transformers", "is for OLMo-core's own modules. Set model.native: true"),
        ("tensor_with_ddp", "needs layout.parallel: fsdp or hsdp, not ddp"),
        ("tensor_of_three", "layout.tensor_parallel: 3 does not divide the number of processes, 2"),
    ],
)
def test_what_cannot_work_is_refused(two_ranks: Ranks, mistake: str, message: str) -> None:
    for error in two_ranks(error_of, mistake):
        assert error.startswith("ConfigError")
        assert message in error
