"""A second implementation of the losses of labelled answers: equations, mismatched pairs, and results for a batch.

As plain as oracle.py and equations.py, and independent of isopref's losses. It uses the content ids of the data, since
they define the partner of each example.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from isopref.data.content import answer_id, example_id
from isopref.examples import Example
from isopref.score import TableLogps
from isopref.testing import oracle
from isopref.testing.answer import Answer, sigma
from isopref.testing.equations import LABEL_CASES
from isopref.types import IntArray

Labelled = Sequence[tuple[Answer, bool]]


def kto(y: Answer, good: bool, anchor: float, params: dict[str, Any]) -> Tensor:
    """lambda_y - v(x, y) of Ethayarajh et al. 2024, eq. 8; `anchor` is z_0."""
    beta = params["beta"]
    short = 1 - sigma(beta * (y.log_ratio - anchor)) if good else 1 - sigma(beta * (anchor - y.log_ratio))
    return short * float(params["desirable_weight"] if good else params["undesirable_weight"])


def bco(y: Answer, good: bool, anchor: float, params: dict[str, Any]) -> Tensor:
    """Binary cross-entropy of sigma(r - delta) (Jung et al. 2024); `anchor` is delta / beta."""
    share_good = sigma(params["beta"] * y.log_ratio - params["beta"] * anchor)
    return -torch.log(share_good) if good else -torch.log(1 - share_good)


LABEL_EQUATIONS: dict[str, Callable[..., Tensor]] = {equation.__name__: equation for equation in (kto, bco)}


def mean_mismatch(mismatched: Sequence[Answer], own: Sequence[float]) -> float:
    """z_0: the mean log-ratio of mismatched pairs, clamped at zero. A plain number, so it has no gradient."""
    mean = sum(w * float(y.log_ratio.detach()) for w, y in zip(own, mismatched, strict=True)) / sum(own)
    return max(0.0, mean)


def middle(labelled: Labelled, weights: Sequence[float]) -> float:
    """delta / beta in the first batch of a run: the midpoint of the mean log-ratios of good and of bad answers."""
    means = []
    for side in (True, False):
        there = [(w, y) for w, (y, good) in zip(weights, labelled, strict=True) if good is side]
        if there:
            means.append(sum(w * float(y.log_ratio.detach()) for w, y in there) / sum(w for w, _ in there))
    return sum(means) / len(means)


def labels_loss(case: str, labelled: Labelled, weights: Sequence[float], anchors: dict[str, float]) -> Tensor:
    """The loss of a global batch of labelled answers with these weights; `anchors` by objective."""
    loss, params = LABEL_CASES[case]
    total = torch.zeros((), dtype=torch.float64)
    for name, factor in {loss: 1.0}.items() if isinstance(loss, str) else loss.items():
        for w, (y, good) in zip(weights, labelled, strict=True):
            total = total + factor * w * LABEL_EQUATIONS[name](y, good, anchors[name], params)
    return total / sum(weights)


def label_weights(examples: Sequence[Example], weighting: str, own: Sequence[float]) -> list[float]:
    """w of each labelled answer by its definition."""
    return [
        weight
        * {
            "token": len(one.prompt) + len(answer),
            "completion": oracle.num_trained(of_tokens),
            "example": 1 / len(one.answers),
        }[weighting]
        for one, weight in zip(examples, own, strict=True)
        for answer, of_tokens in zip(one.answers, oracle.token_weights(one), strict=True)
    ]


def mismatched(examples: Sequence[Example]) -> list[tuple[IntArray, IntArray, list[float]]]:
    """Each prompt with an answer to the next different prompt, in the order of content ids, and its tokens' weights.

    Answers are cut so that no pair is longer than the longest example.
    """
    order = sorted(range(len(examples)), key=lambda n: example_id(examples[n]))
    longest = max(len(one.prompt) + len(answer) for one in examples for answer in one.answers)
    found = []
    for n, one in enumerate(examples):
        place = order.index(n)
        circle = [examples[m] for m in order[place + 1 :] + order[:place]]
        partner = next(other for other in circle if list(other.prompt) != list(one.prompt))
        by_id = {
            answer_id(partner.prompt, answer, partner.weights_of(k)): (answer, weights)
            for k, (answer, weights) in enumerate(zip(partner.answers, oracle.token_weights(partner), strict=True))
        }
        answer, weights = by_id[min(by_id)]
        room = longest - len(one.prompt)
        found.append((one.prompt, answer[:room], weights[:room]))
    return found


def expected(
    model: Any,
    other: Any,
    examples: Sequence[Example],
    own: Sequence[float],
    *,
    case: str,
    weighting: str,
    nll_weight: float,
    balance_weight: float,
) -> tuple[float, dict[str, Tensor], dict[str, float], TableLogps]:
    """Loss, gradient and metrics of a global batch, and the log-probabilities of the reference, `other`."""

    def scored(prompt: IntArray, answer: IntArray, of_tokens: Sequence[float]) -> Answer:
        with torch.no_grad():
            ref = oracle.sequence_logp(other, prompt, answer, of_tokens).double()
        policy = oracle.sequence_logp(model, prompt, answer, of_tokens).double()
        return Answer(policy, ref, oracle.num_trained(of_tokens))

    labelled = [
        (scored(one.prompt, answer, of_tokens), score == 1)
        for one in examples
        for answer, of_tokens, score in zip(one.answers, oracle.token_weights(one), one.scores, strict=True)
    ]
    pairs = [scored(*one) for one in mismatched(examples)]
    weights = label_weights(examples, weighting, own)
    anchors = {"kto": mean_mismatch(pairs, own), "bco": middle(labelled, weights)}
    of_answer = [weight for one, weight in zip(examples, own, strict=True) for _ in one.answers]
    good = [(v, y) for v, (y, is_good) in zip(of_answer, labelled, strict=True) if is_good]
    nll = -sum((v * y.policy for v, y in good), torch.zeros(())) / sum(v * y.tokens for v, y in good)
    loss = labels_loss(case, labelled, weights, anchors) + nll_weight * nll
    metrics = {**_metrics(case, labelled, anchors), "train/nll": float(nll.detach())}
    if balance_weight:
        balance = oracle.balance(model, examples)
        loss = loss + balance_weight * balance
        metrics["train/balance"] = float(balance.detach())
    reference = TableLogps(
        torch.stack([y.ref for y, _ in labelled]), mismatched=torch.stack([pair.ref for pair in pairs])
    )
    return float(loss.detach()), oracle.gradient(model, loss, again=True), metrics, reference


def _metrics(case: str, labelled: Labelled, anchors: dict[str, float]) -> dict[str, float]:
    """The metrics by their definitions; rewards and threshold are those of the first objective."""
    loss, params = LABEL_CASES[case]
    name = loss if isinstance(loss, str) else next(iter(loss))
    found: dict[str, float] = {}
    gains = {}
    for side, word in ((True, "chosen"), (False, "rejected")):
        there = [y for y, good in labelled if good is side]
        gains[side] = sum(float(y.log_ratio.detach()) for y in there) / len(there)
        found[f"train/rewards_{word}"] = params["beta"] * gains[side]
        found[f"train/logps_{word}"] = sum(float(y.policy.detach()) for y in there) / len(there)
    right = [float(y.log_ratio.detach()) > anchors[name] for y, _ in labelled]
    found["train/margin"] = gains[True] - gains[False]
    found["train/accuracy"] = sum(above is good for above, (_, good) in zip(right, labelled, strict=True)) / len(right)
    if "kto" in ({loss} if isinstance(loss, str) else loss):
        found["train/kl"] = anchors["kto"]
    return found
