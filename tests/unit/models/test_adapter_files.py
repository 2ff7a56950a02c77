"""Adapters that others wrote: read as peft means them, or refused; never read as something else."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import ParamWrapper
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from isopref.errors import ModelError
from isopref.models import hf
from isopref.models.adapter import CONFIG_FILE, WEIGHTS_FILE, NewAdapter, add_adapter, has_adapter, load_adapter
from isopref.models.low_rank import wrapped_experts
from isopref.testing.models import tiny_folder, tiny_model

IDS = torch.tensor([[5, 9, 23, 4, 77, 8, 61]])
Written = Callable[..., Path]


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(input_ids=IDS).logits
    return found


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bases")
    return {name: tiny_folder(folder / name, name) for name in ("llama", "llama_tied", "qwen3_moe", "gpt_oss")}


@pytest.fixture
def written(bases: dict[str, Path], tmp_path: Path) -> Written:
    """The folder of an adapter that peft made of these settings, away from its start."""

    def write(base: str = "llama", **settings: Any) -> Path:
        config = LoraConfig(task_type="CAUSAL_LM", **{"r": 4, "target_modules": ["q_proj", "v_proj"], **settings})
        generator = torch.Generator().manual_seed(0)
        adapted: Any = get_peft_model(plain(bases[base]), config)
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
        adapted.save_pretrained(tmp_path / "adapter")
        return tmp_path / "adapter"

    return write


def plain(base: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)


def loaded(base: Path, adapter: Path | str) -> Any:
    model = hf.load_model(str(base), dtype=torch.float32)
    load_adapter(model, str(adapter), dtype=torch.float32, setting="model.adapter.path")
    return model


def merged(adapter: Path | str) -> Any:
    return hf.load_model(str(adapter), dtype=torch.float32)


@pytest.mark.parametrize(
    ("base", "settings"),
    [
        ("llama", {"rank_pattern": {"v_proj": 8}, "alpha_pattern": {"layers.1.self_attn.q_proj": 64}}),
        ("llama", {"target_modules": "all-linear", "exclude_modules": ["down_proj"], "use_rslora": True}),
        ("llama", {"target_modules": r".*\.1\..*q_proj", "init_lora_weights": "gaussian"}),
        ("llama_tied", {"layers_to_transform": [1], "use_dora": True}),
        ("qwen3_moe", {"target_modules": "all-linear"}),
        ("qwen3_moe", {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_proj"]}),
        ("gpt_oss", {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}),
    ],
)
def test_it_is_the_function_that_peft_loads(
    bases: dict[str, Path], written: Written, base: str, settings: dict[str, Any]
) -> None:
    adapter = written(base, **settings)
    before, expected = logits(plain(bases[base])), logits(PeftModel.from_pretrained(plain(bases[base]), adapter))
    assert (expected - before).abs().max() > 0.1
    model = loaded(bases[base], adapter)
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-4)
    for outermost, *_ in wrapped_experts(model, ParamWrapper):  # which round in another order (low_rank.py)
        del outermost.forward
    assert torch.equal(logits(model), expected)
    torch.testing.assert_close(logits(merged(adapter)), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "settings",
    [
        {"init_lora_weights": "pissa_niter_2"},  # takes random parts off the base
        {"init_lora_weights": "olora"},
        {"alora_invocation_tokens": [23, 4]},  # is on after these tokens only
        {"trainable_token_indices": [5, 9]},
        {"bias": "lora_only"},
        {"modules_to_save": ["lm_head"]},
    ],
)
def test_more_than_updates_of_layers_is_refused(
    bases: dict[str, Path], written: Written, settings: dict[str, Any]
) -> None:
    adapter = written(**settings)
    message = f"of type LORA with {{'{next(iter(settings))}'"
    with pytest.raises(ModelError, match=message):
        loaded(bases["llama"], adapter)
    with pytest.raises(ModelError, match=message):
        merged(adapter)


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_what_is_tied_cannot_be_merged(bases: dict[str, Path], written: Written, target: str) -> None:
    """The head's update would change the embedding too, and the other way round."""
    with pytest.raises(ModelError, match="in which the two share one weight"):
        merged(written("llama_tied", target_modules=["q_proj", target]))
    adapter = written("llama", target_modules=["q_proj", target])
    expected = logits(PeftModel.from_pretrained(plain(bases["llama"]), adapter))
    torch.testing.assert_close(logits(merged(adapter)), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("change", ["prefix", "half", "more"])
def test_tensors_that_have_no_place_are_refused(bases: dict[str, Path], written: Written, change: str) -> None:
    """peft passes over them, which leaves the base model or a half of the adapter."""
    adapter = written()
    state = load_file(adapter / WEIGHTS_FILE)
    some = next(iter(state))
    changed = {
        "prefix": {name.replace("model.model.", "model.module.model."): one for name, one in state.items()},
        "half": {name: one for name, one in state.items() if ".0." in name},
        "more": {**state, some.replace("q_proj", "o_proj"): state[some].clone()},
    }[change]
    save_file(changed, adapter / WEIGHTS_FILE)
    message = "does not belong to this model: their tensors differ in"
    with pytest.raises(ModelError, match=message):
        loaded(bases["llama"], adapter)
    with pytest.raises(ModelError, match=message):
        merged(adapter)


def test_an_adapter_of_a_model_of_another_size_is_refused(written: Written, tmp_path: Path) -> None:
    wide = tiny_folder(tmp_path / "wide", hidden_size=64, head_dim=16)
    with pytest.raises(ModelError, match=r"does not fit its base model: .*size mismatch"):
        loaded(wide, written())


def test_a_damaged_config_is_named(written: Written) -> None:
    adapter = written()
    (adapter / CONFIG_FILE).write_text("{")
    with pytest.raises(ModelError, match=f"cannot read {adapter / CONFIG_FILE}"):
        merged(adapter)


def test_a_folder_may_be_in_the_home_folder(
    bases: dict[str, Path], written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = written()
    monkeypatch.setenv("HOME", str(adapter.parent))
    torch.testing.assert_close(logits(merged("~/adapter")), logits(merged(adapter)), rtol=0, atol=0)
    assert not has_adapter(merged("~/adapter"))
    assert torch.equal(logits(loaded(bases["llama"], "~/adapter")), logits(loaded(bases["llama"], adapter)))
    for file in bases["llama"].glob("*token*"):
        shutil.copy(file, adapter)
    (adapter / "chat_template.jinja").write_text("its own")
    assert hf.load_tokenizer("~/adapter").chat_template == "its own"


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "qwen3_moe"])
def test_a_rank_has_a_highest_value(architecture: str) -> None:
    """All three are 32 wide, and have wider matrices in their layers."""
    model = tiny_model(architecture)
    with pytest.raises(ModelError, match=r"model\.adapter\.rank: 33 is more than 32, the highest rank"):
        add_adapter(model, NewAdapter("lora", rank=33, alpha=8.0), dtype=torch.float32, seed=0)
    add_adapter(model, NewAdapter("lora", rank=32, alpha=8.0), dtype=torch.float32, seed=0)


