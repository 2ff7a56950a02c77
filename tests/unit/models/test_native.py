"""OLMo-core's own models: the same numbers as the Hugging Face ones, or refused; written in both forms."""

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from olmo_core.distributed.checkpoint import load_model_and_optim_state
from olmo_core.nn.rope import RoPEConfig
from olmo_core.nn.transformer import TransformerConfig
from olmo_core.train.checkpoint import Checkpointer
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from isopref.batch.packing import RowKind
from isopref.batch.rows import build_microbatch
from isopref.errors import ConfigError, ModelError
from isopref.models import conversion
from isopref.models.conversion import HF_CONFIG, empty_checkpoint, from_hf, read_checkpoint, write_checkpoint
from isopref.models.hf import is_olmo_core
from isopref.models.native import NativeModel
from isopref.models.parallel import check_tensor, checkpoint_layers, decoder_layers
from isopref.models.policy import Policy
from isopref.models.probe import check_layout
from isopref.models.shape import shape_of
from isopref.testing.models import byte_tokenizer, examples, random_pairs, tiny_model

ARCHITECTURES = ("llama", "llama_tied", "qwen3", "olmo2", "olmo3", "gemma3")
KINDS: tuple[RowKind, ...] = ("shared", "packed", "padded", "padded_separate")
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
IDS = torch.tensor([[5, 17, 3, 44, 9, 61, 20, 8]])


def shaken(architecture: str, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """A tiny model whose norms have weights other than those they start with."""
    model = tiny_model(architecture, dtype=dtype, **changes)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator).to(dtype))
    return model


@torch.no_grad()
def logits(model: Any) -> Tensor:
    out = model(input_ids=IDS)
    found: Tensor = out if isinstance(out, Tensor) else out.logits
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_same_scores_as_the_hugging_face_model(architecture: str, kind: RowKind) -> None:
    policy = Policy(from_hf(shaken(architecture)))
    microbatch = build_microbatch(examples(random_pairs(3, seed=1, longest=40)), kind)  # past the windows of 12
    with torch.no_grad():
        expected = Policy(shaken(architecture))(microbatch).logp
        torch.testing.assert_close(policy(microbatch).logp, expected, rtol=1e-6, atol=1e-5)
    check_layout(policy, kind)


def test_a_layer_is_recomputed_where_there_is_a_backward_pass() -> None:
    policy = Policy(from_hf(tiny_model("llama"))).train()
    checkpoint_layers(policy, 1)
    calls: list[int] = []
    for number, layer in enumerate(decoder_layers(policy)):
        layer.get_submodule("attention").register_forward_hook(lambda *_, number=number: calls.append(number))
    microbatch = build_microbatch(examples(random_pairs(3)), "shared")
    with torch.no_grad():
        policy(microbatch)
    assert calls == [0, 1]
    policy(microbatch).logp.sum().backward()
    assert calls == [0, 1, 0, 1, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "olmo2", "olmo3"])
def test_rounding_to_half_the_bits_is_no_reason_to_refuse(architecture: str, dtype: torch.dtype) -> None:
    for seed in range(3):
        from_hf(tiny_model(architecture, dtype=dtype, seed=seed))


