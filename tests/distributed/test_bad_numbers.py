"""A loss or gradient that is not finite on one rank leaves weights and optimizer of all ranks as they were.

And a weight that is not finite on one rank is known to all of them.
"""

import math

import pytest

from isopref.testing.ranks import Ranks
from support import faults

PAIR = 3


def check(found: list[faults.Skip]) -> None:
    for skip in found:
        assert skip.moved == []
        assert skip.trains_on
        assert skip.report == (2, 1, 1, PAIR)


@pytest.mark.parametrize("fault", [math.nan, -math.inf])
@pytest.mark.parametrize("fused", [False, True])
def test_one_rank(fused: bool, fault: float) -> None:
    check([faults.bad_step("single", fused, fault, PAIR)])


@pytest.mark.parametrize("fault", [math.nan, -math.inf])
@pytest.mark.parametrize("loss", ["aot", "aot_unpaired", "bco_pair"])
def test_a_pair_of_a_coupled_loss(loss: str, fault: float) -> None:
    check([faults.bad_step("single", False, fault, PAIR, loss)])


@pytest.mark.parametrize(("mode", "fused", "fault"), [("ddp", False, math.nan), ("fsdp", True, -math.inf)])
def test_two_ranks(two_ranks: Ranks, mode: str, fused: bool, fault: float) -> None:
    check(two_ranks(faults.bad_step, mode, fused, fault, PAIR))


@pytest.mark.parametrize(("mode", "fault"), [("ddp", math.nan), ("fsdp", -math.inf)])
def test_a_bad_weight_of_one_rank_is_known_to_all(two_ranks: Ranks, mode: str, fault: float) -> None:
    for before, after in two_ranks(faults.bad_weight, mode, fault):
        assert before == []
        assert after == ["model.layers.0.mlp.up_proj.weight"]
