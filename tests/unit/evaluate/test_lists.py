"""Figures of ranked lists by hand, and how certain they are."""

import math

import numpy as np
import pytest

from isopref.evaluate import Evaluation, evaluate
from isopref.evaluate.intervals import share
from isopref.evaluate.lists import kendall_tau, lists_of, ndcg, top1
from isopref.examples import Example, Lengths
from isopref.objectives.loss import pair_loss
from isopref.score import TableLogps
from isopref.types import FloatArray

# Discounts of the first three ranks: 1 / log2(2), 1 / log2(3), 1 / log2(4).
D1, D2, D3 = 1.0, 1 / math.log2(3), 0.5


def array(*values: float) -> FloatArray:
    return np.array(values, np.float64)


@pytest.mark.parametrize(
    ("reward", "score", "first", "tau", "gain"),
    [
        # The order of the scores: 3, 2, 1. Gains are 2, 1 and 0.
        ((0.3, 0.1, -5.0), (3, 2, 1), 1.0, 1.0, 1.0),
        # The reverse: nothing, 1 and 2 from the top.
        ((-1.0, 0.0, 1.0), (3, 2, 1), 0.0, -1.0, (D2 + 2 * D3) / (2 * D1 + D2)),
        # The worst on top: of three pairs two are wrong.
        ((0.2, 0.1, 0.3), (3, 2, 1), 0.0, -1 / 3, (2 * D2 + D3) / (2 * D1 + D2)),
        # All rewards equal: every order is as likely.
        ((0.0, 0.0, 0.0), (3, 2, 1), 1 / 3, 0.0, (D1 + D2 + D3) / (2 * D1 + D2)),
        # Two on top share the first two ranks; of the pairs one is right, one tied, one right.
        ((1.0, 1.0, 0.0), (3, 2, 1), 1 / 2, 2 / 3, (3 * (D1 + D2) / 2) / (2 * D1 + D2)),
        # Two best answers, which are not compared: the other two pairs are right. Gains are 1, 1 and 0.
        ((0.5, 0.2, 0.1), (7, 7, 6), 1.0, 1.0, 1.0),
        # The same with the worst one in the middle: one pair right, one wrong.
        ((0.5, 0.1, 0.2), (7, 7, 6), 1.0, 0.0, (D1 + D3) / (D1 + D2)),
    ],
)
def test_figures_by_hand(
    reward: tuple[float, ...], score: tuple[float, ...], first: float, tau: float, gain: float
) -> None:
    given = array(*reward), array(*score)
    assert top1(*given) == pytest.approx(first)
    assert kendall_tau(*given) == pytest.approx(tau)
    assert ndcg(*given) == pytest.approx(gain)
    for scaled in (array(*score) * 10 - 3, array(*score) / 7):  # the scale of scores does not matter
        assert ndcg(given[0], scaled) == pytest.approx(gain)


def test_kendalls_tau_is_scipys_without_ties() -> None:
    stats = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(0)
    for size in (2, 3, 5, 9):
        reward, score = rng.normal(size=(2, size))
        assert kendall_tau(reward, score) == pytest.approx(stats.kendalltau(reward, score).statistic)


def lists(*scores: tuple[float, ...]) -> tuple[Lengths, FloatArray]:
    """Lists with these scores, the first of which is compared with each other one."""
    examples = [
        Example(np.arange(2), tuple(np.arange(3) for _ in of), tuple((0, k) for k in range(1, len(of))), of)
        for of in scores
    ]
    return Lengths.of(examples), np.array([score for of in scores for score in of], np.float64)


def figures(gain: FloatArray, lengths: Lengths, scores: FloatArray, sources: list[int] | None = None) -> Evaluation:
    """Of a policy that likes each answer so much more than a reference does."""
    return evaluate(
        *(TableLogps(gain - 50), TableLogps(np.full(len(gain), -50.0)), lengths, np.ones(len(lengths))),
        loss=pair_loss("sigmoid", beta=0.1),
        weighting="example",
        scores=scores,
        sources=None if sources is None else np.array(sources),
        source_names=("a.jsonl", "b.jsonl"),
    )


def test_an_evaluation_of_lists() -> None:
    lengths, scores = lists((3, 2, 1), (9, 1), (4, 2, 0))
    found = figures(array(3, 2, 1, 0, 5, 1, 2, 3), lengths, scores, [0, 0, 1])
    assert found.pairs == 5
    assert found.top1_accuracy is not None
    assert found.kendall_tau is not None
    assert found.ndcg is not None
    assert found.top1_accuracy.value == pytest.approx(1 / 3)
    assert found.kendall_tau.value == pytest.approx((1 - 1 - 1) / 3)
    assert found.ndcg.value == pytest.approx((1 + D2 + (D2 + 2 * D3) / (2 * D1 + D2)) / 3)
    assert found.by_source["a"].top1_accuracy is not None
    assert found.by_source["a"].top1_accuracy.value == 1 / 2
    assert {"eval/kendall_tau", "eval/ndcg_low", "eval/top1_accuracy_high", "eval/b/ndcg"} <= set(found.as_metrics())


def test_pairs_have_no_figures_of_lists() -> None:
    lengths, scores = lists((1, 0), (1, 0))
    found = figures(array(1, 0, 0, 1), lengths, scores)
    assert not {"top1_accuracy", "kendall_tau", "ndcg"} & {*found.figures(), *found.as_json()}


def test_lists_that_say_nothing_are_left_out() -> None:
    lengths, scores = lists((2, 2, 2), (math.nan,) * 3, (3, 2, 1))
    assert lists_of(array(*range(9)), scores, lengths).example.tolist() == [2]
    only, equal = lists((2, 2, 2))
    assert lists_of(array(1, 2, 3), equal, only).figures() == {}


# --- comparisons of a list are not independent -----------------------------------------------------------


def test_comparisons_that_are_won_together_count_as_one() -> None:
    """Twenty lists of five comparisons, all won or all lost: as certain as twenty pairs, not as a hundred."""
    won, example = np.repeat(array(*([1.0] * 14), *([0.0] * 6)), 5), np.repeat(np.arange(20), 5)
    clustered, alone, naive = share(won, example), share(won[::5]), share(won)
    assert (clustered.low, clustered.high) == pytest.approx((alone.low, alone.high))
    assert clustered.high - clustered.low > 1.9 * (naive.high - naive.low)


def test_independent_comparisons_count_each() -> None:
    won = (np.random.default_rng(0).random(2000) < 0.7).astype(np.float64)
    clustered, naive = share(won, np.repeat(np.arange(500), 4)), share(won)
    assert clustered.high - clustered.low == pytest.approx(naive.high - naive.low, rel=0.05)
    assert share(won, np.arange(2000)) == naive  # pairs


def test_intervals_of_lists_hold_the_truth_about_95_times_in_100() -> None:
    """The comparisons of a list are won with a probability that is the list's own."""
    rng = np.random.default_rng(1)
    inside = 0
    for _ in range(200):
        chance = np.repeat(rng.beta(1.4, 0.6, size=60), 6)  # 0.7 on the mean
        found = share((rng.random(360) < chance).astype(np.float64), np.repeat(np.arange(60), 6))
        inside += found.low <= 0.7 <= found.high
    assert 180 <= inside <= 199  # 190 -+ 3 deviations of a binomial
