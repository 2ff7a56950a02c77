"""A causal LM as a policy: the module that is sharded or wrapped, whose forward takes a microbatch.

FSDP gathers the parameters outside the decoder layers (embedding, final norm, head) only around the forward of the
module it wraps, so that forward must be ours and include the head.

Dimensions: P pairs, B sequences, T tokens, C completion tokens, D hidden width.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from isopref.models.attention import NAME, register
from isopref.models.hf import disable_dropout
from isopref.ops.logprob import token_logprobs
from isopref.ops.take import take
from isopref.types import Microbatch, Pass


class Policy(nn.Module):
    """A Hugging Face causal LM that scores microbatches, packed or padded. All its dropout is switched off."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        register()
        disable_dropout(model)
        self.model = model
        self.own_attention: str = model.config._attn_implementation
        assert self.own_attention != NAME, "the model is in a policy already"
        config = model.config.get_text_config()
        self.softcap: float | None = getattr(config, "final_logit_softcapping", None)
        # Cohere multiplies its logits, Granite divides them.
        self.logit_scale = float(getattr(config, "logit_scale", None) or 1.0) / float(
            getattr(config, "logits_scaling", None) or 1.0
        )

    def forward(self, microbatch: Microbatch) -> Tensor:
        """Summed log-probabilities of the completions: 2, P (chosen, rejected), float32 or wider."""
        shape = (2, microbatch.num_pairs)
        return torch.stack([self._completions(one, 2 * shape[1]).view(shape) for one in microbatch.passes]).sum(dim=0)

    def _completions(self, one: Pass, num_completions: int) -> Tensor:
        hidden = self._hidden_BTD(one).flatten(0, 1)
        head = self.model.get_output_embeddings()
        logp_C = token_logprobs(
            take(hidden, one.predict_index, one.predict_copies),
            head.weight,
            one.target,
            getattr(head, "bias", None),
            scale=self.logit_scale,
            softcap=self.softcap,
        )
        return logp_C.new_zeros(num_completions).index_add(0, one.completion, logp_C)

    def _hidden_BTD(self, one: Pass) -> Tensor:  # noqa: N802
        packed = one.segments is not None
        self._use_attention(NAME if packed else self.own_attention)
        where = {"position_ids": one.position_ids, "segments": one.segments} if packed else {}
        hidden: Tensor = self.model.base_model(input_ids=one.input_ids, use_cache=False, **where).last_hidden_state
        return hidden

    def _use_attention(self, name: str) -> None:
        if self.model.config._attn_implementation != name:
            self.model.set_attn_implementation(name)

    @contextmanager
    def plain(self) -> Iterator[PreTrainedModel]:
        """The model with its own attention, for generation and for whatever is not a microbatch."""
        before = self.model.config._attn_implementation
        self._use_attention(self.own_attention)
        try:
            yield self.model
        finally:
            self._use_attention(before)
