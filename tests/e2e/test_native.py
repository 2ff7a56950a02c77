"""Runs with OLMo-core's own modules: the same result as with transformers', in both forms."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from isopref.models.conversion import from_hf, read_checkpoint, write_checkpoint
from isopref.testing.models import byte_tokenizer, tiny_model

Load = Callable[[Path], dict[str, torch.Tensor]]
SETTINGS = {"model": {"dtype": "float32"}, "optim": {"lr": 1e-3, "batch_size": 5, "max_steps": 3}}


@pytest.fixture
def olmo(make_project: Any) -> Any:
    return make_project("olmo3", **SETTINGS)


def test_native_and_transformers_train_alike(olmo: Any, load_weights: Load) -> None:
    hf, native = olmo.train("hf"), olmo.train("native", "model.native=true")
    start, expected, found = (load_weights(folder) for folder in (olmo.model, hf / "model", native / "model"))
    for name, tensor in expected.items():
        moved = tensor - start[name]
        assert float(moved.abs().max()) > 1e-4, name
        # Adam makes a whole step of a gradient that is nothing but rounding, so not every weight agrees.
        assert float((found[name] - tensor).norm() / moved.norm()) < 1e-2, name


def test_what_a_run_leaves_can_be_started_from(olmo: Any, load_weights: Load) -> None:
    first = olmo.train("first", "model.native=true")
    again = olmo.train("again", f"model.path={first / 'olmo_core'}", "model.native=true", "optim.lr=0.0")
    expected = load_weights(first / "model")
    for folder in (again / "model", olmo.train("hf", f"model.path={first / 'olmo_core'}", "optim.lr=0.0") / "model"):
        found = load_weights(folder)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def test_another_kind_of_model_is_refused(make_project: Any) -> None:
    message = make_project("gpt2", **SETTINGS).refused("run", "model.native=true")
    assert "only llama, qwen3, olmo2, olmo3, gemma3_text convert exactly" in message


def test_a_resumed_run_keeps_its_modules(olmo: Any) -> None:
    olmo.train("run", "model.native=true", "run.export=false")
    assert "native" in olmo.refused("run", "run.export=false", "--resume")


@pytest.mark.parametrize("fault", ["conversion.save_model_and_optim_state", "hf._save_whole"])
def test_ended_while_it_writes_its_result_it_goes_on(
    olmo: Any, load_weights: Load, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """As a kill would leave it: a form of the model is there in whole or not at all."""
    with monkeypatch.context() as planted:
        planted.setattr(f"isopref.models.{fault}", fail)
        with pytest.raises(RuntimeError, match="planted"):
            olmo.train("run", "model.native=true")
    run = olmo.folder / "run"
    assert not (run / "model").exists()
    assert (run / "olmo_core").exists() == (fault == "hf._save_whole")
    olmo.train("run", "model.native=true", "--resume")
    found = read_checkpoint(str(run / "olmo_core"), dtype=torch.float32)
    expected = load_weights(run / "model")
    assert all(torch.equal(parameter, expected[name]) for name, parameter in found.named_parameters())
    assert not list(run.glob("*.partial*"))


def fail(*_args: Any, **_options: Any) -> None:
    raise RuntimeError("planted")


def test_an_adapter_has_no_base_in_a_checkpoint(olmo: Any) -> None:
    tokenizer, folder = byte_tokenizer(), olmo.folder / "checkpoint"
    write_checkpoint(from_hf(tiny_model("olmo3", vocab_size=len(tokenizer))), tokenizer, folder)
    for adapter in ("{rank: 4}", "{rank: 4, quantize: nf4}"):
        assert olmo.refused("run", f"model.path={folder}", f"model.adapter={adapter}") == (
            f"model.adapter: {folder} is an OLMo-core checkpoint, which peft cannot use as a base model. Use a "
            "Hugging Face folder: isopref writes one next to a checkpoint."
        )
