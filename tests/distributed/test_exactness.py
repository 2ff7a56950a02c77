"""The promise: every layout gives the oracle's gradient, loss and metrics."""

import pytest

from isopref.testing import matrix
from isopref.testing.equations import ALL_CASES
from isopref.testing.exactness import Cell, Found, batch
from isopref.testing.ranks import Ranks


def check(found: dict[Cell, Found]) -> None:
    assert len(found) == len(set(found)) > 50
    wrong = [
        f"{cell}: gradient {one.gradient_error:.1e}, loss {one.loss_error:.1e}, metrics {one.metric_error:.1e}"
        for cell, one in found.items()
        if not max(one.gradient_error, one.loss_error, one.metric_error) <= matrix.bound(cell)
    ]
    assert not wrong, "\n".join(wrong)


def test_one_rank() -> None:
    check(matrix.run(1, "single"))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("parallel", matrix.SPREADS[2])
def test_two_ranks(two_ranks: Ranks, parallel: str) -> None:
    check(matrix.run(2, parallel, two_ranks))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("parallel", matrix.SPREADS[4])
def test_four_ranks(four_ranks: Ranks, parallel: str) -> None:
    check(matrix.run(4, parallel, four_ranks))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_matrix_covers_what_is_promised(ranks: int) -> None:
    cells = matrix.cells(ranks)
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
