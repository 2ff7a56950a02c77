"""LoRA on fused experts beside their weights: peft's own numbers, without a second copy of the experts."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from isopref.batch.rows import build_microbatch
from isopref.models.adapter import summed_parameters
from isopref.models.low_rank import compute_beside, one_by_one, wrapped_experts
from isopref.models.parallel import checkpoint_layers
from isopref.models.policy import Policy
from isopref.testing.families import tiny_family
from isopref.testing.models import examples, random_pairs, tiny_model, with_adapter
from isopref.testing.oracle import relative_error
from support.fused_experts import CHOSEN, TOKENS, computed, first_experts

GATED = ("gate_up_proj", "down_proj")


def adapted(
    architecture: str,
    dtype: torch.dtype,
    *weights: str,
    rank: int = 3,
    family: bool = False,
    names: tuple[str, ...] = (),
) -> PreTrainedModel:
    """A tiny model with adapters on weights of its experts, away from their start."""
    model = (tiny_family if family else tiny_model)(architecture, dtype=dtype)
    config = LoraConfig(r=rank, target_modules=[], target_parameters=[f"experts.{one}" for one in weights])
    for name in ("default", *names):
        inject_adapter_in_model(config, model, name)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(dtype)
    compute_beside(model, ParamWrapper)
    return model


def as_peft_computes(model: PreTrainedModel) -> PreTrainedModel:
    """The same model with peft's own forward."""
    own = copy.deepcopy(model)
    for outermost, *_ in wrapped_experts(own, ParamWrapper):
        del outermost.forward
    return own


CASES = [
    pytest.param("qwen3_moe", GATED, False, id="qwen3_moe"),
    pytest.param("qwen3_moe", ("down_proj",), False, id="one weight"),
    pytest.param("gpt_oss", GATED, False, id="transposed, with biases"),
    pytest.param("olmoe", GATED, True, id="olmoe"),
    pytest.param("nemotron_h", ("up_proj", "down_proj"), True, id="no gate"),
]


@pytest.mark.parametrize(("architecture", "weights", "family"), CASES)
def test_numbers_and_gradients_are_pefts(architecture: str, weights: tuple[str, ...], family: bool) -> None:
    model = adapted(architecture, torch.float64, *weights, family=family)
    own = as_peft_computes(model)
    own.set_experts_implementation("eager")  # transformers' grouped product takes no float64
    found, expected = (computed(first_experts(one)) for one in (model, own))
    assert found.keys() == expected.keys()
    assert relative_error(found, expected) <= 1e-14
    assert all(relative_error({name: found[name]}, {name: one}) <= 1e-13 for name, one in expected.items())


@pytest.mark.parametrize("rank", [1, 3, 8])
@pytest.mark.parametrize(("architecture", "weights", "family"), CASES)
def test_one_kernel_computes_what_experts_one_by_one_do(
    architecture: str, weights: tuple[str, ...], family: bool, rank: int
) -> None:
    """Also of ranks whose rows are not aligned."""
    for dtype, bound in ((torch.float32, 1e-6), (torch.bfloat16, 2e-2)):
        wrapper = first_experts(adapted(architecture, dtype, *weights, family=family, rank=rank))
        exact = copy.deepcopy(wrapper).double()
        assert relative_error(computed(wrapper), computed(exact)) <= bound


def test_a_product_by_hand() -> None:
    """Two rows by the first expert, none by the second and one by the third."""
    x, weight = torch.arange(12.0).view(3, 4), torch.arange(24.0).view(3, 4, 2)
    expected = torch.stack([x[0] @ weight[0], x[1] @ weight[0], x[2] @ weight[2]])
    torch.testing.assert_close(one_by_one(x, weight, ends=[2, 2]), expected)
    x, weight = x.repeat(1, 2), weight.repeat(1, 2, 2)
    offs = torch.tensor([2, 2, 3], dtype=torch.int32)
    torch.testing.assert_close(functional.grouped_mm(x, weight, offs=offs), one_by_one(x, weight, ends=[2, 2]))


