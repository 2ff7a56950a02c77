"""Architectures that must train with shared rows, and the page that lists all of them."""

import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from isopref.batch.packing import RowKind
from isopref.batch.rows import build_microbatch
from isopref.examples import PairTokens
from isopref.models.attention import RECORDED, recorded
from isopref.models.policy import Policy
from isopref.models.probe import check_layout
from isopref.models.windows import attention_windows
from isopref.testing import oracle
from isopref.testing.families import FAMILIES, tiny_config, tiny_family
from isopref.testing.models import examples, random_pairs, with_adapter
from isopref.testing.models_page import LAYOUTS, Support, is_decoder_only, page, summary, support, supported_rows

PAGE = Path(__file__).parents[2] / "docs" / "models.md"

SHARED = (
    "apertus", "arcee", "bailing_hybrid", "bamba", "cohere2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "ernie4_5",
    "exaone4", "falcon_h1", "gemma2", "gemma3_text", "gemma4_text", "glm4", "glm4_moe", "glm_moe_dsa", "gpt_oss",
    "granite", "granitemoehybrid", "hunyuan_v1_dense", "jamba", "kimi_linear", "lfm2", "lfm2_moe", "llama",
    "llama4_text", "mamba2", "mimo_v2_flash", "minimax", "ministral", "mistral", "mixtral", "nemotron", "nemotron_h",
    "olmo2", "olmo3", "olmo_hybrid", "olmoe", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_5_text",
    "qwen3_moe", "qwen3_next", "recurrent_gemma", "seed_oss", "smollm3", "stablelm", "starcoder2", "zamba2",
)  # fmt: skip


@pytest.mark.parametrize("family", SHARED)
def test_shared_rows(family: str) -> None:
    found = supported_rows(family)
    assert (found.rows, found.reason) == ("shared", "")


# Unfolded layers that return more than one vector per token.
UNFOLDED = ("deepseek_v32", "glm_moe_dsa", "gpt_neox_japanese", "hy_v4")


@pytest.mark.parametrize("kind", ["shared", "packed"])
@pytest.mark.parametrize("family", UNFOLDED)
def test_gradients_of_unfolded_layers(family: str, kind: RowKind) -> None:
    """All that a layer returns reaches the next one, also for sequences of very different lengths."""
    policy = Policy(tiny_family(family)).train()
    pairs = random_pairs(12, seed=1)
    found = oracle.gradient(policy, policy(build_microbatch(examples(pairs), kind)).logp.sum(), again=True)
    with policy.plain() as model:
        logps = oracle.pair_logps(model, pairs)
        own = oracle.gradient(policy, (logps.chosen + logps.rejected).sum())
    assert found.keys() == own.keys()
    assert oracle.relative_error(found, own) <= 1e-5


def test_attention_weights_that_look_like_values_of_tokens() -> None:
    """The longest of these sequences has as many tokens as there are heads."""
    config = tiny_config("gpt_neox_japanese")
    config.num_attention_heads = 8
    model = AutoModelForCausalLM.from_config(config).eval()
    pair = PairTokens(*map(np.array, ([5], [7, 8, 9, 4, 3, 2, 1], [6])))
    logps = oracle.pair_logps(model, [pair])
    found = Policy(model)(build_microbatch([pair.example], "shared")).logp
    assert torch.allclose(found, torch.cat([logps.chosen, logps.rejected]), atol=1e-4)


# Layers that mask keys themselves, or select them, do not ask for a window. MiniMax's full attention asks for one.
WINDOWS: dict[str, dict[int | None, int]] = {
    "deepseek_v32": {None: 2}, "deepseek_v4": {None: 2}, "glm_moe_dsa": {None: 2}, "llama4_text": {6: 1, None: 1},
    "minimax": {None: 1}, "phimoe": {12: 2},
}  # fmt: skip


@pytest.mark.parametrize("family", SHARED)
def test_attention_is_counted_with_the_windows_that_layers_ask_for(family: str) -> None:
    policy = Policy(tiny_family(family))
    found = attention_windows(policy)
    if family in WINDOWS:
        assert found == WINDOWS[family]
        return
    policy.packed_attention = RECORDED
    with recorded() as asked:
        policy(build_microbatch(examples(random_pairs(2, seed=0)), "shared"))
    assert found == Counter(one.window for one in asked)


