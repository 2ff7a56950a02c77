"""A second implementation of every objective, straight from its paper: one pair at a time, in plain exp and log.

Objectives that couple pairs take all pairs of a batch and are written as loops. list_equations.py has the objectives
for lists, labels.py those for labels.

It shares nothing with isopref.objectives, and overflows for large arguments. Numbers are scalar float64 tensors, so
that the oracle can differentiate the results.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from isopref.testing.answer import Answer, sigma
from isopref.testing.list_equations import LIST_CASES
from isopref.types import PairLogps


def bradley_terry(difference: Tensor, smoothing: float) -> Tensor:
    """Cross-entropy of the preference for chosen, sigma(difference), with labels (1 - smoothing, smoothing).

    -log sigma(d) is written as log(e^0 + e^-d): with some divergences d is in the thousands, and sigma(d) is 0.
    """
    zero = torch.zeros_like(difference)
    return (1 - smoothing) * torch.logaddexp(zero, -difference) + smoothing * torch.logaddexp(zero, difference)


def slope(u: Tensor, divergence: str | float) -> Tensor:
    """f'(u) in table 1 of f-DPO."""
    if divergence == "reverse_kl":
        return torch.log(u) + 1
    if divergence == "forward_kl":
        return -1 / u
    if divergence == "jensen_shannon":
        return torch.log(2 * u / (1 + u))
    return (1 - u ** -float(divergence)) / float(divergence)


def sigmoid(c: Answer, r: Answer, *, beta: float, label_smoothing: float, divergence: str | float) -> Tensor:
    return bradley_terry(beta * slope(c.ratio, divergence) - beta * slope(r.ratio, divergence), label_smoothing)


def dpo_norm(c: Answer, r: Answer, *, beta: float, label_smoothing: float) -> Tensor:
    return bradley_terry(beta / c.tokens * c.log_ratio - beta / r.tokens * r.log_ratio, label_smoothing)


def odpo(c: Answer, r: Answer, *, beta: float, alpha: float) -> Tensor:
    offset = alpha * math.log(c.score - r.score)
    return -torch.log(sigma(beta * c.log_ratio - beta * r.log_ratio - offset))


def robust(c: Answer, r: Answer, *, beta: float, label_smoothing: float) -> Tensor:
    kept = -torch.log(sigma(beta * (c.log_ratio - r.log_ratio)))
    swapped = -torch.log(sigma(beta * (r.log_ratio - c.log_ratio)))
    return ((1 - label_smoothing) * kept - label_smoothing * swapped) / (1 - 2 * label_smoothing)


def hinge(c: Answer, r: Answer, *, beta: float) -> Tensor:
    short = 1 - (beta * c.log_ratio - beta * r.log_ratio)
    return short if short > 0 else 0 * short


def ipo(c: Answer, r: Answer, *, beta: float) -> Tensor:
    return (c.log_ratio / c.tokens - r.log_ratio / r.tokens - 0.5 / beta) ** 2


def ipo_sum(c: Answer, r: Answer, *, beta: float) -> Tensor:
    return (torch.log(c.ratio / r.ratio) - 0.5 / beta) ** 2


def exo_pair(c: Answer, r: Answer, *, beta: float, label_smoothing: float) -> Tensor:
    powers = [answer.ratio**beta for answer in (c, r)]
    labels = [1 - label_smoothing, label_smoothing]
    shares = [power / (powers[0] + powers[1]) for power in powers]
    return sum((q * torch.log(q / p) for q, p in zip(shares, labels, strict=True)), torch.zeros(()))


def nca_pair(c: Answer, r: Answer, *, beta: float) -> Tensor:
    loss = torch.zeros((), dtype=torch.float64)
    for answer, preference in ((c, 1.0), (r, 0.0)):
        reward = beta * answer.log_ratio
        loss = loss - preference * torch.log(sigma(reward)) - torch.log(sigma(-reward)) / 2
    return loss


def sppo_hard(c: Answer, r: Answer, *, beta: float) -> Tensor:
    eta = 1 / beta
    return (torch.log(c.ratio) - eta * (1 - 0.5)) ** 2 + (torch.log(r.ratio) - eta * (0 - 0.5)) ** 2


def apo_zero(c: Answer, r: Answer, *, beta: float) -> Tensor:
    return -sigma(beta * c.log_ratio) + sigma(beta * r.log_ratio) + 1  # the constant keeps it above zero


def apo_down(c: Answer, r: Answer, *, beta: float) -> Tensor:
    return sigma(beta * c.log_ratio) - sigma(beta * (c.log_ratio - r.log_ratio)) + 1


def discopop(c: Answer, r: Answer, *, beta: float) -> Tensor:
    rho = beta * (c.log_ratio - r.log_ratio)
    share = sigma(rho / 0.05)
    return (1 - share) * torch.log(1 + torch.exp(-rho)) + share * torch.exp(-rho)


def simpo(c: Answer, r: Answer, *, beta: float, gamma: float) -> Tensor:
    return -torch.log(sigma(beta / c.tokens * c.policy - beta / r.tokens * r.policy - gamma))


