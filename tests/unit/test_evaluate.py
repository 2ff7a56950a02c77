"""Evaluation figures worked out by hand."""

import math
from functools import partial

import numpy as np
import pytest

from isopref.evaluate import Evaluation, evaluate
from isopref.losses import sigmoid
from isopref.normalize import Weighting
from isopref.score import TableLogps

# Four pairs. Margins are +2, -1, 0 and +3.
POLICY = TableLogps(np.array([-4.0, -6.0, -5.0, -1.0]), np.array([-6.0, -2.0, -9.0, -1.0]))
REF = TableLogps(np.array([-5.0, -6.0, -4.0, -3.0]), np.array([-5.0, -3.0, -8.0, 0.0]))
LENGTHS = np.array([[3, 4, 4], [1, 3, 1], [10, 2, 6], [5, 2, 2]])
BETA = 0.5


def nll(logit: float) -> float:
    return math.log1p(math.exp(-logit))


LOSSES = [nll(1.0), nll(-0.5), math.log(2), nll(1.5)]
WEIGHTS: dict[Weighting, list[float]] = {"token": [14, 6, 28, 14], "completion": [8, 4, 8, 4], "pair": [1, 1, 1, 1]}


def figures(weighting: Weighting, own: list[float] | None = None) -> Evaluation:
    weights = np.ones(4) if own is None else np.array(own)
    return evaluate(POLICY, REF, LENGTHS, weights, loss=partial(sigmoid, beta=BETA), beta=BETA, weighting=weighting)


@pytest.mark.parametrize("weighting", sorted(WEIGHTS))
@pytest.mark.parametrize("own", [[1.0, 1.0, 1.0, 1.0], [2.0, 0.5, 1.0, 0.0]])
def test_the_loss_has_the_objectives_weighting(weighting: Weighting, own: list[float]) -> None:
    weights = [w * o for w, o in zip(WEIGHTS[weighting], own, strict=True)]
    expected = sum(w * loss for w, loss in zip(weights, LOSSES, strict=True)) / sum(weights)
    assert figures(weighting, own).loss == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("weighting", sorted(WEIGHTS))
def test_all_other_figures_count_each_pair_once(weighting: Weighting) -> None:
    found = figures(weighting, [5.0, 1.0, 1.0, 1.0])
    assert found.pairs == 4
    assert found.accuracy == (1 + 0 + 0.5 + 1) / 4
    assert found.reward_margin == pytest.approx(BETA * (2 - 1 + 0 + 3) / 4)
    # Per token: -1 > -1.5; -2 = -2; -2.5 < -1.5; -0.5 = -0.5.
    assert found.logp_accuracy == (1 + 0.5 + 0 + 0.5) / 4


def test_metrics_have_one_prefix_and_no_count() -> None:
    names = {"eval/accuracy", "eval/reward_margin", "eval/loss", "eval/logp_accuracy"}
    assert set(figures("pair").as_metrics()) == names


def test_policy_and_reference_alike_are_a_tie_everywhere() -> None:
    found = evaluate(
        POLICY, POLICY, LENGTHS, np.ones(4), loss=partial(sigmoid, beta=BETA), beta=BETA, weighting="token"
    )
    assert (found.accuracy, found.reward_margin) == (0.5, 0.0)
    assert found.loss == pytest.approx(math.log(2))
