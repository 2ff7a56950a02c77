"""What would do nothing is refused: settings, and steps."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from isopref.build.beginning import read_models
from isopref.config.schema import Config
from isopref.data.table import ExampleTable
from isopref.engine.refusals import check_gaps
from isopref.engine.train_module import DPOTrainModule
from isopref.errors import ConfigError, RunError
from isopref.models.policy import Policy
from isopref.objectives.loss import pair_loss
from isopref.score import TableLogps
from isopref.testing.cells import Cell
from isopref.testing.exactness import build_module, padded_batch
from isopref.testing.models import examples, random_pairs, tiny_model


@pytest.mark.parametrize(
    ("data", "run"),
    [
        ({}, {"samples": 2}),
        ({"eval": "e.jsonl"}, {"samples": 2, "export": False}),
    ],
)
def test_samples_that_nobody_could_draw(data: dict[str, Any], run: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"run\.samples: 2 has no effect"):
        Config.model_validate({"model": {"path": "m"}, "data": {"train": "d", **data}, "run": run})
    for harmless in (None, 0):
        Config.model_validate({"model": {"path": "m"}, "data": {"train": "d", **data}, "run": {"samples": harmless}})


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", "null", '{"key": "abc", "made_of": 3}'])
def test_a_damaged_key_of_the_reference(tmp_path: Path, content: str) -> None:
    path = tmp_path / "reference.json"
    path.write_text(content)
    with pytest.raises(RunError, match=r"reference\.json: damaged .* Remove it"):
        read_models(path)
    path.write_text(json.dumps({"key": "abc"}))
    assert read_models(path) == {"reference": ("abc", {}), "frozen": (None, {})}


def test_a_step_without_gradients_is_not_taken() -> None:
    policy = Policy(tiny_model("llama"))
    nothing = torch.zeros(0, dtype=torch.float64).numpy()
    module = DPOTrainModule(
        policy,
        torch.optim.AdamW(policy.parameters()),
        objective=pair_loss("sigmoid", beta=0.1),
        rank_microbatch_size=100,
        reference=TableLogps(nothing),
    )
    module._trainer = SimpleNamespace(global_step=1)  # type: ignore[assignment]
    with pytest.raises(RunError, match="the step would train nothing"):
        module.optim_step()


def test_gaps_that_nobody_told() -> None:
    """A plain pair is scored 1 and 0, which says nothing of how much better one of its answers is."""
    plain = examples(random_pairs(3))
    check_gaps(ExampleTable.from_tokens([one._replace(gaps=(0.1,)) for one in plain]), "here")
    half = ExampleTable.from_tokens(
        [one._replace(gaps=gaps) for one, gaps in zip(plain, ((2.0,), (), ()), strict=True)]
    )
    with pytest.raises(ConfigError, match=r"here: 2 of 3 comparisons have no score gap.* the first is example 1\. Add"):
        check_gaps(half, "here")
    ties = ExampleTable.from_tokens([one._replace(gaps=(gap,)) for one, gap in zip(plain, (2.0, 1.0, -3), strict=True)])
    with pytest.raises(ConfigError, match=r"1 of 3 comparisons do not score the better .* example 2, with a gap of -3"):
        check_gaps(ties, "here")


def test_padded_batches_have_no_gaps() -> None:
    module, _ = build_module(Cell(objective="odpo"), TableLogps(torch.zeros(16)))
    with pytest.raises(ConfigError, match="needs the gap between the scores of two answers, but a padded batch"):
        module.train_batch(padded_batch([0, 1], 8))
