"""What a step costs besides computing: collectives and waits of the host."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from isopref.testing.cells import Cell
from isopref.testing.ranks import Ranks
from support.counting import SCATTERS, HostReads, count_step, dry_run_traces


def cells(parallel: str) -> tuple[Cell, Cell]:
    """The same batch in one microbatch a rank, and in four."""
    whole = Cell(ranks=2, parallel=parallel, cut="whole")  # type: ignore[arg-type]
    return whole, Cell(ranks=2, parallel=parallel, cut="pair")  # type: ignore[arg-type]


def reductions(counts: dict[str, int]) -> int:
    return sum(counts.get(name, 0) for name in ("ddp_buckets", *SCATTERS))


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_sync_last_reduces_like_one_microbatch(two_ranks: Ranks, parallel: str) -> None:
    one, four = (two_ranks(count_step, cell, False)[0] for cell in cells(parallel))
    assert (one[2], four[2]) == (1, 4)
    assert reductions(one[0]) > 0
    assert reductions(four[0]) == reductions(one[0])


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_sync_every_reduces_every_time(two_ranks: Ranks, parallel: str) -> None:
    cell = Cell(ranks=2, parallel=parallel, cut="pair", grad_sync="every")  # type: ignore[arg-type]
    one = two_ranks(count_step, cells(parallel)[0], False)[0]
    assert reductions(two_ranks(count_step, cell, False)[0][0]) == 4 * reductions(one[0])


@pytest.mark.parametrize("grad_sync", ["last", "every"])
def test_hsdp_reduces_over_replicas_once(four_ranks: Ranks, grad_sync: str) -> None:
    cell = Cell(ranks=4, parallel="hsdp", cut="pair", grad_sync=grad_sync)  # type: ignore[arg-type]
    one = four_ranks(count_step, Cell(ranks=4, parallel="hsdp", cut="whole"), False)[0]
    many = four_ranks(count_step, cell, False)[0]
    assert many[2] > one[2] == 1
    assert many[0]["all_reduce"] == one[0]["all_reduce"] > 0


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_metrics_take_one_collective_and_only_when_logged(two_ranks: Ranks, parallel: str) -> None:
    cell = cells(parallel)[1]
    silent, logged = (two_ranks(count_step, cell, logs)[0][0] for logs in (False, True))
    assert silent.get("all_reduce", 0) == silent.get("ddp_buckets", 0)  # gradients only
    assert logged["all_reduce"] == silent.get("all_reduce", 0) + 1
    assert {**logged, "all_reduce": 0} == {**silent, "all_reduce": 0}


def test_a_first_pass_takes_one_collective(two_ranks: Ranks) -> None:
    plain, coupled = (
        two_ranks(count_step, replace(cells("ddp")[1], objective=objective), False)[0][0]
        for objective in ("sigmoid", "aot")
    )
    assert coupled["all_reduce"] == plain.get("all_reduce", 0) + 1


@pytest.mark.parametrize(("checkpointing", "exchanges"), [(False, 8), (True, 10)])
def test_rows_that_ranks_split_are_exchanged_twice_a_layer(
    two_ranks: Ranks, checkpointing: bool, exchanges: int
) -> None:
    """In each of two layers, forward and backward, and again in a layer that recomputes. And one sum a microbatch."""
    split = replace(cells("fsdp")[0], context_parallel=2, checkpointing=checkpointing)
    one, many = (two_ranks(count_step, cell, False)[0] for cell in (split, replace(split, cut="pair")))
    assert (one[2], many[2]) == (1, 8)
    for counts, _, microbatches in (one, many):
        assert counts["all_to_all_single of a row"] == exchanges * microbatches
        assert counts["all_reduce of a row"] == microbatches
        assert reductions(counts) == reductions(one[0])


def test_ranks_that_split_rows_never_wait_for_the_device(two_ranks: Ranks) -> None:
    cell = replace(cells("ddp")[1], context_parallel=2)
    assert [two_ranks(count_step, cell, logs)[0][1] for logs in (False, True)] == [0, 0]


@pytest.mark.parametrize("changes", [{}, {"objective": "several_coupled"}, {"ld_alpha": 0.5, "wpo": True}])
def test_a_step_never_waits_for_the_device(changes: dict[str, Any]) -> None:
    assert [count_step(Cell(cut="pair", **changes), logs)[1] for logs in (False, True)] == [0, 0]


@pytest.mark.parametrize("read", [float, bool, int, "item", "tolist", "cpu", "numpy", "nonzero"])
def test_host_reads_are_counted(read: Any) -> None:
    tensor = torch.ones(1)
    with HostReads() as reads:
        getattr(tensor, read)() if isinstance(read, str) else read(tensor)
    assert reads.count == 1


@pytest.mark.parametrize("objective", ["sigmoid", "bco_pair"])
def test_dry_run_leaves_no_trace(objective: str) -> None:
    assert dry_run_traces(Cell(objective=objective)) == []
