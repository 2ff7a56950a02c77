"""The promise: every layout gives the oracle's gradient, loss and metrics. To select cells: -k "hsdp and aot"."""

import pytest

from isopref.testing import matrix
from isopref.testing.equations import ALL_CASES
from isopref.testing.exactness import Cell, Found, batch, measure
from isopref.testing.ranks import Ranks
from support.retry import retried


def check(cell: Cell, found: Found) -> None:
    bound = matrix.bound(cell)
    assert found.gradient_error <= bound
    assert found.loss_error <= bound
    assert found.metric_error <= bound


@pytest.mark.parametrize("cell", matrix.cells(1), ids=str)
def test_one_rank(cell: Cell) -> None:
    check(cell, measure(cell))


@pytest.mark.parametrize("cell", matrix.cells(2), ids=str)
def test_two_ranks(two_ranks: Ranks, cell: Cell) -> None:
    check(cell, retried(two_ranks, measure, cell)[0])


@pytest.mark.parametrize("cell", matrix.cells(4), ids=str)
def test_four_ranks(four_ranks: Ranks, cell: Cell) -> None:
    check(cell, retried(four_ranks, measure, cell)[0])


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_matrix_covers_what_is_promised(ranks: int) -> None:
    cells = matrix.cells(ranks)
    assert len(cells) == len(set(cells)) > 50
    for name in (
        "rows",
        "cut",
        "weighting",
        "grad_sync",
        "checkpointing",
        "own_weights",
        "reverse",
        "num_pairs",
        "nll_weight",
        "ld_alpha",
        "wpo",
        "balance_weight",
        "collated",
        "context",
    ):
        assert len({getattr(cell, name) for cell in cells}) > 1, name
    for parallel in matrix.SPREADS[ranks]:
        assert {cell.objective for cell in cells if cell.parallel == parallel} == set(ALL_CASES)
    assert {cell.parallel for cell in cells} == set(matrix.SPREADS[ranks])


@pytest.mark.parametrize("num_pairs", [3, 8])
def test_the_batch_has_long_answers_on_both_sides(num_pairs: int) -> None:
    pairs, _ = batch(num_pairs)
    assert max(len(pair.chosen) for pair in pairs) > 30
    assert max(len(pair.rejected) for pair in pairs) > 30
