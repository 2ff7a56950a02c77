"""LoRA on fused experts, computed beside their weights: x W + scale (x A) B for each expert.

peft wraps the weights of all experts in a ParamWrapper, which adds the update to all of them in every pass: a second
copy of the experts, kept for the backward pass. Here the wrapper stays the owner of the adapter, so saving, loading and
merging are peft's. Only its forward is replaced, on the instance: it hands the adapter's factors to an experts
implementation that is registered with transformers. The result is the same up to rounding.

peft's own forward remains for everything else: an adapter that is disabled or merged, several at once, weights other
than those of experts (routers), and experts outside transformers' interface or set to another implementation of it than
its default, `grouped_mm`.

Dimensions: T tokens, K experts of each, S = T K rows sorted by expert, E experts, D and F widths in and out of a
weight, R rank.
"""

from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.integrations.moe import ExpertsInterface

NAME = "isopref_low_rank"
OWN = "grouped_mm"  # the implementation whose function this one computes, with an update; transformers' default
WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")  # what transformers calls those of an experts module
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
ALIGNED = 8  # numbers; a grouped product takes rows of multiples of 16 bytes
GROUPED_FROM = (8, 0)  # compute capability

Product = Callable[[Tensor, Tensor], Tensor]  # S, D and E, D, F to S, F: each row by the weight of its expert
Updates = dict[str, tuple[Tensor, Tensor, float]]  # by the weight's name: A (E, D, R), B (E, R, F), scale

_updates: ContextVar[Updates] = ContextVar("updates")


def compute_beside(model: nn.Module, wrapper: type[nn.Module]) -> None:
    """Make adapters of experts compute beside the weights. `wrapper`: peft's ParamWrapper."""
    ExpertsInterface.register(NAME, _experts)
    for outermost, *_ in wrapped_experts(model, wrapper):
        outermost.forward = MethodType(_forward, outermost)


def wrapped_experts(model: nn.Module, wrapper: type[nn.Module]) -> Iterator[list[Any]]:
    """The wrappers of each experts module that can compute beside its weights, from the outermost in."""
    wrappers = [module for module in model.modules() if isinstance(module, wrapper)]
    inner = {id(one.base_layer) for one in wrappers}
    for nested in (_nested(one) for one in wrappers if id(one) not in inner):
        experts: Any = nested[-1].base_layer
        in_interface = hasattr(experts, "is_concatenated") and not getattr(experts, "_is_expert_parallel", False)
        if in_interface and all(_is_weight_of_experts(one) for one in nested):
            yield nested


def _nested(outermost: nn.Module) -> list[Any]:
    """A wrapper and those inside it: there is one for each weight of a module."""
    nested: list[Any] = [outermost]
    while isinstance(nested[-1].base_layer, type(outermost)):
        nested.append(nested[-1].base_layer)
    return nested


def _is_weight_of_experts(wrapper: Any) -> bool:
    return wrapper.parameter_name in WEIGHTS and wrapper.get_param().ndim == 3 and wrapper.num_experts > 1


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _forward(self: Any, hidden_TD: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Replaces the forward of the outermost wrapper of an experts module."""
    nested = _nested(self)
    experts: Any = nested[-1].base_layer
    config = experts.config
    if config._experts_implementation != OWN or not all(_is_on_alone(one) for one in nested):
        own: Tensor = type(self).forward(self, hidden_TD, *args, **kwargs)
        return own
    before = _updates.set({one.parameter_name: _factors(one, experts.is_transposed) for one in nested})
    config._experts_implementation = NAME
    try:
        out: Tensor = experts(hidden_TD, *args, **kwargs)
    finally:
        config._experts_implementation = OWN
        _updates.reset(before)
    return out


def _is_on_alone(wrapper: Any) -> bool:
    """Whether exactly one adapter is to be added to the weight, in a dtype that products take."""
    on = [name for name in wrapper.active_adapters if name in wrapper.lora_A]
    return len(on) == 1 and not wrapper.disable_adapters and not wrapper.merged and wrapper.get_param().dtype in DTYPES


def _factors(wrapper: Any, is_transposed: bool) -> tuple[Tensor, Tensor, float]:
    """A, B and the scale of a wrapper's adapter, in the weight's dtype.

    peft's two factors multiply to the update as the weight is stored: E, D, F if it is transposed, else E, F, D.
    """
    (name,) = (name for name in wrapper.active_adapters if name in wrapper.lora_A)
    left, right, scale = wrapper.get_delta_factors(name)
    a_EDR, b_ERF = (left, right) if is_transposed else (right.mT, left.mT)
    more = -a_EDR.shape[-1] % ALIGNED
    if more:  # zeros, which change nothing
        a_EDR, b_ERF = functional.pad(a_EDR, (0, more)), functional.pad(b_ERF, (0, 0, 0, more))
    return a_EDR, b_ERF.contiguous(), scale


def _experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The signature transformers calls; what its `grouped_mm` computes, with the updates."""
    updates, num_chosen = _updates.get(), top_k_index.shape[-1]
    expert_S, order_S = top_k_index.reshape(-1).sort()
    every = torch.arange(self.num_experts, device=expert_S.device)
    product = _product(self.down_proj, torch.searchsorted(expert_S, every, right=True, out_int32=True))

    def multiplied(x_SD: Tensor, name: str) -> Tensor:
        weight = getattr(self, name)
        x_SD = x_SD.to(weight.dtype)
        out_SF = product(x_SD, weight if self.is_transposed else weight.mT)
        if name in updates:
            a_EDR, b_ERF, scale = updates[name]
            out_SF += product(product(x_SD, a_EDR) * scale, b_ERF)
        if self.has_bias:
            out_SF += getattr(self, f"{name}_bias")[expert_S]
        return out_SF

    x_SD = hidden_states[order_S // num_chosen]
    if self.has_gate:
        inner_SF = self._apply_gate(multiplied(x_SD, "gate_up_proj"))
    else:
        inner_SF = self.act_fn(multiplied(x_SD, "up_proj"))
    out_SD = multiplied(inner_SF, "down_proj")
    if getattr(self, "has_post_expert_norm", False):
        out_SD = self.post_expert_norm(out_SD)
    out_SD = out_SD * top_k_weights.reshape(-1)[order_S, None]
    out_TKD = out_SD[order_S.argsort()].view(len(hidden_states), num_chosen, -1)
    return out_TKD.sum(dim=1).to(hidden_states.dtype)


def _product(weight: Tensor, ends_E: Tensor) -> Product:
    """How to multiply rows that end at `ends` for each expert: in one kernel, where there is one for the dtype."""
    on_cuda = weight.device.type == "cuda"
    has_kernel = not on_cuda or torch.cuda.get_device_capability(weight.device) >= GROUPED_FROM
    if has_kernel and weight.dtype != torch.float64:
        return partial(functional.grouped_mm, offs=ends_E)
    return partial(one_by_one, ends=ends_E[:-1].tolist())


def one_by_one(x_SD: Tensor, weight_EDF: Tensor, ends: list[int]) -> Tensor:
    """What a grouped product computes: the rows of each expert, which end at `ends` (of all but the last)."""
    parts = zip(x_SD.tensor_split(ends), weight_EDF.unbind(), strict=True)
    return torch.cat([x @ weight for x, weight in parts])
