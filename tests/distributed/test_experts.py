"""Two ranks and an adapter on fused experts, which computes beside their weights."""

from dataclasses import replace
from typing import Any

import pytest

from isopref.testing import matrix
from isopref.testing.cells import Cell
from isopref.testing.exactness import measure
from isopref.testing.ranks import Ranks

LORA = Cell("qwen3_moe", dtype="float32", adapter="lora", balance_weight=20.0)


@pytest.mark.parametrize(
    "layout",
    [
        {"parallel": "ddp", "rows": "padded"},
        {"parallel": "fsdp", "cut": "pair", "grad_sync": "every", "checkpointing": True},
        {"parallel": "fsdp", "cut": "pair"},
        {"parallel": "fsdp", "context_parallel": 2},
        {"parallel": "fsdp", "offload": True, "split": "uneven"},
    ],
    ids=lambda layout: " ".join(map(str, layout.values())),
)
def test_the_gradient_is_the_oracles(two_ranks: Ranks, layout: dict[str, Any]) -> None:
    cell = replace(LORA, ranks=2, **layout)
    for found in two_ranks(measure, cell):
        assert max(found.gradient_error, found.loss_error, found.metric_error) <= matrix.bound(cell)


@pytest.mark.parametrize("layout", [{"checkpointing": True}, {"cut": "pair", "rows": "packed"}, {"trees": True}])
def test_on_one_rank_too(layout: dict[str, Any]) -> None:
    cell = replace(LORA, **layout)
    found = measure(cell)
    assert max(found.gradient_error, found.loss_error, found.metric_error) <= matrix.bound(cell)


def test_in_tiles() -> None:
    cell = replace(LORA, mlp_tile_tokens=7, balance_weight=0.0)
    found = measure(cell)
    assert max(found.gradient_error, found.loss_error, found.metric_error) <= matrix.bound(cell)