@pytest.mark.parametrize(
    "scaling",
    [
        LLAMA3,
        YARN,
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    ],
)
def test_scaled_angles_come_along(scaling: dict[str, Any]) -> None:
    native = from_hf(tiny_model("llama", rope_parameters=scaling))
    assert next(iter(native.transformer.blocks.values())).attention.rope.scaling is not None  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: tiny_model("mistral"), "only llama, qwen3, olmo2, olmo3, gemma3_text convert exactly"),
        (lambda: tiny_model("qwen2"), "this is qwen2"),
        (lambda: tiny_model("llama", attention_bias=True), r"q_proj\.bias"),
        (lambda: tiny_model("llama", hidden_act="relu"), "OLMo-core has no relu"),
        (lambda: tiny_model("gemma3", query_pre_attn_scalar=16), "query_pre_attn_scalar"),
        (lambda: tiny_model("gemma3", final_logit_softcapping=3.0), "its logits would be off"),
        (lambda: shaken("gemma3", torch.bfloat16), r"changes by .* in a round trip; model\.dtype: float32 is exact"),
        (
            lambda: tiny_model("llama", rope_parameters={**LLAMA3, "rope_type": "dynamic"}),
            "no rotary angles of type dynamic",
        ),
    ],
)  # fmt: skip
def test_what_would_be_another_model_is_refused(model: Any, reason: str) -> None:
    with pytest.raises(ModelError, match=rf"cannot be trained with model\.native: true, .*{reason}.*native: false"):
        from_hf(model())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_small_difference_shows_in_half_precision_too(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Angles that are a little off: less than bfloat16 rounds."""
    own = conversion._rope

    def off(*args: Any) -> RoPEConfig:
        rope = own(*args)
        return replace(rope, theta=rope.theta + 3)

    monkeypatch.setattr(conversion, "_rope", off)
    with pytest.raises(ModelError, match="its logits would be off"):
        from_hf(tiny_model("qwen3", dtype=dtype))


def test_a_window_too_wide_to_show_in_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    own = conversion.transformer_config

    def narrow(model: Any, setting: str) -> TransformerConfig:
        model.config.sliding_window = 100
        found = own(model, setting)
        model.config.sliding_window = 128
        return found

    monkeypatch.setattr(conversion, "transformer_config", narrow)
    with pytest.raises(ModelError, match=r"windows of \[100, .*not \[128, "):
        from_hf(tiny_model("olmo3", sliding_window=128))


@pytest.mark.parametrize("key", ["attention_factor", "truncate", "mscale"])
def test_angles_that_olmo_core_does_not_know(key: str) -> None:
    with pytest.raises(ModelError, match=f"rotary angles have no {key}"):
        from_hf(tiny_model("llama", rope_parameters={**YARN, key: 1.0}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("planted", [RoPEConfig(theta=20_000), RoPEConfig(theta=10_000)])
def test_wrong_angles_show_in_the_logits(
    planted: RoPEConfig, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another base, and angles that should have been scaled."""
    monkeypatch.setattr(conversion, "_rope", lambda *_args: planted)
    with pytest.raises(ModelError, match="its logits would be off"):
        from_hf(tiny_model("llama", dtype=dtype, rope_parameters=LLAMA3))


def test_the_hugging_face_form_has_the_weights_of_now_and_gives_them_back() -> None:
    native, expected = from_hf(tiny_model("llama_tied")), tiny_model("llama_tied")
    trained = ((native, "transformer.blocks.0.attention.w_q"), (expected, "model.layers.0.self_attn.q_proj"))
    with torch.no_grad():
        for model, name in trained:
            model.get_parameter(f"{name}.weight").mul_(1.5)
    with native.as_hf() as found:
        assert torch.equal(logits(found), logits(expected))
    assert all(parameter.is_meta for parameter in native.twin.parameters())
    assert sum(map(Tensor.numel, native.parameters())) == sum(map(Tensor.numel, expected.parameters()))  # tied: once


def olmo_core_reads(folder: Path) -> Any:
    """The checkpoint as an OLMo-core script loads it."""
    config = TransformerConfig.from_dict(json.loads((folder / "config.json").read_text())["model"])
    model = config.build()
    load_model_and_optim_state(folder / "model_and_optim", model)
    return model


def written(native: NativeModel, folder: Path) -> Path:
    write_checkpoint(native, byte_tokenizer(), folder)
    assert is_olmo_core(str(folder))
    return folder


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_olmo_core_loads_what_is_written(tmp_path: Path, architecture: str) -> None:
    model = olmo_core_reads(written(from_hf(shaken(architecture)), tmp_path / "out"))
    torch.testing.assert_close(logits(model), logits(shaken(architecture)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_checkpoint_is_read_again(tmp_path: Path, architecture: str) -> None:
    folder = written(from_hf(shaken(architecture)), tmp_path / "out")
    model = read_checkpoint(str(folder), dtype=torch.float32)
    assert torch.equal(logits(model), logits(shaken(architecture)))
    assert model.config.get_text_config().max_position_embeddings == 256
    assert model.config.eos_token_id == byte_tokenizer().eos_token_id
    assert shape_of(empty_checkpoint(str(folder))).parameters == model.num_parameters()
    assert from_hf(model).config.model_type == model.config.model_type


def by_olmo_core(architecture: str, folder: Path) -> Path:
    """A checkpoint as OLMo-core's own scripts write it: it does not say what it is in Hugging Face's form."""
    told = json.loads((written(from_hf(shaken(architecture)), folder) / "config.json").read_text())
    del told[HF_CONFIG]
    (folder / "config.json").write_text(json.dumps(told))
    return folder


@pytest.mark.parametrize("architecture", ["olmo2", "olmo3"])
def test_a_checkpoint_of_olmo_core_is_read(tmp_path: Path, architecture: str) -> None:
    folder = by_olmo_core(architecture, tmp_path / "out")
    model = read_checkpoint(str(folder), dtype=torch.float32)
    assert torch.equal(logits(model), logits(shaken(architecture)))
    assert model.config.get_text_config().max_position_embeddings == 256
    assert shape_of(empty_checkpoint(str(folder))).parameters == model.num_parameters()


def test_a_checkpoint_that_has_no_hugging_face_form_is_named(tmp_path: Path) -> None:
    folder = by_olmo_core("llama", tmp_path / "out")
    with pytest.raises(ModelError, match=r"model\.path: cannot load the OLMo-core checkpoint .*/out \(NotImplemented"):
        read_checkpoint(str(folder), dtype=torch.float32)


def test_nothing_in_a_checkpoint_is_run(tmp_path: Path) -> None:
    folder, mark = written(from_hf(shaken("olmo2")), tmp_path / "out"), tmp_path / "mark"
    (folder / "model_and_optim" / ".metadata").write_bytes(pickle.dumps(Touches(mark)))
    with pytest.raises(ModelError, match="its index names"):
        read_checkpoint(str(folder), dtype=torch.float32)
    assert not mark.exists()


class Touches:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize(
    "planted",
    [
        {"_CLASS_": "huggingface_hub.utils._subprocess.run_subprocess", "command": "touch {mark}"},
        {"_CLASS_": "pathlib.Path.touch", "self": "{mark}"},
        {"_CLASS_": "olmo_core.io.clear_directory", "dir": "{mark}"},
        {"_CLASS_": ["os", "mkdir"]},
    ],
)
def test_nothing_that_a_config_names_is_called(tmp_path: Path, planted: dict[str, Any]) -> None:
    folder, mark = written(from_hf(shaken("olmo2")), tmp_path / "out"), tmp_path / "mark"
    told = json.loads((folder / "config.json").read_text())
    told["model"]["block"]["full_attention"]["layer_norm"] = [{name: str(value) for name, value in planted.items()}]
    (folder / "config.json").write_text(json.dumps(told).replace("{mark}", str(mark)))
    for read in (read_checkpoint, lambda path, **_: empty_checkpoint(path)):
        with pytest.raises(ModelError, match=r"config\.json names .* not a config class of OLMo-core"):
            read(str(folder), dtype=torch.float32)
    assert not mark.exists()


def test_only_known_models_are_named(tmp_path: Path) -> None:
    folder = written(from_hf(shaken("olmo2")), tmp_path / "out")
    told = json.loads((folder / "config.json").read_text())
    told[HF_CONFIG]["model_type"] = "gpt2"
    (folder / "config.json").write_text(json.dumps(told))
    with pytest.raises(ModelError, match="has the model_type gpt2"):
        read_checkpoint(str(folder), dtype=torch.float32)


def test_olmo_core_takes_it_for_a_checkpoint(tmp_path: Path) -> None:
    folder = written(from_hf(shaken("llama")), tmp_path / "out")
    assert Checkpointer.dir_is_checkpoint(folder / "model_and_optim")
    assert {path.name for path in tmp_path.iterdir()} == {"out"}  # nothing that is written on the way


def test_a_checkpoint_without_a_tokenizer_says_what_it_lacks(tmp_path: Path) -> None:
    folder = written(from_hf(shaken("olmo2")), tmp_path / "out")
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(ModelError, match=r"has no tokenizer\. Put the files"):
        read_checkpoint(str(folder), dtype=torch.float32)


@pytest.mark.parametrize("damage", ["no config", "no weights", "no length", "cut off"])
def test_a_damaged_checkpoint_is_named(tmp_path: Path, damage: str) -> None:
    folder = written(from_hf(tiny_model("olmo2")), tmp_path / "out")
    told = json.loads((folder / "config.json").read_text())
    if damage == "no weights":
        (folder / "model_and_optim" / ".metadata").unlink()
    if damage == "cut off":
        for file in (folder / "model_and_optim").glob("*.distcp"):
            file.write_bytes(file.read_bytes()[:100])
    told.pop({"no config": "model", "no length": "dataset"}.get(damage), None)
    del told[HF_CONFIG]
    (folder / "config.json").write_text(json.dumps(told))
    with pytest.raises(ModelError, match=rf"cannot load the OLMo-core checkpoint {folder}"):
        read_checkpoint(str(folder), dtype=torch.float32)


def test_a_folder_of_hugging_face_is_written_from_gathered_weights(tmp_path: Path) -> None:
    policy = Policy(from_hf(shaken("qwen3")))
    with policy.saved_form(policy.state_dict()) as (model, weights):
        model.save_pretrained(tmp_path / "out", state_dict=weights)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(again), logits(shaken("qwen3")))


@pytest.mark.parametrize(("heads", "key_heads", "ranks", "fitting"), [(4, 2, 3, "1, 2"), (8, 4, 8, "1, 2, 4")])
def test_ranks_that_cannot_share_out_the_heads_are_refused(
    heads: int, key_heads: int, ranks: int, fitting: str
) -> None:
    policy = Policy(from_hf(tiny_model("llama", num_attention_heads=heads, num_key_value_heads=key_heads)))
    with pytest.raises(ConfigError) as refusal:
        check_tensor(policy, "fsdp", ranks, ranks)
    assert str(refusal.value) == (
        f"layout.tensor_parallel: {ranks} does not divide the heads and key heads of the model. Use one of {fitting}."
    )
