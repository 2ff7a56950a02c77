"""The slow, obvious oracle: one sequence at a time, straight from the equations, with the model's own forward pass.

No packing, no microbatches, no shared prompts, and none of our optimised code: only the definitions. Everything fast is
compared with this.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from isopref.examples import Example, PairTokens
from isopref.types import FloatArray, IntArray, PairLogps


class Compared(NamedTuple):
    """One comparison, with a weight for every token of its answers."""

    prompt: IntArray
    chosen: IntArray
    rejected: IntArray
    chosen_weights: list[float]
    rejected_weights: list[float]


def predictions(model: Any, prompt: IntArray, completion: IntArray) -> Tensor:
    """log softmax(logits) at the position before each token of the completion: C, V."""
    ids = torch.tensor([[*map(int, prompt), *map(int, completion)]])
    logits_TV = model(input_ids=ids).logits[0]
    logp_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32)).log_softmax(dim=-1)
    logp_CV: Tensor = logp_TV[len(prompt) - 1 : -1]
    return logp_CV


def token_logps(model: Any, prompt: IntArray, completion: IntArray) -> list[Tensor]:
    """log p of each token of the completion."""
    logp_CV = predictions(model, prompt, completion)
    return [logp_CV[i, int(token)] for i, token in enumerate(completion)]


def sequence_logp(
    model: Any, prompt: IntArray, completion: IntArray, weights: Sequence[float] | FloatArray | None = None
) -> Tensor:
    """The sum over the tokens of a completion of weight * log p(token | all before it). Default weights are 1."""
    tokens = token_logps(model, prompt, completion)
    weights = [1.0] * len(tokens) if weights is None else weights
    return torch.stack([float(weight) * one for weight, one in zip(weights, tokens, strict=True)]).sum()


def num_trained(weights: Sequence[float] | FloatArray) -> int:
    """Tokens that are not context."""
    return sum(1 for weight in weights if weight != 0)


def pair_logps(model: Any, pairs: Sequence[PairTokens | Compared], ld_alpha: float = 1.0) -> PairLogps:
    """Log-probabilities of both completions of every pair.

    `ld_alpha` is LD-DPO's discount (Liu et al. 2024): if the completion with fewer trained tokens has n of them, the
    log-probabilities of the other's trained tokens after the first n are multiplied by `ld_alpha`.
    """

    def logp(prompt: IntArray, completion: IntArray, weights: list[float], common: int) -> Tensor:
        discounted = []
        for i, weight in enumerate(weights):
            is_common = num_trained(weights[: i + 1]) <= common
            discounted.append(weight if is_common else ld_alpha * weight)
        return sequence_logp(model, prompt, completion, discounted)

    chosen, rejected, num_chosen, num_rejected = [], [], [], []
    for prompt, better, worse, of_better, of_worse in map(_compared, pairs):
        common = min(num_trained(of_better), num_trained(of_worse))
        chosen.append(logp(prompt, better, of_better, common))
        rejected.append(logp(prompt, worse, of_worse, common))
        num_chosen.append(num_trained(of_better))
        num_rejected.append(num_trained(of_worse))
    return PairLogps(
        chosen=torch.stack(chosen),
        rejected=torch.stack(rejected),
        num_chosen=torch.tensor(num_chosen),
        num_rejected=torch.tensor(num_rejected),
    )


def sequence_reward(model: Any, prompt: IntArray, answer: IntArray, _weights: Sequence[float] = ()) -> Tensor:
    """The reward that a sequence-classification model gives an answer. Token weights do not matter."""
    reward: Tensor = model(input_ids=torch.tensor([[*map(int, prompt), *map(int, answer)]])).logits[0, 0]
    return reward.to(torch.promote_types(reward.dtype, torch.float32))


def pair_rewards(model: Any, pairs: Sequence[PairTokens | Compared]) -> PairLogps:
    """The rewards of both answers of every pair, in place of log-probabilities."""
    return PairLogps(
        chosen=torch.stack([sequence_reward(model, pair.prompt, pair.chosen) for pair in pairs]),
        rejected=torch.stack([sequence_reward(model, pair.prompt, pair.rejected) for pair in pairs]),
        num_chosen=torch.tensor([len(pair.chosen) for pair in pairs]),
        num_rejected=torch.tensor([len(pair.rejected) for pair in pairs]),
    )


def _compared(pair: PairTokens | Compared) -> Compared:
    return pair if isinstance(pair, Compared) else Compared(*pair, [1.0] * len(pair.chosen), [1.0] * len(pair.rejected))


def comparisons(examples: Sequence[Example]) -> list[Compared]:
    """Every comparison as a separate pair."""
    return [
        Compared(
            example.prompt,
            example.answers[better],
            example.answers[worse],
            token_weights(example)[better],
            token_weights(example)[worse],
        )
        for example in examples
        for better, worse in example.comparisons
    ]


def token_weights(example: Example) -> list[list[float]]:
    """The weight of every token of every answer."""
    if not example.weights:
        return [[1.0] * len(answer) for answer in example.answers]
    return [list(map(float, weights)) for weights in example.weights]


@torch.no_grad()
def wpo_weights(model: Any, pairs: Sequence[PairTokens | Compared]) -> list[float]:
    """w(x, c) w(x, r) of WPO (Zhou et al. 2024): w is the geometric mean over trained tokens of p(token) / sum p^2."""

    def weight(prompt: IntArray, completion: IntArray, weights: list[float]) -> float:
        p_CV = predictions(model, prompt, completion).double().exp()
        aligned = [
            float(p_CV[i, int(token)] / (p_CV[i] ** 2).sum()) for i, token in enumerate(completion) if weights[i] != 0
        ]
        return float(np.prod(aligned) ** (1 / len(aligned)))

    return [
        weight(prompt, chosen, of_chosen) * weight(prompt, rejected, of_rejected)
        for prompt, chosen, rejected, of_chosen, of_rejected in map(_compared, pairs)
    ]


def balance(model: Any, examples: Sequence[Example]) -> Tensor:
    """Switch Transformer's auxiliary loss (Fedus et al. 2021, eqs. 4 to 6), over all tokens of all sequences.

    E sum_e f_e P_e, averaged over layers. A token routed to several experts counts in the f of each.
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
    pairs: Sequence[PairTokens | Compared],
    weighting: str,
    own: Sequence[float] | None = None,
    gaps: Sequence[float] | None = None,
) -> list[float]:
    """w_p by its definition: the tokens of both sequences, the trained ones, 1, or the gap between the scores."""
    each = []
    for n, pair in enumerate(map(_compared, pairs)):
        sequences = len(pair.chosen) + len(pair.rejected) + 2 * len(pair.prompt)
        completion = num_trained(pair.chosen_weights) + num_trained(pair.rejected_weights)
        gap = 1.0 if gaps is None else gaps[n]
        size = {"token": sequences, "completion": completion, "example": 1, "gap": gap}[weighting]
        each.append(size * (1.0 if own is None else own[n]))
    return each


