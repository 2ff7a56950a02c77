"""What has no gradient in a model: found by structure, frozen, and nothing else is."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlavaNextConfig, LlavaNextForConditionalGeneration
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from isopref.batch.rows import build_microbatch
from isopref.models.adapter import NewAdapter, add_adapter
from isopref.models.parallel import decoder_layers
from isopref.models.policy import Policy
from isopref.models.unused import indexers, is_inside
from isopref.testing.families import tiny_family
from isopref.testing.models import ARCHITECTURES, SPARSE_ATTENTION, examples, random_pairs, tiny_model

VISION = ("model.vision_tower", "model.multi_modal_projector")
TEXT, IMAGES = ARCHITECTURES["llama"][1], ARCHITECTURES["gemma3_vision"][1]["vision_config"]


@pytest.mark.parametrize("architecture", sorted(set(ARCHITECTURES) - {"gemma3_vision"}))
def test_a_model_of_text_is_trained_whole(architecture: str) -> None:
    policy = Policy(tiny_model(architecture))
    assert policy.unused == ()
    assert all(parameter.requires_grad for parameter in policy.parameters())


@pytest.mark.parametrize("kind", ["modernbert-decoder", "opt"])
def test_a_decoder_by_name_alone_is_none(kind: str) -> None:
    """What transformers calls the decoder of the first is its output head."""
    settings = {**TEXT, "pad_token_id": 0, "ffn_dim": 48, "word_embed_proj_dim": 32}
    policy = Policy(AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**settings)))
    assert all(parameter.requires_grad for parameter in policy.parameters())


def test_what_is_frozen_is_what_has_no_gradient() -> None:
    model = tiny_model("gemma3_vision").train()
    model.model(
        input_ids=torch.tensor([[5, 6, 7]]), token_type_ids=torch.zeros(1, 3)
    ).last_hidden_state.sum().backward()
    without = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    policy = Policy(model)
    assert policy.unused == VISION
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == without == {name for name, _ in model.named_parameters() if is_inside(name, VISION)} != set()
    assert policy(build_microbatch(examples(random_pairs(2)), "shared")).logp.requires_grad


@pytest.mark.parametrize("adapted", [False, True])
def test_what_chooses_keys_has_none_either(monkeypatch: pytest.MonkeyPatch, adapted: bool) -> None:
    monkeypatch.setitem(ARCHITECTURES, "sparse", SPARSE_ATTENTION)
    model = tiny_model("sparse", dtype=torch.float32)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    if adapted:
        add_adapter(model, NewAdapter("lora", rank=2, alpha=4.0), dtype=torch.float32, seed=0)
    policy = Policy(model)
    assert indexers(model) == ("model.layers.0.self_attn.indexer", "model.layers.1.self_attn.indexer")
    assert policy.unused == ()
    policy(build_microbatch(examples(random_pairs(6, longest=30)), "padded")).logp.sum().backward()
    without = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    assert without == {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert {name for name in without if is_inside(name, indexers(model))} == {
        name for name, _ in model.named_parameters() if ".indexer." in name
    }


ALONE = ("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mllama", "mvp", "pegasus")


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("family", [*ALONE, "plbart", "trocr", "whisper"])
def test_attention_to_an_encoder_has_none(family: str, adapted: bool) -> None:
    """In a decoder that is trained without its encoder."""
    model = tiny_family(family)
    if adapted:
        add_adapter(model, NewAdapter("lora", rank=2, alpha=4.0), dtype=torch.float32, seed=0)
    policy = Policy(model)
    policy(build_microbatch(examples(random_pairs(4)), "padded")).logp.sum().backward()
    trained = {name for name, parameter in policy.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, parameter in policy.named_parameters() if parameter.grad is not None}
    assert policy.unused


def test_a_parameter_beside_the_decoder_is_a_part() -> None:
    model = LlavaNextForConditionalGeneration(
        LlavaNextConfig(
            text_config={**TEXT, "model_type": "llama"},
            vision_config={**IMAGES, "model_type": "clip_vision_model"},
            image_token_index=5,
        )
    )
    policy = Policy(model)
    assert set(policy.unused) == {*VISION, "model.image_newline"}
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {name for name, _ in model.named_parameters() if is_inside(name, policy.unused)}
    assert sum(p.numel() for p in policy.parameters() if p.requires_grad) == sum(
        p.numel() for p in tiny_model("llama").parameters()
    )


def test_a_part_is_not_another_whose_name_begins_alike() -> None:
    assert is_inside("model.vision", ["model.vision"])
    assert is_inside("model.vision.0.weight", ["model.audio", "model.vision"])
    assert not is_inside("model.vision_norm.weight", ["model.vision"])
    assert not is_inside("model.vision", [])


def test_layers_are_those_of_the_text() -> None:
    policy = Policy(tiny_model("gemma3_vision"))
    assert {"Gemma3DecoderLayer", "SiglipEncoderLayer"} <= set(policy.model._no_split_modules or ())
    assert [type(layer).__name__ for layer in decoder_layers(policy)] == ["Gemma3DecoderLayer"] * 2


@pytest.mark.parametrize("targets", [None, ["q_proj", "fc1"]])
@pytest.mark.parametrize("first", ["policy", "adapter"])
def test_an_adapter_is_on_text_alone(targets: list[str] | None, first: str) -> None:
    model = tiny_model("gemma3_vision")
    if first == "policy":
        Policy(model)
    add_adapter(model, NewAdapter("lora", rank=2, alpha=4.0, targets=targets), dtype=torch.float32, seed=0)
    if first == "adapter":
        Policy(model)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert len(trained) == 2 * 2 * (7 if targets is None else 1)  # layers, factors, linear maps
    assert all(name.startswith("model.language_model.layers.") for name in trained)
    assert not any("lora" in name for name, _ in model.named_parameters() if is_inside(name, VISION))
