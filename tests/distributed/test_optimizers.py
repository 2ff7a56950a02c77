"""Optimizers end in the same weights however the model is sharded."""

import pytest

from isopref.engine.optim import Kind
from isopref.testing.cells import Cell
from isopref.testing.oracle import relative_error
from isopref.testing.ranks import Ranks
from support import trajectory


@pytest.mark.parametrize("optim", ["adamw_skip", "muon"])
@pytest.mark.parametrize("parallel", ["ddp", "fsdp", "hsdp"])
def test_two_ranks(two_ranks: Ranks, parallel: str, optim: Kind) -> None:
    expected = trajectory.by_layout(Cell(cut="whole"), 0, optim)
    for weights in two_ranks(trajectory.by_layout, Cell(ranks=2, parallel=parallel), 0, optim):  # type: ignore[arg-type]
        assert relative_error(weights, expected) <= 1e-8


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_8bit_state_differs_by_its_rounding(two_ranks: Ranks, parallel: str) -> None:
    """A shard has blocks of its own, or is too small for them, so that the state is rounded otherwise."""
    one, two = Cell(cut="whole", dtype="float32"), Cell(ranks=2, parallel=parallel, dtype="float32")  # type: ignore[arg-type]
    expected = trajectory.by_layout(one, 0, "adamw_8bit")
    first, second = two_ranks(trajectory.by_layout, two, 0, "adamw_8bit")
    assert relative_error(first, expected) <= 5e-3
    assert relative_error(first, second) == 0.0
