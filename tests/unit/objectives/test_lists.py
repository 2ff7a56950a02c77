"""Losses of ranked lists: by hand, against their second writing, far out, and what cannot go with them."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from isopref.errors import ConfigError
from isopref.objectives.loss import pair_loss
from isopref.testing.answer import Answer
from isopref.testing.list_equations import LIST_CASES, LIST_EQUATIONS
from isopref.types import ListLogps


def lists(gain: list[float], score: list[float], of: list[int] | None = None) -> tuple[ListLogps, ListLogps]:
    """Policy and reference of answers that gained so many nats, of one list or of several."""
    known = torch.full((len(gain),), 5), torch.tensor(of or [0] * len(gain)), torch.tensor(score, dtype=torch.float64)
    ref = torch.linspace(-40, -20, len(gain), dtype=torch.float64)
    logp = (ref + torch.tensor(gain, dtype=torch.float64)).requires_grad_()
    return ListLogps(logp, *known), ListLogps(ref, *known)


def of_each(name: str, policy: ListLogps, ref: ListLogps, **params: Any) -> Tensor:
    return pair_loss(name, **params)(policy, ref)


# Three answers with rewards log 1, log 2 and log 3 (beta 1), of which the second has the best score, then the third.
GAINS, SCORES = [math.log(1), math.log(2), math.log(3)], [0.0, 10.0, 5.0]


def test_plackett_luce_by_hand() -> None:
    policy, ref = lists(GAINS, SCORES)
    expected = [0.0, -math.log(2 / 6), -math.log(3 / 4)]
    assert of_each("plackett_luce", policy, ref, beta=1.0).tolist() == pytest.approx(expected)


def test_softmax_by_hand() -> None:
    policy, ref = lists(GAINS, SCORES)
    assert of_each("softmax", policy, ref, beta=1.0).tolist() == pytest.approx([0.0, -math.log(2 / 6), 0.0])


def test_lipo_by_hand_where_ranks_are_whole_numbers() -> None:
    """By reward, the third answer is first, the second one second. Scores from 0 to 1 are 0, 1 and 1/2."""
    policy, ref = lists(GAINS, SCORES)
    first, second, third = (1 / math.log(1 + rank) for rank in (1, 2, 3))
    root = math.sqrt(2)
    expected = [
        0.0,
        (2 - root) * (first - second) * math.log(1 + 3 / 2) + (2 - 1) * (second - third) * math.log(1 + 1 / 2),
        (root - 1) * (first - third) * math.log(1 + 1 / 3),
    ]
    assert of_each("lipo", policy, ref, beta=1.0, rank_temperature=0.01).tolist() == pytest.approx(expected)


def test_lipo_by_hand_where_all_rewards_are_equal() -> None:
    """Of three tied answers the third is as likely to be above as below: ranks 1.5 and 2.5 for any two of them."""
    policy, ref = lists([0.0, 0.0, 0.0], [0.0, 1.0, 0.5])
    apart = 1 / math.log(2.5) - 1 / math.log(3.5)
    expected = [value * apart * math.log(2) for value in (0, (2 - math.sqrt(2)) + (2 - 1), math.sqrt(2) - 1)]
    assert of_each("lipo", policy, ref).tolist() == pytest.approx(expected)


def test_lipo_is_not_decided_by_rounding() -> None:
    """Before the first step the rewards of a list differ by rounding alone, and every layout rounds in its own way."""
    random = torch.Generator().manual_seed(0)
    scores = [0.1, 0.9, 0.4, 0.7, 0.2]
    found = []
    for _ in range(20):
        policy, ref = lists((1e-12 * torch.randn(5, generator=random, dtype=torch.float64)).tolist(), scores)
        loss = of_each("lipo", policy, ref).sum()
        found.append((float(loss.detach()), torch.autograd.grad(loss, policy.logp)[0]))
    for value, gradient in found[1:]:
        assert value == pytest.approx(found[0][0], rel=1e-10)
        torch.testing.assert_close(gradient, found[0][1], rtol=1e-10, atol=0)
    assert found[0][1].abs().min() > 1e-4  # and it trains


@pytest.mark.parametrize("case", LIST_CASES)
def test_a_tie_says_nothing(case: str) -> None:
    policy, ref = lists([1.0, 2.0, 3.0, 7.0], [4.0, 4.0, 4.0, math.nan])
    assert of_each(*LIST_CASES[case][:1], policy, ref).tolist() == [0.0] * 4


@pytest.mark.parametrize("case", LIST_CASES)
def test_values_and_gradients_are_those_of_the_second_writing(case: str) -> None:
    """Three lists, mixed up, one of them a single answer."""
    name, params = LIST_CASES[case]
    random = torch.Generator().manual_seed(0)
    of = [0, 1, 0, 2, 1, 1, 0, 1]
    scores = [3.0, 0.1, 3.0, 9.0, 0.4, 0.4, -2.0, 0.9]
    policy, ref = lists((3 * torch.randn(8, generator=random)).tolist(), scores, of)
    found = of_each(name, policy, ref, **params)
    every = []
    for which in range(3):
        inside = [a for a in range(8) if of[a] == which]
        ranked = [(Answer(policy.logp[a], ref.logp[a], 5), scores[a]) for a in inside]
        expected = LIST_EQUATIONS[name](ranked, **params)
        torch.testing.assert_close(found[inside].sum(), expected, rtol=1e-11, atol=1e-13)
        every.append(expected)
    (mine,), (theirs,) = (torch.autograd.grad(x, policy.logp) for x in (found.sum(), torch.stack(every).sum()))
    torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("case", LIST_CASES)
def test_far_out_all_is_finite(case: str) -> None:
    name, params = LIST_CASES[case]
    policy, ref = lists([1e4, -1e4, 0.0, 1e4], [0.0, 1.0, 2.0, 3.0])
    loss = of_each(name, policy, ref, **params)
    (gradient,) = torch.autograd.grad(loss.sum(), policy.logp)
    assert loss.isfinite().all()
    assert gradient.isfinite().all()


def test_a_pair_is_a_list_of_two() -> None:
    """Plackett-Luce of two answers is the sigmoid loss of DPO."""
    policy, ref = lists([1.3, 0.2], [1.0, 0.0])
    loss = of_each("plackett_luce", policy, ref, beta=0.3).sum()
    assert float(loss.detach()) == pytest.approx(math.log1p(math.exp(-0.3 * (1.3 - 0.2))))


@pytest.mark.parametrize(
    ("loss", "more", "message"),
    [
        (
            {"sigmoid": 1.0, "softmax": 0.5},
            {},
            "sigmoid is a loss of pairs, softmax is a loss of lists. Only losses of one kind",
        ),
        ("softmax", {"ld_alpha": 0.5}, "ld_alpha is 0.5, which discounts"),
        (
            "plackett_luce",
            {"wpo": True},
            "wpo: weights the loss of each pair, but with plackett_luce a single pair has no loss of its own",
        ),
    ],
)
def test_what_cannot_go_together(loss: object, more: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pair_loss(loss, **more)  # type: ignore[arg-type]