def orpo(c: Answer, r: Answer, *, beta: float) -> Tensor:
    odds = [answer.likelihood / (1 - answer.likelihood) for answer in (c, r)]
    return -torch.log(c.likelihood) - beta * torch.log(sigma(torch.log(odds[0] / odds[1])))


def cpo(c: Answer, r: Answer, *, beta: float) -> Tensor:
    return -torch.log(sigma(beta * c.policy - beta * r.policy)) - torch.log(c.likelihood)


def bradley_terry_reward(c: Answer, r: Answer, *, margin: float, center: float) -> Tensor:
    """`policy` is the reward of a reward model."""
    apart = margin * (c.score - r.score) if margin else 0.0
    return -torch.log(sigma(c.policy - r.policy - apart)) + center * (c.policy + r.policy) ** 2


Pairs = Sequence[tuple[Answer, Answer]]


def mean_reward(pairs: Pairs, weights: Sequence[float], beta: float) -> float:
    """The mean reward over all answers of a batch. A plain number, so it has no gradient."""
    means = [beta * float((c.log_ratio + r.log_ratio).detach()) / 2 for c, r in pairs]
    return sum(w * mean for w, mean in zip(weights, means, strict=True)) / sum(weights)


def bco_pair(pairs: Pairs, weights: Sequence[float], *, beta: float) -> Tensor:
    """The loss of the first batch of a run, whose shift has no earlier batches to average over."""
    delta = mean_reward(pairs, weights, beta)
    losses = [
        -torch.log(sigma(beta * c.log_ratio - delta)) - torch.log(sigma(-(beta * r.log_ratio - delta)))
        for c, r in pairs
    ]
    return torch.stack([w / sum(weights) * loss for w, loss in zip(weights, losses, strict=True)]).sum()


def transport(
    x: Sequence[Tensor], y: Sequence[Tensor], weights: Sequence[float], cost: Callable[[Tensor], Tensor]
) -> Tensor:
    """The cost of transporting the distribution of x to that of y in sorted order, one piece of mass at a time."""
    queues: list[list[Any]] = [
        sorted([value, w / sum(weights)] for value, w in zip(values, weights, strict=True)) for values in (x, y)
    ]
    done = []
    while all(queues):
        (value, mass), (other, room) = queues[0][0], queues[1][0]
        moved = min(mass, room)
        done.append(moved * cost(value - other))
        for queue in queues:
            queue[0][1] -= moved
            if queue[0][1] < 1e-14:
                queue.pop(0)
    return torch.stack(done).sum()


def aot(pairs: Pairs, weights: Sequence[float], *, beta: float, label_smoothing: float) -> Tensor:
    policy, ref = [c.policy - r.policy for c, r in pairs], [c.ref - r.ref for c, r in pairs]
    return transport(policy, ref, weights, lambda gap: bradley_terry(beta * gap, label_smoothing))


def aot_unpaired(pairs: Pairs, weights: Sequence[float], *, beta: float, label_smoothing: float) -> Tensor:
    chosen, rejected = [c.log_ratio for c, _ in pairs], [r.log_ratio for _, r in pairs]
    return transport(chosen, rejected, weights, lambda gap: bradley_terry(beta * gap, label_smoothing))


EQUATIONS: dict[str, Callable[..., Tensor]] = {
    equation.__name__: equation
    for equation in (
        *(sigmoid, dpo_norm, robust, hinge, ipo, ipo_sum, exo_pair, nca_pair, sppo_hard, apo_zero, apo_down, discopop),
        *(odpo, simpo, orpo, cpo),
    )
}
EQUATIONS["bradley_terry"] = bradley_terry_reward


COUPLED_EQUATIONS: dict[str, Callable[..., Tensor]] = {
    equation.__name__: equation for equation in (bco_pair, aot, aot_unpaired)
}


def reward(name: str, y: Answer, params: Mapping[str, Any]) -> Tensor:
    """The reward of an answer under an objective; with a reference, 0 if both models find it equally likely."""
    beta: float = params.get("beta", 1.0)
    match name:
        case "sigmoid":
            divergence = params["divergence"]
            return beta * (slope(y.ratio, divergence) - slope(torch.ones_like(y.ratio), divergence))
        case "dpo_norm" | "ipo":
            return beta / y.tokens * y.log_ratio
        case "simpo" | "orpo":
            return beta / y.tokens * y.policy
        case "cpo" | "bradley_terry" | "plackett_luce_reward":
            return beta * y.policy
    return beta * y.log_ratio


def answers(policy: PairLogps, ref: PairLogps) -> list[tuple[Answer, Answer]]:
    gaps = [math.nan] * len(policy.chosen) if policy.gap is None else policy.gap.tolist()
    return [
        (
            Answer(policy.chosen[p].double(), ref.chosen[p].double(), int(policy.num_chosen[p]), gap),
            Answer(policy.rejected[p].double(), ref.rejected[p].double(), int(policy.num_rejected[p]), 0.0),
        )
        for p, gap in enumerate(gaps)
    ]


