"""The probe accepts what is right, and refuses what is wrong with a way out."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from isopref.batch.packing import RowKind
from isopref.errors import ModelError
from isopref.models import attention, unfold
from isopref.models.policy import Policy
from isopref.models.probe import check_layout
from isopref.ops.attention import segment_attention
from isopref.testing.families import tiny_family
from isopref.testing.models import ARCHITECTURES, tiny_model, with_adapter
from isopref.types import Segments

PACKED: tuple[RowKind, ...] = ("shared", "packed")
PADDED: tuple[RowKind, ...] = ("padded", "padded_separate")
UNHOOKED = ("mpt",)


@pytest.mark.parametrize("kind", [*PACKED, *PADDED])
@pytest.mark.parametrize("architecture", sorted(set(ARCHITECTURES) - set(UNHOOKED)))
def test_every_hooked_architecture_is_accepted(architecture: str, kind: RowKind) -> None:
    check_layout(Policy(tiny_model(architecture)), kind)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", ["gpt2", "llama", "gemma2", "cohere", "granite"])
def test_rounding_is_accepted(architecture: str, dtype: torch.dtype) -> None:
    for kind in PACKED:
        check_layout(Policy(tiny_model(architecture, dtype=dtype)), kind)


@pytest.mark.parametrize("architecture", UNHOOKED)
def test_models_without_the_hook_are_for_padded_rows(architecture: str) -> None:
    policy = Policy(tiny_model(architecture))
    for padded in PADDED:
        check_layout(policy, padded)
    for packed in PACKED:
        with pytest.raises(ModelError, match=rf"layout\.rows: {packed}, .*Set layout\.rows: padded\."):
            check_layout(policy, packed)
    check_layout(policy, "padded")  # a refusal leaves nothing behind


class LoudLlama(LlamaForCausalLM):
    """Changes its logits after the head, as no config says."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        out.logits = out.logits * 1.1
        return out


@pytest.mark.parametrize("kind", [*PACKED, *PADDED])
def test_a_head_that_is_not_all_is_refused(kind: RowKind) -> None:
    make: Any = LoudLlama
    with pytest.raises(ModelError, match=r"LoudLlama cannot be trained.*off by"):
        check_layout(Policy(make(tiny_model("llama").config).eval()), kind)


