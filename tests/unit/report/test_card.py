"""Model cards: what they say of a run, and what they keep to themselves."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from isopref.report.card import model_card
from isopref.runs.read import RunRecord, read_run
from support.runs import make_run, noisy_metrics


def run_of(folder: Path, **settings: dict[str, Any]) -> RunRecord:
    return read_run(make_run(folder, noisy_metrics(3), settings=settings))


def metadata(card: str) -> dict[str, Any]:
    _, front, _ = card.split("---\n", 2)
    found: dict[str, Any] = yaml.safe_load(front)
    return found


def test_metadata_names_what_a_hub_knows(tmp_path: Path) -> None:
    sources = [{"path": "owner/pairs", "weight": 2}, {"path": "/home/somebody/secret/mine.jsonl", "weight": 1}]
    run = run_of(tmp_path / "run", model={"path": "owner/base-1B"}, data={"train": sources})
    card = model_card(run, "me/mine", "mit")
    assert metadata(card) == {
        "license": "mit",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["isopref", "preference-tuning", "sigmoid"],
        "base_model": "owner/base-1B",
        "base_model_relation": "finetune",
        "datasets": ["owner/pairs"],
    }
    assert "AutoModelForCausalLM.from_pretrained('me/mine')" in card
    assert "mine.jsonl" in card
    assert "somebody" not in card  # folders of this machine stay here


@pytest.mark.parametrize("path", ["/models/base", "models/base.gguf", "./base", "../models/base"])
def test_a_base_on_this_machine_is_no_hub_name(tmp_path: Path, path: str) -> None:
    card = model_card(run_of(tmp_path / "run", model={"path": path}), "me/mine")
    assert "base_model" not in metadata(card)
    assert "models/" not in card
    assert re.search(r"^# license: fill in", card, flags=re.MULTILINE)
    assert "license" not in metadata(card)


def test_a_folder_that_looks_like_a_hub_name_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "base").mkdir(parents=True)
    (tmp_path / "data" / "pairs").mkdir(parents=True)
    card = model_card(run_of(tmp_path / "run", model={"path": "models/base"}, data={"train": "data/pairs"}), "me/mine")
    assert not {"base_model", "datasets"} & metadata(card).keys()
    assert "models/" not in card


def test_figures_have_their_intervals_and_versions_are_named(tmp_path: Path) -> None:
    card = model_card(run_of(tmp_path / "run", optim={"lr": 2e-6}), "me/mine")
    assert "| preference accuracy | 0.500 (0.450 to 0.550) | 0.900 (0.850 to 0.950) |" in card
    assert "| optim.lr | 2.0e-06 |" in card
    assert "optim.seed" not in card  # at its default
    assert "| torch | 2 |" in card


def test_adapters_and_reward_models_are_loaded_as_what_they_are(tmp_path: Path) -> None:
    adapter = model_card(run_of(tmp_path / "a", model={"path": "owner/base", "adapter": {"rank": 4}}), "me/a")
    assert "from peft import AutoPeftModelForCausalLM" in adapter
    assert metadata(adapter)["base_model_relation"] == "adapter"
    reward = model_card(run_of(tmp_path / "r", objective={"loss": "bradley_terry"}), "me/r")
    assert "AutoModelForSequenceClassification.from_pretrained('me/r')" in reward
    assert metadata(reward)["pipeline_tag"] == "text-classification"