def by_equation(name: str, params: dict[str, Any]) -> Callable[[PairLogps, PairLogps], Tensor]:
    """The objective in the form that the oracle takes: the losses of all pairs, each computed alone."""

    def losses(policy: PairLogps, ref: PairLogps) -> Tensor:
        return torch.stack([EQUATIONS[name](c, r, **params) for c, r in answers(policy, ref)])

    return losses


def batch_loss(
    case: str, policy: PairLogps, ref: PairLogps, weights: Sequence[float], factors: Sequence[float] | None = None
) -> Tensor:
    """The loss of a global batch whose pairs have these weights, by the equations of a case.

    `factors` multiply the pairs' losses, as WPO's weights do.
    """
    loss, params = ALL_CASES[case]
    total = torch.zeros((), dtype=torch.float64)
    for name, factor in {loss: 1.0}.items() if isinstance(loss, str) else loss.items():
        equation = EQUATIONS.get(name) or COUPLED_EQUATIONS[name]
        taken = {key: value for key, value in params.items() if key in inspect.signature(equation).parameters}
        if name in COUPLED_EQUATIONS:
            total = total + factor * equation(answers(policy, ref), weights, **taken)
        else:
            losses = [equation(c, r, **taken) for c, r in answers(policy, ref)]
            parts = zip(weights, factors or [1.0] * len(weights), losses, strict=True)
            total = total + factor * sum(w * one_factor * one for w, one_factor, one in parts) / sum(weights)
    return total


# At least one case for every objective, with parameters for which the batches of the matrix give moderate losses, where
# neither loss nor gradient is near zero or overflows.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "sigmoid": ("sigmoid", {"beta": 0.3, "label_smoothing": 0.1, "divergence": "reverse_kl"}),
    "forward_kl": ("sigmoid", {"beta": 2e-4, "label_smoothing": 0.0, "divergence": "forward_kl"}),
    "jensen_shannon": ("sigmoid", {"beta": 0.3, "label_smoothing": 0.0, "divergence": "jensen_shannon"}),
    "alpha": ("sigmoid", {"beta": 0.3, "label_smoothing": 0.1, "divergence": 0.4}),
    "odpo": ("odpo", {"beta": 0.3, "alpha": 0.7}),
    "dpo_norm": ("dpo_norm", {"beta": 3.0, "label_smoothing": 0.1}),
    "robust": ("robust", {"beta": 0.3, "label_smoothing": 0.2}),
    "hinge": ("hinge", {"beta": 0.3}),
    "ipo": ("ipo", {"beta": 0.7}),
    "ipo_sum": ("ipo_sum", {"beta": 0.1}),
    "exo_pair": ("exo_pair", {"beta": 0.3, "label_smoothing": 0.02}),
    "nca_pair": ("nca_pair", {"beta": 0.3}),
    "sppo_hard": ("sppo_hard", {"beta": 0.2}),
    "apo_zero": ("apo_zero", {"beta": 0.3}),
    "apo_down": ("apo_down", {"beta": 0.3}),
    "discopop": ("discopop", {"beta": 0.1}),
    "simpo": ("simpo", {"beta": 2.0, "gamma": 0.6}),
    "orpo": ("orpo", {"beta": 0.5}),
    "cpo": ("cpo", {"beta": 0.2}),
    "bradley_terry": ("bradley_terry", {"margin": 0.0, "center": 0.2}),
    "bradley_terry_margin": ("bradley_terry", {"margin": 0.4, "center": 0.0}),
}
# Cases of objectives that couple the pairs of a batch, and of sums of several objectives.
BATCH_CASES: dict[str, tuple[str | Mapping[str, float], dict[str, Any]]] = {
    "bco_pair": ("bco_pair", {"beta": 0.3}),
    "aot": ("aot", {"beta": 0.3, "label_smoothing": 0.1}),
    "aot_unpaired": ("aot_unpaired", {"beta": 0.3, "label_smoothing": 0.1}),
    "several": (
        {"sigmoid": 1.0, "ipo": 0.3, "cpo": 0.2},
        {"beta": 0.4, "label_smoothing": 0.1, "divergence": "reverse_kl"},
    ),
    "several_scored": ({"odpo": 1.0, "aot": 0.4}, {"beta": 0.3, "alpha": 0.7, "label_smoothing": 0.0}),
    "several_coupled": ({"hinge": 0.6, "aot": 1.0, "bco_pair": 0.5}, {"beta": 0.3, "label_smoothing": 0.0}),
}
REWARD_CASES = ("bradley_terry", "bradley_terry_margin", "plackett_luce_reward")  # computed with a reward model
# Their equations are in labels.py.
LABEL_CASES: dict[str, tuple[str | Mapping[str, float], dict[str, Any]]] = {
    "kto": ("kto", {"beta": 0.3, "desirable_weight": 1.3, "undesirable_weight": 0.8}),
    "bco": ("bco", {"beta": 0.3}),
    "several_labels": (
        {"bco": 0.5, "kto": 1.0},
        {"beta": 0.2, "desirable_weight": 1.0, "undesirable_weight": 1.0},
    ),
}
ALL_CASES: dict[str, tuple[str | Mapping[str, float], dict[str, Any]]] = {
    **CASES,
    **BATCH_CASES,
    **LIST_CASES,
    **LABEL_CASES,
}