@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize("family", ["modernbert-decoder", "reformer", "roberta", "roformer", "xlnet"])
def test_padded_rows_are_no_way_out_if_they_are_refused_too(family: str, kind: RowKind) -> None:
    refused = []
    for rows in (kind, "padded"):
        with pytest.raises(ModelError) as raised:
            check_layout(Policy(tiny_family(family)), rows)
        refused.append(str(raised.value))
    assert refused[0] == refused[1]
    assert refused[0].endswith("Train a model of another architecture: docs/models.md lists those that work.")


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("llama4_text", "v_proj, q_proj"),
        ("phimoe", "v_proj, q_proj"),
        ("gemma3n_text", "v_proj, q_proj"),
        ("deepseek_v4", "q_b_proj, q_a_proj"),
    ],
)
def test_an_adapter_that_breaks_a_model_is_named(family: str, targets: str) -> None:
    model = with_adapter(tiny_family(family), "lora")
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    with pytest.raises(ModelError, match="Without its adapter it works") as raised:
        check_layout(Policy(model), "shared")
    assert f"Set model.adapter.targets to fewer layers, such as [{targets}], or train all" in str(raised.value)
    assert trained == [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    check_layout(Policy(with_adapter(tiny_family(family), "lora", targets=targets.split(", "))), "shared")


def leaky(segments: Segments) -> Segments:
    """Each rejected answer also sees the chosen one: segments of a shared row come in twos."""
    keys: list[int] = []
    bounds = [0]
    for s, (start, end) in enumerate(zip(segments.query_bounds, segments.query_bounds[1:], strict=False)):
        keys += range(segments.query_bounds[s - 1] if s % 2 else start, end)
        bounds.append(len(keys))
    return replace(
        segments, key_index=torch.tensor(keys), key_bounds=tuple(bounds), key_offsets=torch.tensor(bounds).int()
    )


def one_segment(segments: Segments) -> Segments:
    """Everything sees everything before it."""
    bounds = (0, segments.query_bounds[-1])
    offsets = torch.tensor(bounds).int()
    return replace(
        segments, key_index=None, query_bounds=bounds, key_bounds=bounds, query_offsets=offsets, key_offsets=offsets
    )


@pytest.mark.parametrize("architecture", ["gpt2", "llama", "gemma3"])
@pytest.mark.parametrize(
    ("kind", "leak"), [("shared", leaky), ("shared", one_segment), ("packed", one_segment)], ids=lambda x: str(x)[:12]
)
def test_a_planted_leak_is_caught(architecture: str, kind: RowKind, leak: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def leaking(q: Tensor, k: Tensor, v: Tensor, segments: Segments, **options: Any) -> Tensor:
        return segment_attention(q, k, v, leak(segments), **options)

    policy = Policy(tiny_model(architecture))
    check_layout(policy, kind)
    monkeypatch.setattr(attention, "segment_attention", leaking)
    with pytest.raises(ModelError, match=r"a rejected answer moves by.*Set layout\.rows: padded"):
        check_layout(policy, kind)


def test_a_leak_in_one_layer_alone_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter(range(1000))

    def leaking(q: Tensor, k: Tensor, v: Tensor, segments: Segments, **options: Any) -> Tensor:
        last_layer = next(calls) % 2 == 1
        return segment_attention(q, k, v, leaky(segments) if last_layer else segments, **options)

    policy = Policy(tiny_model("llama"))
    monkeypatch.setattr(attention, "segment_attention", leaking)
    with pytest.raises(ModelError, match="a rejected answer moves by"):
        check_layout(policy, "shared")


def test_a_leak_too_weak_to_show_in_the_scores_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores are off by less than rounding may be, but a rejected answer hears of the chosen one."""

    def leaking(q: Tensor, k: Tensor, v: Tensor, segments: Segments, **options: Any) -> Tensor:
        right, wrong = (segment_attention(q, k, v, s, **options) for s in (segments, leaky(segments)))
        return torch.lerp(right, wrong, 1e-3)

    policy = Policy(tiny_model("gpt2"))
    monkeypatch.setattr(attention, "segment_attention", leaking)
    with pytest.raises(ModelError, match="a rejected answer moves by"):
        check_layout(policy, "shared")


def test_a_window_that_gets_lost_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def wide(q: Tensor, k: Tensor, v: Tensor, segments: Segments, **options: Any) -> Tensor:
        return segment_attention(q, k, v, segments, **{**options, "window": None})

    policy = Policy(tiny_model("mistral"))
    monkeypatch.setattr(attention, "segment_attention", wide)
    with pytest.raises(ModelError):
        check_layout(policy, "shared")


class Embedded(LlamaForCausalLM):
    """Its embedding is in no decoder."""

    base_model_prefix = "nothing"

    def __init__(self, config: Any):
        super().__init__(config)  # type: ignore[no-untyped-call]
        self.embedding = self.model.embed_tokens
        del self.model

    def get_input_embeddings(self) -> Any:
        return self.embedding


def test_a_model_without_a_decoder_is_refused() -> None:
    make: Any = Embedded
    with pytest.raises(ModelError, match=r"Embedded cannot be trained: it has no decoder .* is in Embedding"):
        Policy(make(tiny_model("llama").config))


UNFOLDED = ("llama4_text", "deepseek_v32", "deepseek_v4", "minimax_m3_vl_text", "phimoe", "inkling_text", "falcon")


@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize("family", UNFOLDED)
def test_attention_that_counts_or_chooses_gets_sequences(
    family: str, kind: RowKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks, by place, over compressed or chosen keys: right when unfolded, and refused when not."""
    check_layout(Policy(tiny_family(family)), kind)
    monkeypatch.setattr(unfold, "MASKING", ())
    monkeypatch.setattr(unfold, "layer_type", lambda *_: None)
    with pytest.raises(ModelError, match=r"Set layout\.rows: padded"):
        check_layout(Policy(tiny_family(family)), kind)


@pytest.mark.parametrize("wrong", ["window", "causal"])
def test_a_mask_that_gets_lost_is_caught(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of chunks, or of the future."""
    policy = Policy(tiny_family("llama4_text" if wrong == "window" else "falcon"))

    def mask(_self: Any, _module: Any, bucket: Any, _arguments: Any) -> Tensor:
        size, length = bucket.shape
        seen = torch.ones(size, 1, length, length, dtype=torch.bool)
        return seen.tril() if wrong == "window" else seen

    monkeypatch.setattr(unfold._Unfolding, "_mask", mask)
    with pytest.raises(ModelError, match="off by"):
        check_layout(policy, "shared")


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("doge", "DogeAttention hands its attention a mask of its own, which packed rows do not support"),
        ("bloom", "modeling_bloom counts tokens along the row"),
        ("mpt", "no layer uses transformers' AttentionInterface"),
    ],
)
def test_refusals_name_what_is_not_supported(family: str, reason: str) -> None:
    policy = Policy(tiny_family(family))
    check_layout(policy, "padded")
    for packed in PACKED:
        with pytest.raises(ModelError, match=rf"layout\.rows: {packed}.*{reason}.*Set layout\.rows: padded\."):
            check_layout(policy, packed)


def test_layers_are_unfolded_if_attention_cannot_follow_the_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy(tiny_family("lfm2"))
    assert policy.following

    def refusing(*arguments: Any, **options: Any) -> Tensor:
        if policy.following:
            raise attention.PackedRowsError("it is planted")
        return segment_attention(*arguments, **options)

    monkeypatch.setattr(attention, "segment_attention", refusing)
    check_layout(policy, "shared")
    assert policy.unfolded


def test_a_sink_that_gets_lost_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def without(q: Tensor, k: Tensor, v: Tensor, segments: Segments, **options: Any) -> Tensor:
        return segment_attention(q, k, v, segments, **{**options, "sinks": None})

    policy = Policy(tiny_family("gpt_oss"))
    check_layout(policy, "shared")
    monkeypatch.setattr(attention, "segment_attention", without)
    with pytest.raises(ModelError, match="off by"):
        check_layout(policy, "shared")


def test_a_random_forward_pass_is_refused() -> None:
    """Noise that no config names: whoever shares a row would share it."""
    policy = Policy(tiny_model("llama"))
    check_layout(policy, "shared")
    policy.model.model.layers[0].mlp.register_forward_hook(
        lambda module, _, output: output + 0.1 * torch.randn_like(output) if module.training else output
    )
    with pytest.raises(ModelError, match="the same row scored twice differs"):
        check_layout(policy, "shared")


def test_running_out_of_memory_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other rows are tried: they would not fit either."""
    passes = []

    def out_of_memory(*arguments: Any, **_: Any) -> Tensor:
        passes.append(arguments)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(attention, "segment_attention", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        check_layout(Policy(tiny_model("llama")), "shared")
    assert len(passes) == 1


def test_a_rate_that_is_no_dropout_is_noticed() -> None:
    """What switching it off did to the model is seen, because the model is asked with it."""
    model = tiny_model("llama")
    norm = model.model.norm
    norm.register_forward_hook(lambda module, _, output: output * (1 + module.drop_scale))
    norm.drop_scale = 0.1
    policy = Policy(model)
    assert norm.drop_scale == 0.0
    with pytest.raises(ModelError, match="off by"):
        check_layout(policy, "padded")
    assert norm.drop_scale == 0.0  # the model is left as it was


@pytest.mark.parametrize("kind", PACKED)
def test_a_model_may_take_views_of_what_attention_returns(kind: RowKind, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_dense_layers": 1}
    settings |= {"global_attn_every_n_layers": 2, "sliding_window": 12}
    monkeypatch.setitem(ARCHITECTURES, "afmoe", ("afmoe", {**ARCHITECTURES["llama"][1], **settings}))
    check_layout(Policy(tiny_model("afmoe")), kind)


@pytest.mark.parametrize("kind", ["shared", "packed", "padded"])
@pytest.mark.parametrize("family", ["mamba", "mamba2"])
def test_hidden_states_of_mamba_are_wider_than_its_head(family: str, kind: RowKind) -> None:
    """Its residual sums are in float32, also in bfloat16; its own forward pass narrows them before the head."""
    check_layout(Policy(tiny_family(family, dtype=torch.bfloat16)), kind)
