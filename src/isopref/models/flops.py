"""How many floating-point operations a batch of pairs needs, and how many a device can do.

Useful ones only: every real token once (a prompt serves both answers), logits where an answer's token is predicted, the
backward pass as twice the forward. Padding, repeated prompts and recomputed activations are not useful.
"""

import time

import torch
from torch import nn

from isopref.cards import CARDS
from isopref.errors import ModelError
from isopref.models.policy import Policy
from isopref.types import CHOSEN, PROMPT, REJECTED, IntArray


class UsefulFlops:
    """Counts the useful operations of pairs, forward and backward, for one model."""

    def __init__(self, policy: Policy):
        head = policy.model.get_output_embeddings()
        if head is None:
            raise ModelError(f"{type(policy.model).__name__} has no output head, so it is no language model.")
        config = policy.model.config.get_text_config()
        experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
        used = getattr(config, "num_experts_per_tok", None)
        share = used / experts if experts and used else 1.0
        tables = {id(m.weight) for m in policy.model.modules() if isinstance(m, nn.Embedding)}
        self.per_token = sum(
            2 * p.numel() * (share if "experts" in name else 1.0)
            for name, p in policy.model.base_model.named_parameters()
            if p.ndim >= 2 and id(p) not in tables
        )
        self.per_logits = 2 * head.weight.numel()
        heads = getattr(config, "num_attention_heads", 0)  # a model may have none, and then no attention
        width = getattr(config, "head_dim", None) or config.hidden_size // max(1, heads)
        # Scores and their sum over values, for every query and key.
        self.per_query_key = 4 * width * heads * config.num_hidden_layers

    def __call__(self, lengths_P3: IntArray) -> float:
        prompt, chosen, rejected = (lengths_P3[:, side].astype(float) for side in (PROMPT, CHOSEN, REJECTED))
        first = prompt + chosen
        seen = first * (first + 1) / 2 + rejected * prompt + rejected * (rejected + 1) / 2
        forward = (
            self.per_token * lengths_P3.sum()
            + self.per_logits * lengths_P3[:, CHOSEN:].sum()
            + self.per_query_key * seen.sum()
        )
        return float(3 * forward)


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second that the device can do: from the table for bfloat16 on a known card, else measured now."""
    if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16):
        name = torch.cuda.get_device_name(device)
        known = [card.flops for card_name, card in CARDS.items() if card_name in name]
        if known:
            return known[0]
    size = 8192 if device.type == "cuda" else 1024
    a, b = (nn.init.normal_(torch.empty(size, size, device=device, dtype=dtype)) for _ in range(2))
    times = []
    for _ in range(5):
        started = time.perf_counter()
        float((a @ b)[0, 0])  # waits for the product
        times.append(time.perf_counter() - started)
    return 2 * size**3 / min(times)
