"""What fused experts under an adapter take: the plan beside what a forward pass keeps."""

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor
from transformers import PreTrainedModel

from isopref.build.resolve import state_bytes
from isopref.cards import CARDS
from isopref.engine.optim import build_optimizer
from isopref.models.adapter import NewAdapter, add_adapter
from isopref.models.low_rank import wrapped_experts
from isopref.models.policy import Policy
from isopref.models.shape import shape_of
from isopref.plan import memory as plan
from isopref.plan.layout import ONE_GPU, Loads
from isopref.plan.memory import peak_memory
from isopref.plan.network import Network
from isopref.plan.speed import GROUPED, PRODUCTS, step_time
from isopref.testing.models import ARCHITECTURES, tiny_model

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EXPERTS, WIDTH, INNER, LAYERS = 4, 32, 240, 2
SUMMED = LAYERS * EXPERTS * 3 * WIDTH * INNER
FUSED = ("gate_proj", "up_proj", "down_proj")


def adapted(*targets: str, by_peft: bool = False) -> PreTrainedModel:
    """With `by_peft`, peft's own forward, which remains for experts outside transformers' interface."""
    model = tiny_model("qwen3_moe", dtype=torch.bfloat16, moe_intermediate_size=INNER)
    add_adapter(model, NewAdapter("lora", rank=4, alpha=8.0, targets=targets), dtype=torch.bfloat16, seed=0)
    for outermost, *_ in wrapped_experts(model, ParamWrapper) if by_peft else ():
        del outermost.forward
    return model


def kept_bytes(model: PreTrainedModel) -> int:
    """What a forward pass of a few tokens holds for the backward pass, beside the model's own weights."""
    own = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    kept = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(input_ids=torch.tensor([[5, 9, 23]]))
    assert output.logits.requires_grad
    return sum(kept.values())


@pytest.mark.parametrize(("architecture", "adapter"), [("qwen3_moe", False), ("qwen3_moe", True), ("gpt_oss", False)])
def test_muon_has_one_average_for_matrices_alone(
    monkeypatch: pytest.MonkeyPatch, architecture: str, adapter: bool
) -> None:
    """Fused experts are none, nor are their biases: AdamW has two for them."""
    monkeypatch.setitem(ARCHITECTURES, "gpt_oss", ("gpt_oss", {**ARCHITECTURES["llama"][1], "num_local_experts": 4}))
    model = tiny_model(architecture, dtype=torch.bfloat16)
    if adapter:
        add_adapter(model, NewAdapter("lora", rank=4, alpha=8.0), dtype=torch.bfloat16, seed=0)
    shape, policy = shape_of(copy.deepcopy(model)), Policy(model)
    common: dict[str, Any] = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0, "seed": 0}
    optimizer = build_optimizer("muon", policy, compute_dtype=torch.bfloat16, **common)
    for parameter in policy.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    held = sum(value.nbytes for state in optimizer.state.values() for name, value in state.items() if name != "step")
    assert held == pytest.approx(shape.trained_parameters * state_bytes("muon", 2, in_matrices=shape.share_in_matrices))


def test_each_expert_of_a_token_keeps_a_copy_of_its_input_and_its_output() -> None:
    """What the plan counts for them beside the inner sides of the products, and what a forward pass holds."""
    model = tiny_model("qwen3_moe", dtype=torch.bfloat16)
    shape, width, tokens = shape_of(model), model.config.hidden_size, 64
    used = model.config.num_experts_per_tok
    rows = []

    def keep(tensor: Tensor) -> Tensor:
        rows.append(tuple(tensor.shape))
        return tensor

    hidden = torch.randn(1, tokens, width, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.model.layers[0].mlp(hidden)
    dense = copy.copy(shape.flops)
    dense.experts_per_token = 0
    counted = plan.kept_bytes(shape, ONE_GPU)[0] - plan.kept_bytes(replace(shape, flops=dense), ONE_GPU)[0]
    assert rows.count((used * tokens, width)) == 2
    assert counted == 2 * used * width * ONE_GPU.compute_bytes


def test_grouped_products_are_slower_than_others() -> None:
    """Those of the experts that compute a token, forward and backward; an adapter leaves out their gradient."""
    model = tiny_model("qwen3_moe")
    flops = shape_of(model).flops
    experts = [p for name, p in model.named_parameters() if "experts" in name.split(".")]
    share = model.config.num_experts_per_tok / model.config.num_experts
    assert flops.per_token_in_experts == share * 2 * sum(p.numel() for p in experts)
    assert flops.frozen_in_experts == 0
    for parameter in experts:
        parameter.requires_grad_(False)
    frozen = shape_of(model).flops
    assert frozen.frozen_in_experts == frozen.frozen_per_token == flops.per_token_in_experts
    load = Loads(*(np.array([[value]]) for value in (1e6, 1e6, 0.0, 0.0, 0.0)))
    card, rate = CARDS["H200"], CARDS["H200"].rate(ONE_GPU.compute_bytes)
    dense = copy.copy(flops)
    dense.per_token_in_experts = 0
    shape = shape_of(model)
    found, other = (
        step_time(replace(shape, flops=some), ONE_GPU, card, load, Network.of(card)).products for some in (flops, dense)
    )
    slower = 3 * flops.per_token_in_experts * 1e6 / rate * (1 / GROUPED - 1 / PRODUCTS)
    assert found - other == pytest.approx(slower)


def test_a_second_copy_of_the_experts_is_kept_by_peft_alone() -> None:
    models = [adapted(*ATTENTION), adapted(*ATTENTION, *FUSED), adapted(*ATTENTION, *FUSED, by_peft=True)]
    shapes = [shape_of(model) for model in models]
    assert [shape.summed_parameters for shape in shapes] == [0, 0, SUMMED]
    assert [shape.has_wrapped_parameters for shape in shapes] == [False, True, True]
    without, beside, summed = (kept_bytes(model) for model in models)
    assert summed - without == pytest.approx(2 * SUMMED, rel=0.06)  # and what the adapter itself keeps
    adapter = 2 * (shapes[1].trained_parameters - shapes[0].trained_parameters)  # bytes
    assert beside - without < 2 * adapter < summed - without  # activations, and factors in another order
    assert shape_of(adapted("mlp.gate")).summed_parameters == LAYERS * EXPERTS * WIDTH  # of routers


@pytest.mark.parametrize("recompute", [0, 1, 2])
def test_the_peak_has_it_for_each_layer_that_keeps_its_activations(recompute: int) -> None:
    """And, in one layer's backward pass, its gradient. If all recompute, that layer has computed it again."""
    shape = shape_of(adapted(*ATTENTION, *FUSED, by_peft=True))
    load = Loads(*(np.array([[size]]) for size in (1000.0, 1000.0, 0.0, 0.0, 0.0)))
    layout = replace(ONE_GPU, compiled=False, recompute=recompute)
    with_sum, without = (
        peak_memory(one, layout, load, answers=0) for one in (shape, replace(shape, summed_parameters=0))
    )
    layer = 2 * SUMMED / LAYERS
    assert with_sum.activations - without.activations == pytest.approx((LAYERS - recompute) * layer)
    assert with_sum.logits - without.logits == pytest.approx(layer * (2 if recompute == LAYERS else 1))