class Largest(TorchDispatchMode):
    """The numbers of the largest tensor that an operation makes; views are not made."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.own = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
        self.numbers: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for one in made if isinstance(made, tuple | list) else (made,):
            if isinstance(one, Tensor) and one.untyped_storage().data_ptr() not in self.own:
                self.numbers = max(self.numbers, one.untyped_storage().nbytes() // one.element_size())
        return made


def largest_made(model: PreTrainedModel, recompute: bool) -> int:
    """In a forward and backward pass of a few tokens."""
    policy = Policy(model).train()
    checkpoint_layers(policy, 2 * recompute)
    microbatch = build_microbatch(examples(random_pairs(1)), "shared")
    largest = Largest(model)
    with largest:
        policy(microbatch).logp.sum().backward()
    return largest.numbers


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_as_large_as_the_experts_is_made(dtype: torch.dtype, recompute: bool) -> None:
    """Nothing larger than a matrix of the adapter, with few tokens."""
    size = {"num_experts": 32, "moe_intermediate_size": 120}
    targets = ["q_proj", "gate_proj", "up_proj", "down_proj"]
    model = with_adapter(tiny_model("qwen3_moe", dtype=dtype, **size), "lora", targets=targets)
    own = as_peft_computes(model)
    down_proj = 32 * 32 * 120
    assert largest_made(own, recompute) >= 2 * down_proj  # gates and up projections are one tensor
    adapter = max(one.numel() for one in model.parameters() if one.requires_grad)
    assert largest_made(model, recompute) <= adapter <= down_proj / 2


def set_each(model: PreTrainedModel, change: Callable[[Any], Any]) -> None:
    for nested in wrapped_experts(model, ParamWrapper):
        for wrapper in nested:
            change(wrapper)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda model: set_each(model, lambda one: one.enable_adapters(False)), id="disabled"),
        pytest.param(lambda model: set_each(model, lambda one: one.merge(adapter_names=["default"])), id="merged"),
        pytest.param(lambda model: set_each(model, lambda one: one.set_adapter(["default", "other"])), id="two"),
        pytest.param(lambda model: model.set_experts_implementation("batched_mm"), id="another implementation"),
    ],
)
def test_what_cannot_be_computed_so_is_left_to_peft(change: Callable[[Any], Any]) -> None:
    model = adapted("qwen3_moe", torch.float32, *GATED, names=("other",))
    change(model)
    arguments = (torch.randn(TOKENS, 32), torch.rand(TOKENS, 4).topk(CHOSEN).indices, torch.rand(TOKENS, CHOSEN))
    found, own = (first_experts(one)(*arguments) for one in (model, as_peft_computes(model)))
    assert torch.equal(found, own)


def test_routers_are_left_to_peft() -> None:
    model = with_adapter(tiny_model("qwen3_moe"), "lora")
    wrappers = [one for one in model.modules() if isinstance(one, ParamWrapper)]
    assert [one.parameter_name for one in wrappers if "forward" in vars(one)] == ["down_proj"] * 2  # the outermost
    assert sum(one.parameter_name == "weight" for one in wrappers) == 2


def test_experts_outside_the_interface_are_left_to_peft() -> None:
    model = tiny_family("llama4_text")
    weights = [f"feed_forward.experts.{one}" for one in GATED]
    inject_adapter_in_model(LoraConfig(r=3, target_modules=[], target_parameters=weights), model)
    compute_beside(model, ParamWrapper)
    wrappers: list[Any] = [one for one in model.modules() if isinstance(one, ParamWrapper)]
    assert len(wrappers) == 4
    assert not any("forward" in vars(one) for one in wrappers)
    assert summed_parameters(model) == sum(one.get_param().numel() for one in wrappers)


def test_the_config_stays_what_it_was() -> None:
    model = adapted("qwen3_moe", torch.float32, *GATED)
    wrapper = first_experts(model)
    computed(wrapper)
    assert model.config._experts_implementation == "grouped_mm"
    with pytest.raises(RuntimeError):
        wrapper(torch.ones(TOKENS, 31), torch.zeros(TOKENS, CHOSEN, dtype=torch.int64), torch.ones(TOKENS, CHOSEN))
    assert model.config._experts_implementation == "grouped_mm"
