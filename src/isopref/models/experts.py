"""Mixtures of experts: which experts the tokens of a pass were sent to, for the loss that balances them.

Dimensions: L layers with experts, E experts, T tokens of a pass (B*T of a padded one).
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from isopref.errors import ModelError


@torch.no_grad()
def check_routers(model: PreTrainedModel) -> None:
    """Raise ModelError for a model whose experts cannot be balanced: it must show what its routers decide."""
    config = model.config.get_text_config()
    shown: Sequence[Tensor] = ()
    if hasattr(config, "router_aux_loss_coef") and hasattr(config, "num_experts_per_tok"):
        ids = torch.zeros(1, 3, dtype=torch.long, device=model.device)
        output = model.base_model(input_ids=ids, use_cache=False, output_router_logits=True)
        shown = getattr(output, "router_logits", None) or ()
    if not shown or any(logits.ndim != 2 or len(logits) != 3 for logits in shown):
        raise ModelError(
            f"objective.balance_weight: {type(model).__name__} shows no router logits, so there are no experts to "
            "balance. Remove balance_weight, or use a mixture of experts such as qwen3_moe, olmoe or mixtral."
        )


def routing(router_logits: Sequence[Tensor], experts_per_token: int, times_T: Tensor) -> Tensor:
    """How often each expert was chosen, and the sum of its probabilities: 2, L, E; token t counts `times[t]`."""
    logits_LTE = torch.stack(list(router_logits))
    p_LTE = logits_LTE.softmax(dim=-1, dtype=torch.promote_types(logits_LTE.dtype, torch.float32))
    chosen = torch.zeros_like(p_LTE).scatter_(-1, p_LTE.topk(experts_per_token, dim=-1).indices, 1.0)
    return torch.stack([chosen, p_LTE]).mul(times_T[:, None]).sum(dim=2)
