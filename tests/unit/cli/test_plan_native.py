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


MODELLED = "layout.tensor_parallel: the time of its communication is modelled from the links' rates, not measured"


def test_ranks_that_compute_a_layer_together(project: Path) -> None:
    """Not compiled unless asked for, as in a run; the shards of both groups; what is not measured is said."""
    asked = ("model.native=true", "layout.tensor_parallel=2")
    found = plan(project, *asked, "--gpus", "4", "--ranks", "4,8")
    run, apart = found["run"], plan(project, "layout.parallel=fsdp", "--gpus", "2")["run"]
    assert (run["parallel"], run["ranks"], run["shard"], run["tensor"]) == ("fsdp", 4, 2, 2)
    assert run["memory"]["weights"] == apart["memory"]["weights"] / 2
    assert run["microbatches"] == apart["microbatches"]
    assert run["time"]["exchange"] > apart["time"]["exchange"] == 0
    assert {MODELLED, ESTIMATE} <= set(found["notes"])
    assert MODELLED not in plan(project, "model.native=true")["notes"]
    assert ESTIMATE not in plan(project, *asked, "layout.compile=true", "--gpus", "4")["notes"]
    assert [(one["ranks"], one["shard"]) for one in found["scale"]] == [(4, 2), (8, 4)]
    both = plan(project, *asked, "--gpus", "16", "--ranks", "16,32")["scale"]
    kinds = ("fsdp", 8), ("hsdp", 4), ("fsdp", 16), ("hsdp", 4)  # of a machine's eight, each second rank
    assert tuple((one["parallel"], one["shard"]) for one in both) == kinds


def test_degrees_that_a_machine_or_the_heads_do_not_allow(project: Path) -> None:
    for degree, gpus in ((4, 4), (16, 16), (2, 3), (2, 1)):
        with pytest.raises(ConfigError, match=f"layout.tensor_parallel: {degree} does not fit {gpus} GPUs"):
            plan(project, "model.native=true", f"layout.tensor_parallel={degree}", "--gpus", str(gpus))
    with pytest.raises(ConfigError, match="does not fit 3 GPUs"):
        plan(project, "model.native=true", "layout.tensor_parallel=2", "--gpus", "2", "--ranks", "2,3")


def test_what_a_run_would_refuse_is_not_planned(project: Path, tmp_path: Path) -> None:
    other = tiny_folder(tmp_path / "gpt2", "gpt2")
    with pytest.raises(ModelError, match="only llama, qwen3, olmo2, olmo3, gemma3_text convert exactly"):
        plan(project, "model.native=true", f"model.path={other}")
    write_checkpoint(from_hf(tiny_model("olmo3", vocab_size=len(byte_tokenizer()))), byte_tokenizer(), project / "c")
    with pytest.raises(ConfigError, match="peft cannot use as a base model"):
        plan(project, f"model.path={project / 'c'}", "model.adapter={rank: 4}")