def list_weights(examples: Sequence[Example], weighting: str, own: Sequence[float]) -> list[float]:
    """w of each list by its definition."""
    each = []
    for example, weight in zip(examples, own, strict=True):
        completion = sum(map(num_trained, token_weights(example)))
        sequences = sum(len(answer) + len(example.prompt) for answer in example.answers)
        each.append({"token": sequences, "completion": completion, "example": 1}[weighting] * weight)
    return each


def global_loss(loss_P: Tensor, weight_P: Sequence[float]) -> Tensor:
    """L = sum w_p l_p / sum w_p."""
    weight = torch.tensor(weight_P, dtype=torch.float64)
    return (loss_P.double() * weight).sum() / weight.sum()


def token_nll(policy: PairLogps, own: Sequence[float] | None = None) -> Tensor:
    """-sum v_p log pi(c_p) / sum v_p n_p: the mean negative log-likelihood of a chosen token, weighted by v_p."""
    v = torch.ones(len(policy.chosen)).double() if own is None else torch.tensor(own, dtype=torch.float64)
    return -(v * policy.chosen.double()).sum() / (v * policy.num_chosen).sum()


def gradient(model: nn.Module, loss: Tensor, *, again: bool = False) -> dict[str, Tensor]:
    """dL/dparameter by name; zero for unused parameters. `again`: keep the graph, because it is used again."""
    names, params = zip(*((n, p) for n, p in model.named_parameters() if p.requires_grad), strict=True)
    grads = torch.autograd.grad(loss, params, allow_unused=True, retain_graph=again)
    return {n: torch.zeros_like(p) if g is None else g for n, p, g in zip(names, params, grads, strict=True)}


def relative_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """||found - expected|| / ||expected|| over all parameters together, in float64. NaN gives NaN."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    difference = sum(float((found[n].double() - expected[n].double()).square().sum()) for n in expected)
    size = sum(float(expected[n].double().square().sum()) for n in expected)
    return float(np.sqrt(difference / size))


def whole_batch(
    model: Any,
    pairs: Sequence[PairTokens | Compared],
    loss: Callable[[PairLogps, PairLogps], Tensor],
    ref: PairLogps,
    weight_P: Sequence[float],
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradient of a global batch."""
    total = global_loss(loss(pair_logps(model, pairs), ref), weight_P)
    return total.detach(), gradient(model, total)
