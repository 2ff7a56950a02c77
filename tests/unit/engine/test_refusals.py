"""What would do nothing is refused: settings, and steps."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from isopref.build.beginning import read_models
from isopref.config.schema import Config
from isopref.engine.train_module import DPOTrainModule
from isopref.errors import RunError
from isopref.models.policy import Policy
from isopref.objectives.loss import pair_loss
from isopref.score import TableLogps
from isopref.testing.models import tiny_model


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
    with pytest.raises(RunError, match="would train nothing"):
        module.optim_step()
