"""The promise: every layout gives the oracle's gradient, loss and metrics. To select cells: -k "hsdp and aot"."""

from dataclasses import fields, replace

import pytest

from isopref.testing import matrix
from isopref.testing.cells import NATIVE, STATES, Cell, batch
from isopref.testing.equations import ALL_CASES
from isopref.testing.exactness import Found, measure
from isopref.testing.ranks import Ranks
from support.retry import retried


def check(cell: Cell, found: Found) -> None:
    assert found.gradient_error <= matrix.bound(cell)
    assert found.loss_error <= matrix.value_bound(cell)
    assert found.metric_error <= matrix.value_bound(cell)


@pytest.mark.parametrize("cell", matrix.thinned(1), ids=str)
def test_one_rank(cell: Cell) -> None:
    check(cell, measure(cell))


@pytest.mark.parametrize("cell", matrix.thinned(2), ids=str)
def test_two_ranks(two_ranks: Ranks, cell: Cell) -> None:
    check(cell, retried(two_ranks, measure, cell)[0])


@pytest.mark.parametrize("cell", matrix.thinned(4), ids=str)
def test_four_ranks(four_ranks: Ranks, cell: Cell) -> None:
    check(cell, retried(four_ranks, measure, cell)[0])


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_matrix_covers_what_is_promised(ranks: int) -> None:
    cells = matrix.thinned(ranks)
    assert len(cells) == len(set(cells)) > 50
    on_ranks = () if ranks == 1 else ("context_parallel",)
    for name in (
        *on_ranks,
        "rows",
        "cut",
        "weighting",
        "grad_sync",
        "checkpointing",
        "offload_activations",
        "mlp_tile_tokens",
        "own_weights",
        "reverse",
        "num_pairs",
        "nll_weight",
        "ld_alpha",
        "wpo",
        "balance_weight",
        "collated",
        "context",
        "float8",
    ):
        assert len({getattr(cell, name) for cell in cells}) > 1, name
    for parallel in matrix.SPREADS[ranks]:
        assert {cell.objective for cell in cells if cell.parallel == parallel} == set(ALL_CASES)
    assert {cell.parallel for cell in cells} == set(matrix.SPREADS[ranks])


def test_split_rows_of_every_kind_of_layer_run_in_replicas_of_shards() -> None:
    cells = [cell for cell in matrix.thinned(4) if cell.parallel == "hsdp" and cell.context_parallel > 1]
    assert {cell.architecture for cell in cells if cell.native} == set(NATIVE)
    assert set(STATES) <= {cell.architecture for cell in cells if not cell.native}


def pairs_of_values(cells: list[Cell]) -> set[tuple[str, object, str]]:
    """Every value of every field beside the kind of row it runs with; which mode it runs in does not count."""
    names = [field.name for field in fields(Cell) if field.name != "parallel"]
    return {(name, getattr(cell, name), cell.rows) for cell in cells for name in names}


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_turns_leave_out_no_pair_of_a_value_and_a_kind_of_row(ranks: int) -> None:
    every, kept = matrix.cells(ranks), matrix.thinned(ranks)
    assert set(kept) <= set(every)
    assert pairs_of_values(kept) == pairs_of_values(every)
    assert {replace(cell, parallel="single") for cell in kept} == {replace(cell, parallel="single") for cell in every}


@pytest.mark.parametrize("num_pairs", [3, 8])
def test_the_batch_has_long_answers_on_both_sides(num_pairs: int) -> None:
    pairs, _ = batch(num_pairs)
    assert max(len(pair.chosen) for pair in pairs) > 30
    assert max(len(pair.rejected) for pair in pairs) > 30
