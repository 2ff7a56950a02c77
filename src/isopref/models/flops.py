"""How many floating-point operations a batch of pairs needs, and how many a device can do.

Only useful operations count: every real token once (a prompt serves both answers), logits only where a trained token is
predicted, attention in the layers that attend and within their windows, and a backward pass of twice the forward pass,
without the gradients that frozen weights do not have.
Padding, repeated prompts and recomputed activations do not count.
"""

import torch
from torch import nn

from isopref.cards import CARDS
from isopref.errors import ModelError
from isopref.examples import Lengths
from isopref.models.head import head_of
from isopref.models.parts import widest_attention
from isopref.models.policy import Policy
from isopref.models.unused import is_inside
from isopref.models.windows import attention_windows, attention_work, seen


class UsefulFlops:
    """Counts the useful operations of pairs, forward and backward, for one model."""

    def __init__(self, policy: Policy):
        head = head_of(policy.model)
        if head is None:
            raise ModelError(f"{policy.name} has no output head, so it is not a language model. Use another model.")
        config = widest_attention(policy.model.config.get_text_config())
        experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
        used = getattr(config, "num_experts_per_tok", None)
        share = used / experts if experts and used else 1.0
        self.experts_per_token: int = used if experts and used else 0  # those that compute a token
        tables = {id(m.weight) for m in policy.model.modules() if isinstance(m, nn.Embedding)}
        work = [
            (2 * p.numel() * (share if _is_of_experts(name) else 1.0), p.requires_grad, _is_of_experts(name))
            for name, p in policy.model.named_parameters()
            if p.ndim >= 2 and id(p) not in tables and p is not head.weight
            if not name.endswith("bias")  # the biases of all experts are one matrix
            if not is_inside(name, policy.unused)
        ]
        self.per_token = sum(flops for flops, _, _ in work)
        self.frozen_per_token = sum(flops for flops, trained, _ in work if not trained)
        self.per_token_in_experts = sum(flops for flops, _, of_experts in work if of_experts)
        self.frozen_in_experts = sum(flops for flops, trained, of_experts in work if of_experts and not trained)
        self.per_logits = 2 * head.weight.numel()
        self.frozen_per_logits = 0 if head.weight.requires_grad else self.per_logits
        heads = getattr(config, "num_attention_heads", 0)  # a model may have none, and then no attention
        width = getattr(config, "head_dim", None) or config.hidden_size // max(1, heads)
        self.attending = attention_windows(policy).total()  # layers
        self.windows = attention_work(policy)
        # For every query and key of a layer with the widest heads: a score, and a product with the value.
        self.per_query_key = 4 * width * heads

    def __call__(self, lengths: Lengths) -> float:
        keys = sum(count * _keys(lengths, window) for window, count in self.windows.items())
        tokens, predicted = lengths.tree.sum(), lengths.trained.sum()
        forward = self.per_token * tokens + self.per_logits * predicted + self.per_query_key * keys
        return float(3 * forward - self.frozen_per_token * tokens - self.frozen_per_logits * predicted)


def _is_of_experts(name: str) -> bool:
    return "experts" in name.split(".")


def _keys(lengths: Lengths, window: int | None) -> float:
    """Keys that all tokens see, added up: of a prompt once, and of each answer after it."""
    of_prompts = seen(lengths.prompt.astype(float), window)
    whole = seen(lengths.prompt[lengths.of_answer] + lengths.answer.astype(float), window)
    return float(of_prompts.sum() + (whole - of_prompts[lengths.of_answer]).sum())


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Operations per second that the device can do, by its data sheet; None if it is not in cards.py, such as a CPU.

    Not measured, because other programs running at that time would lower the result, and MFU could exceed 100%.
    """
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    card = next((card for card_name, card in CARDS.items() if card_name in name), None)
    if card is None:
        return None
    if dtype in (torch.bfloat16, torch.float16):
        return card.flops
    # With TF32, a card is faster than its data sheet's figure for float32.
    full = dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    return card.flops_float32 if full else None
