"""A reference that moves, on two ranks: the shards of the one follow those of the other."""

import pytest

from isopref.testing import oracle
from isopref.testing.cells import Cell
from isopref.testing.ranks import Ranks
from support.moving import by_oracle, trained


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize("grad_sync", ["last", "every"])
def test_two_ranks(two_ranks: Ranks, parallel: str, grad_sync: str) -> None:
    cell = Cell(ranks=2, parallel=parallel, grad_sync=grad_sync, cut="pair", split="uneven")  # type: ignore[arg-type]
    for found in two_ranks(trained, cell, 2, 0.6):
        for one, other in zip(found, by_oracle(2, 0.6), strict=True):
            assert oracle.relative_error(one, other) < 1e-10
