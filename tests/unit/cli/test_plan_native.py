"""Plans of OLMo-core's own models: how they compute, where they are read from, what is not planned for."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from isopref.cli.main import app
from isopref.errors import ConfigError, ModelError
from isopref.models.conversion import from_hf, write_checkpoint
from isopref.testing.models import byte_tokenizer, tiny_folder, tiny_model

ESTIMATE = "speed and activations are measured for compiled layers and packed rows; here they are an estimate"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model in half precision, and pairs."""
    monkeypatch.setenv("ISOPREF_CACHE", str(tmp_path / "cache"))
    model = tiny_folder(tmp_path / "model", "olmo3")
    record = json.dumps({"prompt": "Hello?", "chosen": "Yes.", "rejected": "No, not at all."})
    (tmp_path / "train.jsonl").write_text(f"{record}\n{record.replace('Hello', 'Good day')}\n")
    (tmp_path / "my.yaml").write_text(
        f"model: {{path: {model}, dtype: bfloat16}}\ndata: {{train: {tmp_path / 'train.jsonl'}}}\n"
    )
    return tmp_path


def plan(project: Path, *overrides: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["plan", str(project / "my.yaml"), *overrides, "--json"], catch_exceptions=False)
    assert result.exit_code == 0
    found: dict[str, Any] = json.loads(result.output)
    return found


def test_layers_are_compiled_as_in_a_run(project: Path) -> None:
    """null compiles transformers' layers and OLMo-core's."""
    plain, compiled = plan(project, "layout.compile=false"), plan(project)
    assert ESTIMATE in plain["notes"]
    assert ESTIMATE not in compiled["notes"]
    assert plain["run"]["memory"]["activations"] > compiled["run"]["memory"]["activations"]
    assert plan(project, "model.native=true") == compiled
    assert plan(project, "model.native=true", "layout.compile=false") == plain


def test_a_checkpoint_of_olmo_core_is_planned_like_the_model_that_it_is(project: Path) -> None:
    tokenizer, folder = byte_tokenizer(), project / "checkpoint"
    write_checkpoint(from_hf(tiny_model("olmo3", vocab_size=len(tokenizer))), tokenizer, folder)
    for weights in (folder / "model_and_optim").iterdir():  # a plan reads none
        weights.unlink()
    for native in ("false", "true"):
        found = plan(project, f"model.path={folder}", f"model.native={native}")
        assert found == plan(project, f"model.native={native}")


def test_ranks_that_compute_a_layer_together_are_not_planned_for(project: Path) -> None:
    with pytest.raises(ConfigError) as refusal:
        plan(project, "model.native=true", "layout.tensor_parallel=2")
    assert str(refusal.value) == (
        "layout.tensor_parallel: 2 cannot be planned: its communication has not been measured. Plan with "
        "layout.tensor_parallel=1."
    )


def test_what_a_run_would_refuse_is_not_planned(project: Path, tmp_path: Path) -> None:
    other = tiny_folder(tmp_path / "gpt2", "gpt2")
    with pytest.raises(ModelError, match="only llama, qwen3, olmo2, olmo3, gemma3_text convert exactly"):
        plan(project, "model.native=true", f"model.path={other}")
    write_checkpoint(from_hf(tiny_model("olmo3", vocab_size=len(byte_tokenizer()))), byte_tokenizer(), project / "c")
    with pytest.raises(ConfigError, match="peft cannot use as a base model"):
        plan(project, f"model.path={project / 'c'}", "model.adapter={rank: 4}")
