"""Why a model's decoder and head do not give the model's own log-probabilities, once the probe has found that.

For error messages only. The probe (probe.py) decides what may be trained.
"""

from typing import Any

import torch
from torch import Tensor, nn

from isopref.models.policy import Policy

SAME = 1e-3  # maximum difference between two computations of the same values, relative to the largest


@torch.no_grad()
def why_not_its_own(policy: Policy, input_ids_BT: Tensor) -> str | None:
    """What the model does besides applying its decoder and its head; None if nothing is found."""
    was_training = policy.training
    policy.eval()  # in training mode, the model's own forward pass would apply dropout
    try:
        return _difference(policy, input_ids_BT)
    finally:
        policy.train(was_training)


def _difference(policy: Policy, input_ids_BT: Tensor) -> str | None:
    if not _is_causal(policy, input_ids_BT):
        return "it is not causal: a token's prediction depends on later tokens"
    head = policy.model.get_output_embeddings()
    if head is None:
        return "transformers does not know its output layer (get_output_embeddings)"
    handed = _handed(policy, head, input_ids_BT)
    if handed is None:
        return "it does not predict tokens with its output layer (get_output_embeddings)"
    with policy.plain():
        hidden = policy.decoder(input_ids=input_ids_BT, use_cache=False).last_hidden_state
    if handed.shape != hidden.shape or not _same(handed, hidden):
        return "it changes hidden states between its decoder and its output layer"
    return None


def _is_causal(policy: Policy, input_ids_BT: Tensor) -> bool:
    other = input_ids_BT.clone()
    other[:, -1] = (other[:, -1] + 1) % 7
    return _same(*(policy.own_logits(ids)[:, :-1] for ids in (input_ids_BT, other)))


def _handed(policy: Policy, head: nn.Module, input_ids_BT: Tensor) -> Tensor | None:
    """What the model's own forward pass passes to its output layer."""
    seen: list[Tensor] = []

    def look(_module: nn.Module, args: tuple[Any, ...]) -> None:
        seen.extend(value for value in args if isinstance(value, Tensor))

    hook = head.register_forward_pre_hook(look)
    try:
        policy.own_logits(input_ids_BT)
    finally:
        hook.remove()
    return seen[0] if seen else None


def _same(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() <= SAME * a.abs().max())
