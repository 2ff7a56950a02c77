"""Two ranks and parts that text does not use: their weights are held, and nothing waits for their gradients."""

from typing import Any

import pytest

from isopref.testing import matrix
from isopref.testing.cells import Cell
from isopref.testing.exactness import measure
from isopref.testing.ranks import Ranks
from support.counting import shards_and_wholes
from support.decoders import gradient_norms


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


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize("family", ["whisper", "mllama"])
def test_decoders_without_their_encoder(two_ranks: Ranks, family: str, parallel: Any) -> None:
    alone = gradient_norms(family, "single", 1)
    for found in two_ranks(gradient_norms, family, parallel, 2):
        assert found == pytest.approx(alone, rel=1e-4)
