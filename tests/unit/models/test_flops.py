"""Useful operations, counted by hand for a tiny Llama."""

from collections import Counter

import numpy as np
import pytest
import torch

from isopref.cards import CARDS
from isopref.examples import Lengths
from isopref.models.conversion import from_hf
from isopref.models.flops import UsefulFlops, peak_flops
from isopref.models.policy import Policy
from isopref.models.windows import attention_windows
from isopref.testing.models import ARCHITECTURES, VOCABULARY, tiny_model, with_adapter

ATTENTION = 32 * 32 + 2 * 32 * 16 + 32 * 32  # of one layer: queries, keys and values, output


def test_one_pair_by_hand() -> None:
    """Two layers, 32 wide, 48 in the MLP, 4 heads and 2 key heads of 8; prompt 3, chosen 2, rejected 4."""
    weights = 2 * (ATTENTION + 3 * 32 * 48)
    # prompt and chosen: 1 + 2 + 3 + 4 + 5 keys; rejected: the prompt's 3 each, and 1 + 2 + 3 + 4.
    keys = 15 + 4 * 3 + 10
    forward = 2 * weights * (3 + 2 + 4) + 2 * 32 * VOCABULARY * (2 + 4) + 2 * 4 * (4 * 8) * keys
    assert UsefulFlops(Policy(tiny_model("llama")))(Lengths.of_pairs(np.array([[3, 2, 4]]))) == 3 * forward


def test_only_attention_costs_more_with_every_token() -> None:
    """A window of 4, prompt 3, chosen 2, rejected 4; and the two kinds of layers of Olmo 3 and LFM2."""
    lengths = Lengths.of_pairs(np.array([[3, 2, 4]]))
    of_full = 1 + 2 + 3 + (4 + 5) + (4 + 5 + 6 + 7)
    of_windows = 1 + 2 + 3 + (4 + 4) + (4 + 4 + 4 + 4)
    flops = UsefulFlops(Policy(tiny_model("llama")))
    assert flops.windows == {None: 2}
    rest = flops(lengths) - 3 * 2 * 4 * (4 * 8) * of_full
    flops.windows = Counter({4: 1})
    assert flops(lengths) == rest + 3 * 4 * (4 * 8) * of_windows
    flops.windows = Counter()
    assert flops(lengths) == rest


HYBRID = {"bamba": 1, "lfm2": 1, "mamba": 0, "olmo_hybrid": 1}  # layers with attention


@pytest.mark.parametrize("name", HYBRID)
def test_layers_with_a_state_do_not_attend(name: str) -> None:
    assert attention_windows(Policy(tiny_model(name))).total() == HYBRID[name]


def test_modules_of_olmo_core_have_the_windows_of_their_config() -> None:
    assert attention_windows(Policy(from_hf(tiny_model("olmo3")))) == attention_windows(Policy(tiny_model("olmo3")))


def test_frozen_weights_have_no_gradient_of_their_own() -> None:
    """Rank 4 on all linear layers: the matrices under them and the head cost two thirds, their factors the whole."""
    policy = Policy(with_adapter(tiny_model("llama"), "lora"))
    shapes = [(32, 32), (32, 16), (32, 16), (32, 32), *[(32, 48)] * 3]
    frozen = 2 * sum(m * n for m, n in shapes)
    factors = 2 * sum(4 * (m + n) for m, n in shapes)
    keys = 15 + 4 * 3 + 10
    tokens, predicted = 9, 6
    expected = (2 * 2 * frozen + 3 * 2 * factors) * tokens + 2 * 2 * 32 * VOCABULARY * predicted
    assert UsefulFlops(policy)(Lengths.of_pairs(np.array([[3, 2, 4]]))) == expected + 3 * 2 * 4 * (4 * 8) * keys


def test_pairs_add_up() -> None:
    flops = UsefulFlops(Policy(tiny_model("llama")))
    lengths = Lengths.of_pairs(np.array([[3, 2, 4], [7, 1, 1], [1, 9, 5]]))
    assert flops(lengths) == sum(flops(lengths.select([i])) for i in range(3))


def test_embeddings_do_no_work_and_experts_only_when_used() -> None:
    """A token takes two of four experts; the tables of tokens and positions are only looked up."""
    for name, of_token in (("gpt2", 2 * (32 * 96 + 32 * 32 + 2 * 32 * 128)), ("llama_tied", None), ("qwen3_moe", None)):
        flops = UsefulFlops(Policy(tiny_model(name)))
        if of_token is not None:
            assert flops.per_token == 2 * of_token
    assert flops.per_token == 2 * 2 * (ATTENTION + 32 * 4 + 2 * 3 * 32 * 24)  # with the router, 32 x 4


def test_an_expert_that_every_token_meets_counts_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of eight experts of width 24, and two shared ones, which are one MLP of width 48."""
    settings = {
        "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 2, "moe_intermediate_size": 24,
        "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0,
    }  # fmt: skip
    monkeypatch.setitem(ARCHITECTURES, "glm4_moe", ("glm4_moe", {**ARCHITECTURES["llama"][1], **settings}))
    routed, shared = 2 * 3 * 32 * 24, 3 * 32 * 48
    assert UsefulFlops(Policy(tiny_model("glm4_moe"))).per_token == 2 * 2 * (ATTENTION + 32 * 8 + routed + shared)


def test_biases_of_experts_are_no_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of four experts of width 48, whose biases are one tensor of two dimensions."""
    settings = {**ARCHITECTURES["llama"][1], "num_local_experts": 4, "num_experts_per_tok": 2}
    monkeypatch.setitem(ARCHITECTURES, "gpt_oss", ("gpt_oss", settings))
    model = tiny_model("gpt_oss")
    assert any(name.endswith("_bias") and p.shape == (4, 2 * 48) for name, p in model.named_parameters())
    assert UsefulFlops(Policy(model)).per_token == 2 * 2 * (ATTENTION + 32 * 4 + 2 * 3 * 32 * 48)


def test_a_vision_tower_does_no_work() -> None:
    flops = UsefulFlops(Policy(tiny_model("gemma3_vision")))
    assert (flops.per_token, flops.frozen_per_token) == (2 * 2 * (ATTENTION + 3 * 32 * 48), 0)
    lengths = Lengths.of_pairs(np.array([[3, 2, 4]]))
    assert flops(lengths) == UsefulFlops(Policy(tiny_model("gemma3")))(lengths)


@pytest.mark.parametrize(
    ("device", "name", "dtype", "flops"),
    [
        ("cpu", "", torch.float32, None),
        ("cuda", "NVIDIA H100 80GB HBM3", torch.bfloat16, 989e12),
        ("cuda", "NVIDIA H100 PCIe", torch.float16, 756e12),
        ("cuda", "NVIDIA H100 80GB HBM3", torch.float32, 67e12),
        ("cuda", "NVIDIA H100 80GB HBM3", torch.float64, None),
        ("cuda", "Some Card 9000", torch.bfloat16, None),
    ],
)
def test_only_data_sheets_say_what_a_device_can_do(
    monkeypatch: pytest.MonkeyPatch, device: str, name: str, dtype: torch.dtype, flops: float | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: name)
    assert peak_flops(torch.device(device), dtype) == flops


def test_float32_products_with_fewer_bits_have_another_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert peak_flops(torch.device("cuda"), torch.float32) is None


def test_a_card_is_found_by_its_closest_name() -> None:
    assert list(CARDS).index("H100 PCIe") < list(CARDS).index("H100")
