"""Figures of labelled answers, by hand."""

import math

import numpy as np
import pytest

from isopref.evaluate import evaluate
from isopref.evaluate.labels import auc, bins, calibration_error
from isopref.examples import Example, Lengths
from isopref.objectives.loss import pair_loss
from isopref.score import TableLogps

GOOD = np.array([True, False, True, False])
EACH = np.arange(4)


def test_auc_by_hand() -> None:
    found = auc(np.array([2.0, 1.0, 1.0, 0.0]), GOOD, EACH)
    assert found is not None
    assert found.value == (1 + 1 + 0.5 + 1) / 4  # four pairs of a good and a bad answer, one of them a tie
    # What each answer beats: 1, 3/4, 3/4, 1, around 7/8, each over two: a variance of 4 (1/16)^2.
    assert found.high - found.low == pytest.approx(1 - (7 / 8 - 1.959963984540054 / 8))
    assert auc(np.zeros(2), np.array([True, True]), np.arange(2)) is None


def test_calibration_by_hand() -> None:
    reward = np.log(np.array([9.0, 9.0, 1 / 9, 1.0]))  # which promise 0.9, 0.9, 0.1 and 0.5
    good = np.array([True, False, False, False])
    assert calibration_error(reward, good, EACH).value == pytest.approx((2 * 0.4 + 0.1 + 0.5) / 4)
    low, middle, high = bins(reward, good, EACH)
    assert (low.answers, middle.answers, high.answers) == (1, 1, 2)
    assert (high.low, high.high, high.promised, high.good.value) == pytest.approx((0.8, 1.0, 0.9, 0.5))


@pytest.mark.parametrize("loss", ["kto", "bco"])
def test_a_table_of_labelled_answers_alone(loss: str) -> None:
    """Gains 2 and 0 of a good and a bad answer, 1 of mismatched pairs: KTO's term is 1, and BCO's shift is too."""
    examples = [Example(np.array([3]), (np.array([4, 5]),), (), (score,)) for score in (1.0, 0.0)]
    policy = TableLogps(np.array([-1.0, -3.0]), mismatched=np.array([-2.0, -2.0]))
    ref = TableLogps(np.array([-3.0, -3.0]), mismatched=np.array([-2.5, -3.5]))
    beta = math.log(3)
    found = evaluate(
        *(policy, ref, Lengths.of(examples), np.ones(2)),
        loss=pair_loss(loss, beta=beta),
        weighting="example",
        scores=np.array([1.0, 0.0]),
    )
    assert found.loss.value == pytest.approx({"kto": 1 / 4, "bco": -math.log(3 / 4)}[loss])
    assert (found.pairs, found.answers, found.accuracy) == (0, 2, None)
    assert found.auc is not None
    assert found.reward_good is not None
    assert found.reward_bad is not None
    values = found.auc.value, found.reward_good.value, found.reward_bad.value
    assert values == pytest.approx((1.0, 2 * beta, 0.0))
    assert all(math.isfinite(value) for value in found.as_metrics().values())


def test_the_likelihood_of_good_answers_is_a_mean_over_their_trained_tokens() -> None:
    """As in training: 6 and 3 nats over two and one trained tokens, whatever context stands between them."""
    answers = [np.array([4, 5, 6, 7]), np.array([4]), np.array([8, 9])]
    weights = [np.array([1.0, 0.0, 0.0, 1.0]), np.ones(1), np.array([0.0, 1.0])]
    examples = [
        Example(np.array([3]), (answer,), (), (score,), weights=(own,))
        for answer, own, score in zip(answers, weights, (1.0, 1.0, 0.0), strict=True)
    ]
    policy = TableLogps(np.array([-6.0, -3.0, -1.0]))
    alone, with_likelihood = (
        evaluate(
            *(policy, policy, Lengths.of(examples), np.ones(3)),
            loss=pair_loss("bco", nll_weight=nll_weight),
            weighting="example",
            scores=np.array([1.0, 1.0, 0.0]),
        ).loss.value
        for nll_weight in (0.0, 0.5)
    )
    assert with_likelihood - alone == pytest.approx(0.5 * (6 + 3) / 3)