def test_adapters_native_modules_and_export() -> None:
    assert support("llama") == Support("llama", "shared", adapters=True, native=True, exports=True)
    assert support("olmo_hybrid") == Support("olmo_hybrid", "shared", adapters=True, exports=True)
    assert support("bamba") == Support("bamba", "shared", adapters=True, exports=True)
    assert support("jamba") == Support("jamba", "shared", unfolded=True, adapters=True, exports=True)


@pytest.mark.parametrize(
    ("family", "rows", "reason"),
    [
        ("mpt", "padded", "no layer uses transformers' AttentionInterface"),
        ("bert", None, "it changes hidden states between its decoder and its output layer"),
        ("xlnet", None, "it is not causal: a token's prediction depends on later tokens"),
        ("reformer", None, "its forward pass fails on padded rows in training mode: ValueError: "),
        ("xlm", None, "its own forward pass fails on a sequence of tokens: AttributeError: "),
    ],
)
def test_reasons(family: str, rows: str | None, reason: str) -> None:
    found = supported_rows(family)
    assert found.rows == rows
    assert found.reason.startswith(reason)


def test_adapters_on_fewer_layers() -> None:
    """The routers of Llama 4 return two tensors, so they cannot have an adapter as linear layers do."""
    found = support("llama4_text")
    assert (found.rows, found.adapters) == ("shared", False)
    assert found.no_adapter.startswith("its own forward pass fails on a sequence of tokens: AttributeError")
    check_layout(Policy(with_adapter(tiny_family("llama4_text"), "lora", targets=["v_proj", "q_proj"])), "shared")


def test_which_architectures_are_decoders() -> None:
    assert all(map(is_decoder_only, ("gpt2", "gpt_neox", "llama", "mamba", "gemma3")))
    assert not any(map(is_decoder_only, ("bert", "bart", "roberta", "trocr")))


def test_the_page_counts() -> None:
    found = [
        Support("llama", "shared", adapters=True),
        Support("mpt", "padded", "why"),
        Support("gpt2", "shared", no_adapter="since"),
        Support("bert", None, "so"),
        Support("blt", None, "big", built=False),
    ]
    assert summary(found) == (
        "transformers has 5 such architectures. Of 4 built architectures, 3 (75%) can be trained, 2 (50%) with shared "
        "rows. "
        "Of 3 built decoder-only architectures, 3 (100%) can be trained, 2 (67%) with shared rows."
    )
    lines = page(found).splitlines()
    assert "| `llama` (LlamaForCausalLM) | shared | yes | no | no |" in lines
    assert "| `mpt` (MptForCausalLM) | padded | no | no | no | why |" in lines
    assert "| `bert` (BertLMHeadModel) | so |" in lines
    assert "- `gpt2` (GPT2LMHeadModel): since" in lines
    assert "| `blt` (BltForCausalLM) | big |" in lines


def test_the_page_is_of_this_version_and_has_every_architecture() -> None:
    text = PAGE.read_text()
    if transformers.__version__ not in text:
        pytest.skip(f"docs/models.md was written with another version than {transformers.__version__}: make models")
    rows = dict(re.findall(r"^\| `(\S+)` \(\w+\) \| (\w+)", text, flags=re.M))
    assert sorted(rows) == sorted(FAMILIES)
    assert {rows[family] for family in SHARED} == {"shared"}


def test_most_architectures_train_with_shared_rows() -> None:
    """The page's own figures: 95% of decoder-only architectures in some layout, 85% with shared rows."""
    rows = dict(re.findall(r"^\| `(\S+)` \(\w+\) \| (\w+)", PAGE.read_text().split("## Not tried")[0], flags=re.M))
    decoders = [family for family in rows if is_decoder_only(family)]
    assert sum(rows[family] in LAYOUTS for family in decoders) >= 0.95 * len(decoders)
    assert sum(rows[family] == "shared" for family in decoders) >= 0.85 * len(decoders)
