"""On a CUDA device: adapters in compiled layers, a base in four bits, optimizers and offloading, by the command."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from isopref.batch.rows import build_microbatch
from isopref.models.adapter import quantize_nf4
from isopref.models.parallel import compile_layers
from isopref.models.policy import Policy
from isopref.models.probe import check_layout
from isopref.testing.models import examples, random_pairs, tiny_model, with_adapter
from isopref.testing.oracle import relative_error
from support.cuda import Command
from support.fused_experts import computed, first_experts

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
WIDE: dict[str, Any] = {"head_dim": 64, "hidden_size": 256, "intermediate_size": 512, "max_position_embeddings": 4096}


@pytest.mark.parametrize("quantize", [False, True])
def test_compiled_layers_with_an_adapter_score_as_the_model_does(quantize: bool) -> None:
    torch._dynamo.reset()
    model = tiny_model("llama", dtype=torch.bfloat16, **WIDE)
    if quantize:
        quantize_nf4(model, CUDA, head=model.get_output_embeddings())
    policy = Policy(with_adapter(model, "lora")).to(CUDA)
    compile_layers(policy)
    check_layout(policy, "shared")


def test_a_step_of_compiled_layers_in_four_bits_holds_no_layer_unpacked() -> None:
    """Of 67 million numbers a layer: kept from one pass to the other they would be 134 MB in each of four layers."""
    torch._dynamo.reset()
    shape = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 32}
    model = tiny_model("llama", dtype=torch.bfloat16, **WIDE | shape, num_hidden_layers=4, initializer_range=0.02)
    quantize_nf4(model, CUDA, head=model.get_output_embeddings())
    policy = Policy(with_adapter(model, "lora")).to(CUDA).train()
    compile_layers(policy)
    for seed, pairs in enumerate((2, 3, 4, 5)):  # the last row compiles nothing, which would take memory too
        policy.zero_grad()
        row = build_microbatch(examples(random_pairs(pairs, seed=seed)), "shared").to(CUDA)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        policy(row).logp.sum().backward()
    most = torch.cuda.max_memory_allocated() - before
    largest, layer = 2 * 2048 * 8192, 2 * (4 * 2048 * 2048 + 3 * 2048 * 8192)
    assert largest < most < layer


def test_four_bits_are_the_same_numbers_as_on_the_cpu() -> None:
    found = []
    for device in (torch.device("cpu"), CUDA):
        model = tiny_model("llama", **WIDE)
        quantize_nf4(model, device, head=model.get_output_embeddings())
        layer: Any = model.get_submodule("model.layers.0.mlp.up_proj")
        found.append(layer.weight.to(torch.float32).cpu())
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("targets", [["gate_proj", "up_proj"], ["gate_proj", "up_proj", "down_proj"]])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_experts_compute_what_they_do_in_float64_on_the_cpu(
    dtype: torch.dtype, bound: float, targets: list[str]
) -> None:
    """The rank of down projections, 4, is padded."""
    model = with_adapter(tiny_model("qwen3_moe", dtype=dtype, **WIDE), "lora", targets=targets)
    wrapper = first_experts(model)
    exact = copy.deepcopy(wrapper).double()
    assert relative_error(computed(wrapper.to(CUDA)), computed(exact)) <= bound


@pytest.mark.parametrize(
    "changes",
    [
        ["model.adapter={rank: 8}", "model.compute_dtype=bfloat16"],
        ["model.adapter={rank: 8}", "model.dtype=bfloat16"],
        ["model.adapter={rank: 8, quantize: nf4}", "model.compute_dtype=bfloat16"],
        ["model.adapter={rank: 8, kind: dora}", "model.compute_dtype=bfloat16"],
        ["optim.kind=adamw_8bit_sr", "model.dtype=bfloat16"],
        ["optim.kind=adamw_skip"],
        ["optim.kind=muon", "model.compute_dtype=bfloat16"],
        ["layout.offload=true", "model.compute_dtype=bfloat16"],
        ["layout.offload=true", "model.adapter={rank: 8}", "model.compute_dtype=bfloat16"],
    ],
    ids=" ".join,
)
def test_train(isopref_train: Command, changes: list[str]) -> None:
    """The whole command: from chance to nearly all pairs."""
    done = isopref_train(*changes)
    assert done.before == 0.5
    assert done.after > 0.8
