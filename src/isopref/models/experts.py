"""Mixtures of experts: which experts the tokens of a pass were sent to, for the loss that balances them.

Dimensions: L layers with experts, E experts, T tokens of a pass (B*T of a padded one).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from isopref.errors import ModelError
from isopref.models.parts import decoder_of

PROBE_TOKENS = 64  # enough for a correction bias that matters to change the choice of an expert


@torch.no_grad()
def check_routers(model: PreTrainedModel) -> None:
    """Raise ModelError unless routers send tokens to the experts with the highest logits, the ones `routing` counts."""
    config = model.config.get_text_config()
    shown: Sequence[Tensor] = ()
    sent: list[Tensor] = []
    if hasattr(config, "router_aux_loss_coef") and hasattr(config, "num_experts_per_tok"):
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(int(config.vocab_size), (1, PROBE_TOKENS), generator=generator).to(model.device)
        with _sent_to_experts(model, config.num_experts_per_tok) as sent:
            output = decoder_of(model)(input_ids=ids, use_cache=False, output_router_logits=True)
        shown = getattr(output, "router_logits", None) or ()
    if not shown or any(logits.ndim != 2 or len(logits) != PROBE_TOKENS for logits in shown):
        raise ModelError(
            f"objective.balance_weight: {type(model).__name__} shows no router logits, so there are no experts to "
            "balance. Remove balance_weight, or use a mixture of experts such as qwen3_moe, olmoe or mixtral."
        )
    if len(sent) != len(shown):
        raise ModelError(
            f"objective.balance_weight: {type(model).__name__} does not show which experts it sends a token to; they "
            "may not be the ones with the highest router logits. Remove balance_weight."
        )
    if not all(map(_are_highest, sent, shown)):
        raise ModelError(
            f"objective.balance_weight: {type(model).__name__} sends tokens to experts other than the "
            f"{config.num_experts_per_tok} with the highest router logits (usually because of a correction bias), so "
            "the wrong experts would be balanced. Remove balance_weight."
        )


@contextmanager
def _sent_to_experts(model: PreTrainedModel, experts_per_token: int) -> Iterator[list[Tensor]]:
    """The indices of each token's experts that layers pass to their experts while the context is open."""
    sent: list[Tensor] = []

    def look(_module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        tensors = [value for value in (*args, *named.values()) if isinstance(value, Tensor)]
        shape = (PROBE_TOKENS, experts_per_token)
        sent.extend(value for value in tensors if value.shape == shape and not value.is_floating_point())

    hooks = [module.register_forward_pre_hook(look, with_kwargs=True) for module in model.modules()]
    try:
        yield sent
    finally:
        for hook in hooks:
            hook.remove()


def _are_highest(experts_TK: Tensor, logits_TE: Tensor) -> bool:
    """Whether each token was sent to the experts with the highest logits; ties may go either way."""
    sent = logits_TE.gather(1, experts_TK).sort(dim=1, descending=True).values
    return torch.equal(sent, logits_TE.topk(experts_TK.shape[1], dim=1).values)


def routing(router_logits: Sequence[Tensor], experts_per_token: int, times_T: Tensor) -> Tensor:
    """How often each expert was chosen, and the sum of its probabilities: 2, L, E; token t counts `times[t]`."""
    logits_LTE = torch.stack(list(router_logits))
    p_LTE = logits_LTE.softmax(dim=-1, dtype=torch.promote_types(logits_LTE.dtype, torch.float32))
    chosen = torch.zeros_like(p_LTE).scatter_(-1, p_LTE.topk(experts_per_token, dim=-1).indices, 1.0)
    return torch.stack([chosen, p_LTE]).mul(times_T[:, None]).sum(dim=2)
