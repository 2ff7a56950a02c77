"""The slow, obvious oracle: one sequence at a time, straight from the equations, with the model's own forward.

No packing, no microbatches, no shared prompts, no code of ours below the level of the definitions. Everything fast is
compared with this.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from isopref.examples import Example, PairTokens
from isopref.types import IntArray, PairLogps


def predictions(model: Any, prompt: IntArray, completion: IntArray) -> Tensor:
    """log softmax(logits) at the token before each token of the completion: C, V."""
    ids = torch.tensor([[*map(int, prompt), *map(int, completion)]])
    logits_TV = model(input_ids=ids).logits[0]
    logp_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32)).log_softmax(dim=-1)
    logp_CV: Tensor = logp_TV[len(prompt) - 1 : -1]
    return logp_CV


def token_logps(model: Any, prompt: IntArray, completion: IntArray) -> list[Tensor]:
    """log p of each token of the completion."""
    logp_CV = predictions(model, prompt, completion)
    return [logp_CV[i, int(token)] for i, token in enumerate(completion)]


def sequence_logp(model: Any, prompt: IntArray, completion: IntArray) -> Tensor:
    """log p(completion | prompt): the sum over its tokens."""
    return torch.stack(token_logps(model, prompt, completion)).sum()


def pair_logps(model: Any, pairs: Sequence[PairTokens], ld_alpha: float = 1.0) -> PairLogps:
    """Log-probabilities of both completions of every pair.

    With `ld_alpha`, as LD-DPO has them (Liu et al. 2024): tokens up to the length of the shorter completion, and that
    much of the others.
    """

    def logp(pair: PairTokens, completion: IntArray) -> Tensor:
        common = min(len(pair.chosen), len(pair.rejected))
        tokens = token_logps(model, pair.prompt, completion)
        return torch.stack([one if i < common else ld_alpha * one for i, one in enumerate(tokens)]).sum()

    return PairLogps(
        chosen=torch.stack([logp(pair, pair.chosen) for pair in pairs]),
        rejected=torch.stack([logp(pair, pair.rejected) for pair in pairs]),
        num_chosen=torch.tensor([len(pair.chosen) for pair in pairs]),
        num_rejected=torch.tensor([len(pair.rejected) for pair in pairs]),
    )


def sequence_reward(model: Any, prompt: IntArray, answer: IntArray) -> Tensor:
    """What a model for sequence classification gives a prompt with one answer."""
    reward: Tensor = model(input_ids=torch.tensor([[*map(int, prompt), *map(int, answer)]])).logits[0, 0]
    return reward.to(torch.promote_types(reward.dtype, torch.float32))


def pair_rewards(model: Any, pairs: Sequence[PairTokens]) -> PairLogps:
    """The rewards of both answers of every pair, where others have log-probabilities."""
    return PairLogps(
        chosen=torch.stack([sequence_reward(model, pair.prompt, pair.chosen) for pair in pairs]),
        rejected=torch.stack([sequence_reward(model, pair.prompt, pair.rejected) for pair in pairs]),
        num_chosen=torch.tensor([len(pair.chosen) for pair in pairs]),
        num_rejected=torch.tensor([len(pair.rejected) for pair in pairs]),
    )


def comparisons(examples: Sequence[Example]) -> list[PairTokens]:
    """Every comparison as a pair of its own."""
    return [
        PairTokens(example.prompt, example.answers[better], example.answers[worse])
        for example in examples
        for better, worse in example.comparisons
    ]


@torch.no_grad()
def wpo_weights(model: Any, pairs: Sequence[PairTokens]) -> list[float]:
    """w(x, c) w(x, r) of WPO (Zhou et al. 2024): w is the geometric mean over tokens of p(token) / sum of all p^2."""

    def weight(prompt: IntArray, completion: IntArray) -> float:
        p_CV = predictions(model, prompt, completion).double().exp()
        aligned = [float(p_CV[i, int(token)] / (p_CV[i] ** 2).sum()) for i, token in enumerate(completion)]
        return float(np.prod(aligned) ** (1 / len(aligned)))

    return [weight(pair.prompt, pair.chosen) * weight(pair.prompt, pair.rejected) for pair in pairs]


def balance(model: Any, examples: Sequence[Example]) -> Tensor:
    """Switch Transformer's auxiliary loss (Fedus et al. 2021, eqs. 4 to 6), each token of each sequence.

    E sum_e f_e P_e, on the mean over layers. A token that goes to several experts counts in the f of each.
    """
    layers: dict[int, list[Tensor]] = {}
    for example in examples:
        for answer in example.answers:
            ids = torch.tensor([[*map(int, example.prompt), *map(int, answer)]])
            for layer, logits in enumerate(model.base_model(input_ids=ids, output_router_logits=True).router_logits):
                layers.setdefault(layer, []).extend(logits.double().softmax(dim=-1))
    losses = []
    for probabilities in layers.values():
        num_tokens, num_experts = len(probabilities), len(probabilities[0])
        sent = [0] * num_experts
        for p in probabilities:
            for expert in p.detach().argsort(descending=True)[: model.config.num_experts_per_tok]:
                sent[int(expert)] += 1
        mean = torch.stack(probabilities).sum(dim=0) / num_tokens
        losses.append(num_experts * sum((sent[e] / num_tokens * mean[e] for e in range(num_experts)), torch.zeros(())))
    return torch.stack(losses).mean()


def weights(
    pairs: Sequence[PairTokens],
    weighting: str,
    own: Sequence[float] | None = None,
    gaps: Sequence[float] | None = None,
) -> list[float]:
    """w_p by its definition."""
    each = []
    for n, pair in enumerate(pairs):
        completion = len(pair.chosen) + len(pair.rejected)
        gap = 1.0 if gaps is None else gaps[n]
        sizes = {"token": completion + 2 * len(pair.prompt), "completion": completion, "example": 1, "gap": gap}
        size = sizes[weighting]
        each.append(size * (1.0 if own is None else own[n]))
    return each


def list_weights(examples: Sequence[Example], weighting: str, own: Sequence[float]) -> list[float]:
    """w of each list by its definition."""
    each = []
    for example, weight in zip(examples, own, strict=True):
        completion = sum(len(answer) for answer in example.answers)
        prompts = len(example.answers) * len(example.prompt)
        each.append({"token": completion + prompts, "completion": completion, "example": 1}[weighting] * weight)
    return each


def global_loss(loss_P: Tensor, weight_P: Sequence[float]) -> Tensor:
    """L = sum w_p l_p / sum w_p."""
    weight = torch.tensor(weight_P, dtype=torch.float64)
    return (loss_P.double() * weight).sum() / weight.sum()


def token_nll(policy: PairLogps, own: Sequence[float] | None = None) -> Tensor:
    """-sum v_p log pi(c_p) / sum v_p n_p: the negative log-likelihood of a chosen token, each pair's v_p times."""
    v = torch.ones(len(policy.chosen)).double() if own is None else torch.tensor(own, dtype=torch.float64)
    return -(v * policy.chosen.double()).sum() / (v * policy.num_chosen).sum()


def gradient(model: nn.Module, loss: Tensor, *, again: bool = False) -> dict[str, Tensor]:
    """dL/dparameter by name; zero where a parameter takes no part. `again`: log-probabilities are used once more."""
    names, params = zip(*((n, p) for n, p in model.named_parameters() if p.requires_grad), strict=True)
    grads = torch.autograd.grad(loss, params, allow_unused=True, retain_graph=again)
    return {n: torch.zeros_like(p) if g is None else g for n, p, g in zip(names, params, grads, strict=True)}


def relative_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """||found - expected|| / ||expected|| over all parameters together, in float64. Never NaN-safe: NaN is an error."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    difference = sum(float((found[n].double() - expected[n].double()).square().sum()) for n in expected)
    size = sum(float(expected[n].double().square().sum()) for n in expected)
    return float(np.sqrt(difference / size))


def whole_batch(
    model: Any,
    pairs: Sequence[PairTokens],
    loss: Callable[[PairLogps, PairLogps], Tensor],
    ref: PairLogps,
    weight_P: Sequence[float],
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradient of a global batch."""
    total = global_loss(loss(pair_logps(model, pairs), ref), weight_P)
    return total.detach(), gradient(model, total)
