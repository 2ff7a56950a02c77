"""Greedy answers to a few prompts, to show what training changed."""

from collections.abc import Sequence
from typing import Any

import torch

from isopref.types import IntArray


@torch.no_grad()
def answers(model: Any, tokenizer: Any, prompts: Sequence[IntArray], *, max_new_tokens: int) -> list[str]:
    """One greedy answer for each tokenised prompt, as one left-padded batch."""
    if not prompts:
        return []
    device = next(model.parameters()).device
    width = max(len(prompt) for prompt in prompts)
    ids = torch.full((len(prompts), width), tokenizer.eos_token_id)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.from_numpy(prompt.astype("int64"))
        mask[row, width - len(prompt) :] = 1
    was_training = model.training
    model.eval()
    out = model.generate(
        input_ids=ids.to(device),
        attention_mask=mask.to(device),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        pad_token_id=tokenizer.eos_token_id,
    )
    model.train(was_training)
    return [tokenizer.decode(row[width:], skip_special_tokens=True).strip() for row in out]