def test_every_target_has_a_layer() -> None:
    """One that is misspelt would just not be trained."""
    new = NewAdapter("lora", rank=4, alpha=8.0, targets=["q_proj", "v_projj"])
    with pytest.raises(ModelError, match="no layer of LlamaForCausalLM has a name that ends with v_projj"):
        add_adapter(tiny_model("llama"), new, dtype=torch.float32, seed=0)


@pytest.mark.parametrize(("architecture", "targets"), [("llama", None), ("gpt2", None), ("gpt2", ["wpe", "c_attn"])])
def test_dora_begins_with_the_rows_as_long_as_they_are(architecture: str, targets: list[str] | None) -> None:
    """Also on a base in bfloat16, of which peft takes lengths in bfloat16: others computed with them in float32."""
    model = tiny_model(architecture, dtype=torch.bfloat16)
    expected = logits(tiny_model(architecture, dtype=torch.bfloat16).float())
    add_adapter(model, NewAdapter("dora", rank=4, alpha=8.0, targets=targets), dtype=torch.float32, seed=0)
    torch.testing.assert_close(logits(model.float()), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("targets", [["q_proj", "gate_proj", "up_proj", "down_proj"], ["layers.1.mlp.gate", "o_proj"]])
def test_fused_experts_are_named_as_the_layers_they_were(targets: list[str]) -> None:
    model = tiny_model("qwen3_moe")
    add_adapter(model, NewAdapter("lora", rank=4, alpha=8.0, targets=targets), dtype=torch.float32, seed=0)
    trained = {name.split(".lora_")[0] for name, one in model.named_parameters() if one.requires_grad}
    assert any("mlp" in name for name in trained)
    assert any("self_attn" in name for name in trained)
