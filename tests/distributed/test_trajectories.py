"""Twenty optimizer steps end in the same weights under every layout."""

import numpy as np
import pytest
import torch

from isopref.testing.cells import Cell
from isopref.testing.oracle import relative_error
from isopref.testing.ranks import Ranks
from support import trajectory

LAYOUTS = {
    1: [Cell(cut="whole"), Cell(rows="padded", cut="pair")],
    2: [Cell(rows="packed", ranks=2, parallel="fsdp")],
    4: [
        Cell(ranks=4, parallel="ddp"),
        Cell(rows="padded_separate", ranks=4, parallel="hsdp", grad_sync="every", checkpointing=True),
    ],
}


@pytest.fixture(scope="module")
def expected() -> trajectory.Weights:
    return trajectory.by_oracle()


@pytest.mark.parametrize("cell", LAYOUTS[1], ids=str)
def test_one_rank(cell: Cell, expected: trajectory.Weights) -> None:
    assert relative_error(trajectory.by_layout(cell), expected) <= 1e-8


@pytest.mark.parametrize("cell", LAYOUTS[2], ids=str)
def test_two_ranks(two_ranks: Ranks, cell: Cell, expected: trajectory.Weights) -> None:
    for weights in two_ranks(trajectory.by_layout, cell):
        assert relative_error(weights, expected) <= 1e-8


@pytest.mark.parametrize("cell", LAYOUTS[4], ids=str)
def test_four_ranks(four_ranks: Ranks, cell: Cell, expected: trajectory.Weights) -> None:
    for weights in four_ranks(trajectory.by_layout, cell):
        assert relative_error(weights, expected) <= 1e-8


def test_training_moves_the_weights(expected: trajectory.Weights) -> None:
    from isopref.testing.models import tiny_model

    start = {n: p.detach() for n, p in tiny_model("gpt2", dtype=torch.float64).named_parameters()}
    assert relative_error(expected, start) > 0.01


def test_float32_drift_is_noise() -> None:
    """In float32 two layouts part by rounding only: over seeds, the difference they end with has mean zero.

    Three standard errors, since one would be exceeded by chance in one case of three.
    """
    seeds = range(10)
    layouts = [Cell(dtype="float32", cut="whole"), Cell(dtype="float32", rows="padded", cut="pair")]
    losses = np.array(
        [[trajectory.loss_after(trajectory.by_layout(cell, seed), seed=seed) for cell in layouts] for seed in seeds]
    )
    drift = losses[:, 1] - losses[:, 0]
    standard_error = drift.std(ddof=1) / np.sqrt(len(drift))
    assert np.abs(drift).max() < 1e-4
    assert abs(drift.mean()) <= 3 * standard_error
