"""DPO's loss against values worked out by hand; test_objectives.py has the whole family. P: pairs."""

import math
from dataclasses import replace

import pytest
import torch

from isopref.objectives.loss import pair_loss
from isopref.objectives.parts import margin
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


def test_margin_and_gains_by_hand() -> None:
    policy, ref = logps([-10.0, -3.0], [-12.0, -4.0]), logps([-11.0, -3.0], [-10.0, -7.0])
    assert margin(policy, ref).tolist() == [3.0, -3.0]  # (1) - (-2) and (0) - (3)
    chosen, rejected = pair_loss("sigmoid").gains(policy, ref)
    assert chosen.tolist() == [1.0, 0.0]
    assert rejected.tolist() == [-2.0, 3.0]


@pytest.mark.parametrize(
    ("gap", "beta", "smoothing", "expected"),
    [
        (0.0, 0.1, 0.0, math.log(2)),
        (0.0, 0.1, 0.3, math.log(2)),  # both terms are ln 2
        (10.0, 0.1, 0.0, softplus(-1)),
        (-10.0, 0.1, 0.0, softplus(1)),
        (10.0, 0.1, 0.1, 0.9 * softplus(-1) + 0.1 * softplus(1)),
        (4.0, 0.5, 0.4, 0.6 * softplus(-2) + 0.4 * softplus(2)),
    ],
)
def test_sigmoid_by_hand(gap: float, beta: float, smoothing: float, expected: float) -> None:
    # The margin is (-5 + gap) - (-7) less the reference's (-5) - (-7).
    of = pair_loss("sigmoid", beta=beta, label_smoothing=smoothing)
    loss = of(logps([gap - 5.0], [-7.0]), logps([-5.0], [-7.0]))
    assert loss.tolist() == pytest.approx([expected], rel=1e-14)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("gap", [1e4, -1e4])
def test_extreme_log_ratios_stay_finite(gap: float, smoothing: float) -> None:
    policy = with_gradient(logps([gap], [0.0], torch.float32))
    loss = pair_loss("sigmoid", beta=1.0, label_smoothing=smoothing)(policy, logps([0.0], [0.0], torch.float32))
    # -log sigmoid(x) is 0 for x = 1e4 and 1e4 for x = -1e4, to float32's precision.
    right, wrong = (0.0, 1e4) if gap > 0 else (1e4, 0.0)
    assert loss.item() == pytest.approx((1 - smoothing) * right + smoothing * wrong, rel=1e-6)
    loss.sum().backward()
    slope = smoothing if gap > 0 else -(1 - smoothing)  # d loss / d margin
    assert policy.chosen.grad is not None
    assert policy.rejected.grad is not None
    assert policy.chosen.grad.item() == pytest.approx(slope, abs=1e-6)
    assert policy.rejected.grad.item() == pytest.approx(-slope, abs=1e-6)


@pytest.mark.parametrize(("score_gap", "offset"), [(1.0, 0.0), (math.e, 0.5), (math.exp(-4), -2.0)])
def test_odpo_by_hand(score_gap: float, offset: float) -> None:
    """A margin of 3 times beta 0.1, less alpha 0.5 times the logarithm of the gap. At a gap of 1 it is DPO."""
    policy, ref = logps([-10.0], [-12.0]), logps([-11.0], [-10.0])
    loss = pair_loss("odpo", beta=0.1, alpha=0.5)
    found = loss(replace(policy, gap=torch.tensor([score_gap], dtype=torch.float64)), ref)
    assert found.tolist() == pytest.approx([softplus(offset - 0.3)], rel=1e-14)
    assert loss.needs.gaps
