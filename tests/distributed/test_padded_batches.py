"""Padded batches of OLMo-core's form, with unequal shares on the ranks, give the oracle's gradient too."""

import pytest

from isopref.testing.cells import Cell
from isopref.testing.ranks import Ranks
from support.counting import padded_gradient_error

EVERYONE = list(range(8))


@pytest.mark.parametrize("microbatch_tokens", [150, 320, 4096])
@pytest.mark.parametrize("weighting", ["token", "completion", "example"])
def test_one_rank(microbatch_tokens: int, weighting: str) -> None:
    cell = Cell(weighting=weighting)  # type: ignore[arg-type]
    assert padded_gradient_error(cell, [EVERYONE], microbatch_tokens) <= 1e-10


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize("microbatch_tokens", [150, 4096])
def test_three_pairs_against_five(two_ranks: Ranks, parallel: str, microbatch_tokens: int) -> None:
    cell = Cell(ranks=2, parallel=parallel)  # type: ignore[arg-type]
    for error in two_ranks(padded_gradient_error, cell, [EVERYONE[:3], EVERYONE[3:]], microbatch_tokens):
        assert error <= 1e-10


@pytest.mark.parametrize("objective", ["aot", "bco_pair"])
def test_coupled_pairs_of_two_ranks(two_ranks: Ranks, objective: str) -> None:
    cell = Cell(ranks=2, parallel="ddp", objective=objective)
    for error in two_ranks(padded_gradient_error, cell, [EVERYONE[:3], EVERYONE[3:]], 150):
        assert error <= 1e-10
