"""Two ranks and a vision tower that takes no part: its weights are held, and nothing waits for their gradients."""

from typing import Any

import pytest

from isopref.testing import matrix
from isopref.testing.cells import Cell
from isopref.testing.exactness import measure
from isopref.testing.ranks import Ranks
from support.counting import shards_and_wholes


@pytest.mark.parametrize("adapter", [None, "lora"])
@pytest.mark.parametrize(("parallel", "grad_sync"), [("ddp", "last"), ("fsdp", "last"), ("fsdp", "every")])
def test_the_gradient_is_the_oracles(two_ranks: Ranks, parallel: Any, grad_sync: Any, adapter: Any) -> None:
    cell = Cell("gemma3_vision", ranks=2, parallel=parallel, grad_sync=grad_sync, adapter=adapter, cut="pair")
    for found in two_ranks(measure, cell):
        assert max(found.gradient_error, found.loss_error, found.metric_error) <= matrix.bound(cell)


def test_offloaded_and_recomputed_it_still_is(two_ranks: Ranks) -> None:
    cell = Cell("gemma3_vision", ranks=2, parallel="fsdp", offload=True, checkpointing=True, cut="pair")
    for found in two_ranks(measure, cell):
        assert found.gradient_error <= matrix.bound(cell)


def test_fsdp_shards_it_too(two_ranks: Ranks) -> None:
    parts = {"vision_tower", "multi_modal_projector", "language_model"}
    for sharded, whole in two_ranks(shards_and_wholes, Cell("gemma3_vision", ranks=2, parallel="fsdp")):
        assert (sharded, whole) == (parts, set())
