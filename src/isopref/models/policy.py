"""A causal LM as a policy: the module that is sharded or wrapped, and whose forward takes a microbatch.

FSDP gathers the parameters outside the decoder layers (embedding, final norm, head) only around the forward of the
module it wraps, so that forward must be ours and include the head.

Dimensions: A answers, M comparisons, B sequences, T tokens, C trained tokens of answers, D hidden width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from isopref.batch.deal import deal
from isopref.models.attention import NAME, RECORDED, register
from isopref.models.experts import routing
from isopref.models.follow import unfollow
from isopref.models.noise import disable_dropout, noisy_modules, own_rates
from isopref.models.parts import decoder_of, logit_changes
from isopref.models.row import Row, computing
from isopref.models.unfold import adapt_layers, unfold
from isopref.models.unused import indexers, unused_parts
from isopref.ops.exchange import summed
from isopref.ops.logprob import token_logprobs, token_logprobs_and_collisions
from isopref.ops.take import take
from isopref.types import LOGPS_ALONE, ContextGroup, Microbatch, Needs, Pass, Readout

if TYPE_CHECKING:
    from isopref.models.native import NativeModel  # OLMo-core takes seconds to import


class Policy(nn.Module):
    """A causal LM that scores microbatches, packed or padded. All dropout is disabled.

    Parts without a gradient are frozen (unused.py); `unused` names those that text does not use.
    The model is a Hugging Face model, or an OLMo-core model (native.py) with its Hugging Face twin.
    With `narrow`, weights have 16 bits until `widen` makes them float32.
    """

    scores: ClassVar[str] = "log-probabilities"  # what it assigns to answers, in words

    def __init__(self, model: PreTrainedModel | NativeModel, *, narrow: bool = False):
        super().__init__()
        self.narrow = narrow
        register()
        disable_dropout(model)
        # torch gives the embedding at padding_idx no gradient, but many models also end every turn with this token.
        embedding: Any = model.get_input_embeddings()
        embedding.padding_idx = None
        self._noisy = noisy_modules(model)
        self.unused = unused_parts(model)
        for name in (*self.unused, *indexers(model)):
            attrgetter(name)(model).requires_grad_(False)
        self.together: DeviceMesh | None = None  # the ranks that compute the same pairs, if any
        self.context: ContextGroup | None = None  # the same ranks, if they split rows
        self.model: PreTrainedModel = model  # type: ignore[assignment]  # a native model has the methods used here
        self.own_attention: str = model.config._attn_implementation
        self.packed_attention = NAME
        assert self.own_attention not in (NAME, RECORDED), "the model is in a policy already"
        decoder_of(model)  # raises if there is none
        self.following, self.unfolded = adapt_layers(model)  # names of layers with a state, and others (unfold.py)
        config = model.config.get_text_config()
        self.experts_per_token: int = getattr(config, "num_experts_per_tok", None) or 0
        self.logits = logit_changes(config)

    def move_to(self, device: torch.device) -> None:
        """Move the policy to a device. Narrow weights become float32 there, one by one."""
        if self.narrow:
            self._apply(lambda one: one.to(device).float() if one.is_floating_point() else one.to(device))  # type: ignore[no-untyped-call]
            self.narrow = False
        else:
            self.to(device)

    def widen(self) -> None:
        """Make narrow weights float32, or this rank's shards of them."""
        if self.narrow:
            self.float()
            self.narrow = False

    def unfold_all(self) -> None:
        """Also unfold the layers that follow a row's tree: from now on they compute a prompt once per answer."""
        layers = [attrgetter(name)(self.model) for name in self.following]
        unfollow(layers)
        unfold(layers)
        self.following, self.unfolded = (), (*self.following, *self.unfolded)

    @property
    def name(self) -> str:
        """The model's type in transformers' terms."""
        return type(self.model if self.native is None else self.native.twin).__name__

    @property
    def decoder(self) -> Any:
        """The part of the model before its head."""
        return decoder_of(self.model)

    @property
    def native(self) -> NativeModel | None:
        """The model if it is one of OLMo-core's, else None."""
        model: Any = self.model
        return None if isinstance(model, PreTrainedModel) else model

    def train(self, mode: bool = True) -> Self:
        """Training mode, in which the model computes the same as in eval mode."""
        super().train(mode)
        for module in self._noisy:
            module.training = False
        return self

    def forward(self, microbatch: Microbatch, needs: Needs = LOGPS_ALONE) -> Readout:
        """Log-probabilities of the microbatch's answers, and whatever else was requested."""
        num_answers = microbatch.num_answers
        logp_A = confidence_A = head_2M = routes = None
        for one in self._passes(microbatch):
            hidden_BTD, router_logits = self._hidden(one, needs.routing)
            logp_C, confidence_C = self._tokens(full(hidden_BTD).flatten(0, 1), one, needs.confidence)
            if one.weight is not None:
                logp_C = logp_C * one.weight.to(logp_C.dtype)
            logp_A = _plus(logp_A, _by_answer(logp_C, one.answer, num_answers))
            if confidence_C is not None:
                confidence_A = _plus(confidence_A, _by_answer(confidence_C, one.answer, num_answers))
            if needs.heads:
                head_2M = _plus(head_2M, _head_logps(logp_C, one, microbatch))
            if needs.routing:
                routes = _plus(routes, routing(router_logits, self.experts_per_token, one.times))
        assert logp_A is not None
        if confidence_A is not None:
            confidence_A = (confidence_A / microbatch.num_tokens).detach()
        return self._of_group(Readout(logp_A, head_2M, confidence_A, routes))

    def _passes(self, microbatch: Microbatch) -> Iterator[Pass]:
        """This rank's share of the passes of a microbatch: all of it, unless ranks split rows."""
        return (one if self.context is None else deal(one, self.context) for one in microbatch.passes)

    def _of_group(self, found: Readout) -> Readout:
        """The sum of the readouts of ranks that split rows, each of which has summed over its own tokens."""
        if self.context is None:
            return found
        present = [one for one in found if one is not None]
        total = summed(torch.cat([one.flatten() for one in present]), self.context)
        parts = iter(total.split([one.numel() for one in present]))

        def of_group(one: Tensor | None) -> Tensor | None:
            return None if one is None else next(parts).view_as(one).to(one.dtype, copy=True)  # FSDP warns of views

        logp_A, head_2M, confidence_A, routes = map(of_group, found)
        assert logp_A is not None
        return Readout(logp_A, head_2M, None if confidence_A is None else confidence_A.detach(), routes)

    def _tokens(self, hidden: Tensor, one: Pass, confidence: bool) -> tuple[Tensor, Tensor | None]:
        """The log-probability of each trained token and, if requested, its `confidence` (see `Readout`): C, C."""
        head = self.model.get_output_embeddings()
        weight, bias = full(head.weight), getattr(head, "bias", None)
        scale, softcap, vocabulary = self.logits
        if vocabulary is not None:
            weight, bias = weight[:vocabulary], None if bias is None else bias[:vocabulary]
        # In models that add up their residuals in float32 (Mamba), the head converts the sum to its own dtype.
        predicting = take(hidden, one.predict_index, one.predict_copies).to(weight.dtype)
        predictions = (predicting, weight, one.target, bias)
        if not confidence:
            return token_logprobs(*predictions, scale=scale, softcap=softcap), None
        logp_C, collision_C = token_logprobs_and_collisions(*predictions, scale=scale, softcap=softcap)
        return logp_C, logp_C.detach() - collision_C

    def _hidden(self, one: Pass, routed: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The last hidden states (B, T, D) and, if requested, the router logits of the experts."""
        packed = one.segments is not None
        if self.native is None:
            self._use_attention(self.packed_attention if packed else self.own_attention)
        more: dict[str, Any] = {"position_ids": one.position_ids, "segments": one.segments} if packed else {}
        if routed:
            more["output_router_logits"] = True
        with computing(None if one.segments is None else Row(one.segments)):
            output = self.decoder(input_ids=one.input_ids, use_cache=False, **more)
        return output.last_hidden_state, output.router_logits if routed else ()

    def own_logits(self, input_ids_BT: Tensor) -> Tensor:
        """The model's own logits, with its own attention and head: B, T, V."""
        with self.plain() as model, own_rates(model):
            logits: Tensor = model(input_ids=input_ids_BT, use_cache=False).logits
        return logits

    def own_score(self, prompt_T: Tensor, answer_C: Tensor) -> Tensor:
        """The log-probability of an answer by the model's own forward pass."""
        logits_TV = self.own_logits(torch.cat([prompt_T, answer_C])[None])[0]
        logp_CV = logits_TV[len(prompt_T) - 1 : -1].float().log_softmax(dim=-1)
        logp: Tensor = logp_CV.gather(1, answer_C[:, None]).sum()
        return logp

    def _use_attention(self, name: str) -> None:
        if self.model.config._attn_implementation != name:
            self.model.set_attn_implementation(name)

    @contextmanager
    def plain(self) -> Iterator[PreTrainedModel]:
        """The Hugging Face model with its own attention, for generation and anything that is not a microbatch."""
        if self.native is not None:
            with self.native.as_hf() as model:
                yield model
            return
        before = self.model.config._attn_implementation
        self._use_attention(self.own_attention)
        try:
            yield self.model
        finally:
            self._use_attention(before)

    @contextmanager
    def saved_form(self, state: dict[str, Tensor]) -> Iterator[tuple[PreTrainedModel, dict[str, Tensor]]]:
        """The model and state to export; `state` holds this module's weights, gathered from all ranks."""
        named = {name.removeprefix("model."): tensor for name, tensor in state.items()}
        if self.native is None:
            with self.plain() as model:  # the exported config must not name our attention
                yield model, _tied_again(model, named)
        else:
            with self.native.as_hf(named) as model:
                yield model, model.state_dict()


def _tied_again(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state with one tensor for all names of a tied weight; a state gathered from shards has a copy per name."""
    first: dict[int, str] = {}
    tied = dict(state)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in state:
            tied[name] = state[first.setdefault(id(parameter), name)]
    return tied


def _by_answer(values_C: Tensor, answer_C: Tensor, num_answers: int) -> Tensor:
    """The sum over the tokens of each answer: A.

    Added up in float64: in float32, the sum over 100,000 tokens is off by nats, by how many depends on the order, and
    a GPU adds in any order.
    """
    wide_C = values_C.double()
    return wide_C.new_zeros(num_answers).index_add(0, answer_C, wide_C).to(values_C.dtype)


def _head_logps(logp_C: Tensor, one: Pass, microbatch: Microbatch) -> Tensor:
    """Log-probabilities of better and worse, each summed over as many trained tokens as the shorter has: 2, M."""
    length_2M = microbatch.num_tokens[microbatch.compared].view(2, -1)
    shorter_M = length_2M.amin(dim=0)
    of_side = one.answer[None] == microbatch.compared[:, None]  # 2 M, C
    in_head = of_side & (one.place[None] < shorter_M.repeat(2)[:, None])
    return torch.where(in_head, logp_C[None], 0).sum(dim=1).view(2, -1)


def _plus(total: Tensor | None, more: Tensor) -> Tensor:
    return more if total is None else total + more


def full(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor; return any other unchanged."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
