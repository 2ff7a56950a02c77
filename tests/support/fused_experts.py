"""Experts with an adapter, on their own: their outputs and gradients for tokens of which one expert gets none."""

from functools import partial
from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor
from transformers import PreTrainedModel

from isopref.models.low_rank import wrapped_experts

TOKENS, CHOSEN = 50, 2


def first_experts(model: PreTrainedModel) -> Any:
    """The outermost wrapper of the first experts module."""
    return next(wrapped_experts(model, ParamWrapper))[0]


def computed(wrapper: Any) -> dict[str, Tensor]:
    """Outputs of some experts, and the gradients of everything that has one; one expert gets no token."""
    experts = wrapper.get_base_layer()
    weight = experts.down_proj
    width = weight.shape[2] if experts.is_transposed else weight.shape[1]
    generator = torch.Generator().manual_seed(0)
    random = partial(torch.randn, generator=generator, dtype=torch.float64)
    hidden = random(TOKENS, width).to(weight).requires_grad_()
    shares = random(TOKENS, CHOSEN).softmax(dim=1).to(weight).requires_grad_()
    scores = torch.rand(TOKENS, experts.num_experts, generator=generator)
    scores[:, 1] = -1
    out = wrapper(hidden, scores.topk(CHOSEN).indices.to(weight.device), shares)
    (out * random(TOKENS, width).to(weight)).sum().backward()
    found = {name: one.grad for name, one in wrapper.named_parameters() if one.grad is not None}
    assert found
    assert hidden.grad is not None
    assert shares.grad is not None
    found |= {"out": out.detach(), "hidden": hidden.grad, "shares": shares.grad}
    return {name: one.cpu() for name, one in found.items()}
