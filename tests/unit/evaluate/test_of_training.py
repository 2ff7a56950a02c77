"""The loss of an evaluation is that of a training batch of the same examples, by the oracle, whatever is context."""

from typing import Any

import pytest
import torch

from isopref.batch.packing import Budget
from isopref.data.table import ExampleTable
from isopref.evaluate import evaluate
from isopref.score import score_table
from isopref.testing.cells import Cell, examples_of
from isopref.testing.exactness import build_module
from isopref.testing.expected import expected
from isopref.types import Needs


@pytest.mark.parametrize("weighting", ["token", "completion", "example"])
@pytest.mark.parametrize(
    ("objective", "trees", "ld_alpha"),
    [
        ("sigmoid", False, 0.4),
        ("simpo", True, 1.0),
        ("ipo", False, 1.0),
        ("kto", True, 1.0),
        ("bco", False, 1.0),
        ("lipo", True, 1.0),
    ],
)
def test_loss_and_accuracy(objective: str, trees: bool, ld_alpha: float, weighting: Any) -> None:
    cell = Cell(objective=objective, trees=trees, ld_alpha=ld_alpha, weighting=weighting)
    cell = Cell(**{**vars(cell), "context": "weights", "nll_weight": 0.7, "own_weights": True})
    loss, _, metrics, ref = expected(cell)
    module, _ = build_module(cell, ref)
    table, asked = ExampleTable.from_tokens(*examples_of(cell)), module.objective
    policy = score_table(
        module.model,
        table,
        Budget("shared", 4096),
        device=torch.device("cpu"),
        needs=Needs(heads=asked.needs.heads),
        mismatched=asked.needs_mismatched,
    )
    found = evaluate(
        *(policy, ref, table.lengths, table.weights),
        loss=asked,
        weighting=cell.weighting,
        scores=table.scores,
        gaps=table.gaps,
    )
    assert found.loss.value == pytest.approx(loss, rel=1e-10)
    if asked.kind != "labels":
        assert found.accuracy is not None
        assert found.accuracy.value == pytest.approx(metrics["train/accuracy"], rel=1e-10)
