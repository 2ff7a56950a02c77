"""Objectives against values worked out by hand. P: pairs."""

import math

import pytest
import torch
from torch import Tensor

from isopref.errors import ConfigError
from isopref.losses import OBJECTIVES, margin, pair_loss, rewards, sigmoid
from isopref.types import PairLogps


def logps(chosen: list[float], rejected: list[float], dtype: torch.dtype = torch.float64) -> PairLogps:
    ones = torch.ones(len(chosen), dtype=torch.long)
    return PairLogps(torch.tensor(chosen, dtype=dtype), torch.tensor(rejected, dtype=dtype), ones, ones)


def with_gradient(policy: PairLogps) -> PairLogps:
    leaves = (policy.chosen.clone().requires_grad_(), policy.rejected.clone().requires_grad_())
    return PairLogps(*leaves, policy.num_chosen, policy.num_rejected)


def softplus(x: float) -> float:
    """-log sigmoid(-x) = log(1 + e^x), by its definition."""
    return math.log1p(math.exp(x))


def test_margin_and_rewards_by_hand() -> None:
    policy, ref = logps([-10.0, -3.0], [-12.0, -4.0]), logps([-11.0, -3.0], [-10.0, -7.0])
    assert margin(policy, ref).tolist() == [3.0, -3.0]  # (1) - (-2) and (0) - (3)
    chosen, rejected = rewards(policy, ref, beta=0.5)
    assert chosen.tolist() == [0.5, 0.0]
    assert rejected.tolist() == [-1.0, 1.5]


@pytest.mark.parametrize(
    ("gap", "beta", "smoothing", "expected"),
    [
        (0.0, 0.1, 0.0, math.log(2)),
        (0.0, 0.1, 0.3, math.log(2)),  # both terms are ln 2
        (10.0, 0.1, 0.0, softplus(-1)),
        (-10.0, 0.1, 0.0, softplus(1)),
        (10.0, 0.1, 0.1, 0.9 * softplus(-1) + 0.1 * softplus(1)),
        (4.0, 0.5, 0.5, 0.5 * softplus(-2) + 0.5 * softplus(2)),
        (4.0, 0.5, 1.0, softplus(2)),  # all labels flipped
    ],
)
def test_sigmoid_by_hand(gap: float, beta: float, smoothing: float, expected: float) -> None:
    # The margin is (-5 + gap) - (-7) less the reference's (-5) - (-7).
    loss = sigmoid(logps([gap - 5.0], [-7.0]), logps([-5.0], [-7.0]), beta=beta, label_smoothing=smoothing)
    assert loss.tolist() == pytest.approx([expected], rel=1e-14)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("gap", [1e4, -1e4])
def test_extreme_log_ratios_stay_finite(gap: float, smoothing: float) -> None:
    policy = with_gradient(logps([gap], [0.0], torch.float32))
    loss = sigmoid(policy, logps([0.0], [0.0], torch.float32), beta=1.0, label_smoothing=smoothing)
    # -log sigmoid(x) is 0 for x = 1e4 and 1e4 for x = -1e4, to float32's precision.
    right, wrong = (0.0, 1e4) if gap > 0 else (1e4, 0.0)
    assert loss.item() == pytest.approx((1 - smoothing) * right + smoothing * wrong, rel=1e-6)
    loss.sum().backward()
    slope = smoothing if gap > 0 else -(1 - smoothing)  # d loss / d margin
    assert policy.chosen.grad is not None
    assert policy.rejected.grad is not None
    assert policy.chosen.grad.item() == pytest.approx(slope, abs=1e-6)
    assert policy.rejected.grad.item() == pytest.approx(-slope, abs=1e-6)


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
@pytest.mark.parametrize("params", [{"beta": 0.1}, {"beta": 2.0}, {"beta": 0.7, "label_smoothing": 0.2}])
def test_gradients_are_the_finite_differences(name: str, params: dict[str, float]) -> None:
    loss = pair_loss(name, **params)
    policy, ref = logps([-1.0, -2.5, -0.3], [-2.0, -1.0, -0.4]), logps([-1.5, -2.0, -0.2], [-1.7, -1.1, -0.9])

    def of(chosen: Tensor, rejected: Tensor) -> Tensor:
        return loss(PairLogps(chosen, rejected, policy.num_chosen, policy.num_rejected), ref)

    leaves = with_gradient(policy)
    assert torch.autograd.gradcheck(of, (leaves.chosen, leaves.rejected))


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_a_pair_knows_nothing_of_the_others(name: str) -> None:
    policy, ref = logps([-1.0, -2.5, 3.0], [-2.0, -1.0, 0.5]), logps([-1.5, -2.0, 1.0], [-1.7, -1.1, 0.0])
    alone = [
        pair_loss(name, beta=0.3)(*(PairLogps(*(x[p : p + 1] for x in vars(side).values())) for side in (policy, ref)))
        for p in range(3)
    ]
    assert torch.equal(pair_loss(name, beta=0.3)(policy, ref), torch.cat(alone))


def test_an_unknown_objective_names_itself_and_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"objective\.loss: unknown 'sigmoide'.*sigmoid"):
        pair_loss("sigmoide", beta=0.1)
