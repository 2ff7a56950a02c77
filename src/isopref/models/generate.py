"""Answers to a few prompts, to show what training changed. Uses its own random generators only."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from isopref.data.content import prompt_id
from isopref.models.hf import context_length
from isopref.types import IntArray

BATCH = 32  # prompts answered at once
ANSWER_TOKENS = 64  # where an answer is cut: enough to show what training changed, in seconds on a CPU


class Answer(NamedTuple):
    """A model's answers to one prompt."""

    greedy: str
    sampled: str


class _Gumbel(LogitsProcessor):  # type: ignore[misc,unused-ignore]
    """Makes the greedy choice in the last rows, one per generator, a draw from softmax(logits).

    The argmax of logit + Gumbel noise is such a draw. Each row has its own noise, so an answer does not depend on the
    others in the batch.
    """

    def __init__(self, generators: Sequence[torch.Generator]):
        self.generators = generators

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        exponential = torch.empty(len(self.generators), scores.shape[1])
        for row, generator in zip(exponential, self.generators, strict=True):
            row.exponential_(generator=generator)
        drawn = scores[-len(self.generators) :].float() - exponential.log().to(scores.device)
        return torch.cat([scores[: -len(self.generators)].float(), drawn])


@torch.no_grad()
def answers(
    model: Any, tokenizer: Any, prompts: Sequence[IntArray], *, max_new_tokens: int = ANSWER_TOKENS, seed: int = 0
) -> list[Answer]:
    """A greedy answer for each tokenised prompt and one drawn at temperature 1, all as one left-padded batch.

    The noise of a draw comes from the seed and the prompt's content. No answer is longer than the model's context
    length allows after the longest prompt.
    """
    if not prompts:
        return []
    noise = LogitsProcessorList([_Gumbel([_generator(prompt, seed) for prompt in prompts])])
    texts = _generate(model, tokenizer, [*prompts, *prompts], max_new_tokens, noise)
    return [Answer(*both) for both in zip(texts[: len(prompts)], texts[len(prompts) :], strict=True)]


@torch.no_grad()
def greedy_answers(
    model: Any, tokenizer: Any, prompts: Sequence[IntArray], *, max_new_tokens: int = ANSWER_TOKENS
) -> list[str]:
    """A greedy answer for each tokenised prompt, in batches."""
    batches = [prompts[start : start + BATCH] for start in range(0, len(prompts), BATCH)]
    return [text for batch in batches for text in _generate(model, tokenizer, batch, max_new_tokens)]


def _generate(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[IntArray],
    max_new_tokens: int,
    processors: LogitsProcessorList | None = None,
) -> list[str]:
    """What the model writes after each prompt, all as one left-padded batch."""
    device = next(model.parameters()).device
    width = max(len(prompt) for prompt in prompts)
    ids = torch.full((len(prompts), width), tokenizer.eos_token_id)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.from_numpy(prompt.astype("int64"))
        mask[row, width - len(prompt) :] = 1
    room = (context_length(model.config) or width + max_new_tokens) - width
    was_training = model.training
    model.eval()
    out = model.generate(
        input_ids=ids.to(device),
        attention_mask=mask.to(device),
        max_new_tokens=max(1, min(max_new_tokens, room)),
        do_sample=False,
        pad_token_id=tokenizer.eos_token_id,
        logits_processor=processors,
    )
    model.train(was_training)
    return [tokenizer.decode(row[width:], skip_special_tokens=True).strip() for row in out]


def _generator(prompt: IntArray, seed: int) -> torch.Generator:
    content = int.from_bytes(prompt_id(prompt), "little")
    return torch.Generator().manual_seed((content + seed) % 2**63)
