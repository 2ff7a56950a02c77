"""A numerical proof, on a tiny input, that a layout scores a model the way the model itself does.

A model may ignore our attention (its rejected answers would then see the chosen ones), place its positions by other
rules, or change its logits after the head. No list of names can know; so two small pairs are scored both ways.
"""

import torch
from torch import Tensor

from isopref.data.packing import RowKind
from isopref.data.rows import build_microbatch
from isopref.errors import ModelError
from isopref.models.policy import Policy
from isopref.types import PairTokens

# Nats per completion token that two right computations may differ by; a leak moves logps by whole percents.
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}


@torch.no_grad()
def check_layout(policy: Policy, kind: RowKind) -> None:
    """Raise ModelError if `kind` rows do not give the model's own log-probabilities."""
    device = next(policy.parameters()).device
    vocabulary = int(policy.model.config.get_text_config().vocab_size)
    pairs = _pairs(vocabulary, seed=1)
    expected = torch.stack([torch.stack([_own_logp(policy, p.prompt, side) for side in p[1:]]) for p in pairs]).T
    try:
        found = policy(build_microbatch(pairs, kind).to(device))
        # The same row with other chosen answers: what the rejected ones get may not move.
        others = [a._replace(chosen=b.chosen) for a, b in zip(pairs, _pairs(vocabulary, seed=2), strict=True)]
        moved = (policy(build_microbatch(others, kind).to(device)) - found)[1].abs().max()
    except (ModelError, TypeError) as error:
        raise ModelError(_refusal(policy, kind, str(error))) from error
    num_tokens = max(len(side) for p in pairs for side in p[1:])
    tolerance = TOLERANCE[next(policy.parameters()).dtype] * num_tokens
    error_nats = (found - expected).abs().max()
    if not (error_nats <= tolerance and moved <= tolerance / 100):
        raise ModelError(
            _refusal(
                policy,
                kind,
                f"log-probabilities are off by {float(error_nats):.2g} nats, and a rejected answer moves by "
                f"{float(moved):.2g} when only the chosen one changes",
            )
        )


def _refusal(policy: Policy, kind: RowKind, reason: str) -> str:
    name = type(policy.model).__name__
    if kind in ("shared", "packed"):
        return (
            f"{name} cannot be trained with layout.rows: {kind}: its attention does not follow the row's segments "
            f"({reason}). Set layout.rows: padded."
        )
    return f"{name} cannot be trained here: its decoder and head do not give its own logits ({reason})."


def _pairs(vocabulary: int, *, seed: int) -> list[PairTokens]:
    generator = torch.Generator().manual_seed(seed)

    def tokens(count: int) -> Tensor:
        return torch.randint(vocabulary, (count,), generator=generator)

    return [PairTokens(*(tokens(n).numpy() for n in lengths)) for lengths in ((5, 4, 3), (2, 3, 6))]


def _own_logp(policy: Policy, prompt: object, completion: object) -> Tensor:
    device = next(policy.parameters()).device
    prompt_T, completion_C = (
        torch.as_tensor(prompt, device=device),
        torch.as_tensor(completion, device=device),
    )
    with policy.plain() as model:
        logits_TV = model(input_ids=torch.cat([prompt_T, completion_C])[None]).logits[0]
    logp_CV = logits_TV[len(prompt_T) - 1 : -1].float().log_softmax(dim=-1)
    logp: Tensor = logp_CV.gather(1, completion_C[:, None]).sum()
    return logp
