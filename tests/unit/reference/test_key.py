"""The key: the same for the same numbers, whatever they are called; another where any number is another."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from isopref.models.policy import Policy
from isopref.reference.key import identity, weights_digest
from isopref.reference.store import Store, key_of
from isopref.testing.models import ARCHITECTURES, tiny_model


def key(model: PreTrainedModel, compute_dtype: str = "float32") -> str:
    return key_of(identity(model, compute_dtype=compute_dtype))


def saved_and_loaded(model: Any, folder: Path, **options: Any) -> PreTrainedModel:
    model.save_pretrained(folder, **options)
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=model.dtype)
    return loaded


# --- the same --------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["gpt2", "llama_tied", "gemma3", "qwen3_moe"])
def test_one_file_or_many_in_any_folder(tmp_path: Path, architecture: str) -> None:
    model = tiny_model(architecture)
    one = saved_and_loaded(model, tmp_path / "one")
    many = saved_and_loaded(model, tmp_path / "some" / "where", max_shard_size="20KB")
    assert len(list((tmp_path / "some" / "where").glob("*.safetensors"))) > 1
    assert key(Policy(one).model) == key(Policy(many).model)


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_every_architecture_has_a_key_of_its_own_that_stays(tmp_path: Path, architecture: str) -> None:
    store = Store.open(tmp_path, identity(Policy(tiny_model(architecture)).model, compute_dtype="float32"), {})
    assert store.problems() == []  # its manifest gives the key again
    found = key(Policy(tiny_model(architecture)).model)
    assert found == key(Policy(tiny_model(architecture)).model)
    assert found != key(Policy(tiny_model(architecture, seed=1)).model)


def test_what_cannot_change_a_number_is_left_out() -> None:
    def same(change: Callable[[Any], None]) -> None:
        model = tiny_model("llama")
        change(model.config)
        assert key(model) == expected

    expected = key(tiny_model("llama"))
    same(lambda config: setattr(config, "_name_or_path", "/another/place"))
    same(lambda config: setattr(config, "use_cache", False))
    same(lambda config: setattr(config, "eos_token_id", 7))
    same(lambda config: setattr(config, "architectures", ["Other"]))
    same(lambda config: setattr(config, "id2label", {0: "x"}))


def test_rows_and_attention_leave_no_trace() -> None:
    policy = Policy(tiny_model("llama"))
    before = key(policy.model)
    policy._use_attention("isopref_segments")
    with policy.plain() as model:
        assert key(model) == before


# --- another ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["gpt2", "llama_tied"])
def test_any_bit_of_any_tensor(architecture: str) -> None:
    model = tiny_model(architecture)
    seen = {weights_digest(model)}
    distinct = {tensor.data_ptr(): tensor for tensor in model.state_dict().values()}
    for tensor in distinct.values():
        flat = tensor.view(-1).view(torch.uint8)
        where = len(flat) // 2
        flat[where] ^= 1
        seen.add(weights_digest(model))
        flat[where] ^= 1
    assert len(seen) == 1 + len(distinct)


def test_number_types() -> None:
    every = {
        key(tiny_model("llama"), "float32"),
        key(tiny_model("llama"), "bfloat16"),
        key(tiny_model("llama", dtype=torch.float64), "float64"),
        key(tiny_model("llama", dtype=torch.bfloat16), "bfloat16"),
    }
    assert len(every) == 4


def test_the_same_weights_with_other_arithmetic() -> None:
    """Rope, norms and windows are numbers of the config, not of a tensor; what nobody has heard of counts too."""
    model = tiny_model("mistral")
    seen = {key(model)}
    for name, value in (("rms_norm_eps", 1e-3), ("sliding_window", 13), ("never_heard_of", 1)):
        before = getattr(model.config, name, None)
        setattr(model.config, name, value)
        seen.add(key(model))
        setattr(model.config, name, before)
    theta = model.config.rope_parameters
    model.config.rope_parameters = {**theta, "rope_theta": 5.0}
    seen.add(key(model))
    assert len(seen) == 5


def test_tensors_that_changed_places() -> None:
    model: Any = tiny_model("llama")
    before = weights_digest(model)
    layer = model.model.layers[0].mlp
    layer.gate_proj, layer.up_proj = layer.up_proj, layer.gate_proj
    assert weights_digest(model) != before


def test_adapters() -> None:
    """Their tensors are in the model's state; what scales them is in their config, whose names do not count."""

    def with_adapter(**settings: Any) -> str:
        model = tiny_model("llama")
        vars(model)["peft_config"] = {"default": SimpleNamespace(to_dict=lambda: settings)}
        return key(model)

    plain = key(tiny_model("llama"))
    first = with_adapter(r=8, lora_alpha=16, target_modules={"q_proj", "v_proj"}, base_model_name_or_path="a")
    assert first == with_adapter(r=8, lora_alpha=16, target_modules={"v_proj", "q_proj"}, base_model_name_or_path="b")
    assert len({plain, first, with_adapter(r=8, lora_alpha=32, target_modules={"q_proj", "v_proj"})}) == 3
    model: Any = tiny_model("llama")
    before = weights_digest(model)
    model.model.layers[0].self_attn.q_proj.register_parameter("lora_A", torch.nn.Parameter(torch.ones(2, 2)))
    assert weights_digest(model) != before


def test_code_that_comes_with_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    source = "from transformers import LlamaForCausalLM\nclass Own(LlamaForCausalLM):\n    scale = {}\n"
    found = []
    for number in (1, 2):
        (tmp_path / f"own_code_{number}.py").write_text(source.format(number))
        kind = getattr(__import__(f"own_code_{number}"), "Own")  # noqa: B009
        model = tiny_model("llama")
        own = kind(model.config)
        own.load_state_dict(model.state_dict())
        found.append(identity(own, compute_dtype="float32"))
    assert found[0]["weights"] == found[1]["weights"]
    assert key_of(found[0]) != key_of(found[1])


def test_an_ld_alpha_makes_other_log_probabilities() -> None:
    model = tiny_model("gpt2")
    keys = [key_of(identity(model, compute_dtype="float32", ld_alpha=alpha)) for alpha in (1.0, 0.5, 0.25)]
    assert keys[0] == key(model)
    assert len(set(keys)) == 3
