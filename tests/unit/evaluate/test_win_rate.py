"""Win rates: counts by hand, and what is left of a win rate that length alone explains."""

import numpy as np
import pytest

from isopref.evaluate.win_rate import win_rate


def test_counts_by_hand() -> None:
    found = win_rate(np.array([1, 1, 0.5, 0.0]), np.array([5.0, 5, 5, 5]), np.array([5.0, 5, 5, 5]))
    assert (found.wins, found.ties, found.losses, found.prompts) == (2, 1, 1, 4)
    assert found.win_rate.value == 0.625
    # Without a difference in length nothing is to be controlled; the ridge moves it a little.
    assert found.length_controlled.value == pytest.approx(0.625, abs=2e-3)
    assert found.win_rate.low < 0.625 < found.win_rate.high


def test_length_alone_is_worth_half() -> None:
    """A judge that prefers the longer answer most of the time, and a model that is usually longer."""
    rng = np.random.default_rng(0)
    longer = rng.normal(40, 30, 1200)
    chance = 1 / (1 + np.exp(-3 * np.tanh(longer / longer.std())))
    won = (rng.random(1200) < chance).astype(float)
    found = win_rate(won, 100 + longer, np.full(1200, 100.0))
    assert found.win_rate.value > 0.75
    assert found.length_controlled.value == pytest.approx(0.5, abs=0.08)
    assert found.length_controlled.low < 0.5 < found.length_controlled.high


def test_quality_is_kept() -> None:
    """Logit = 1 whatever the lengths: sigmoid(1) = 0.731."""
    rng = np.random.default_rng(1)
    won = (rng.random(1200) < 1 / (1 + np.exp(-1.0))).astype(float)
    found = win_rate(won, rng.normal(100, 30, 1200), rng.normal(60, 30, 1200))
    assert found.length_controlled.value == pytest.approx(0.731, abs=0.1)


def test_winning_everything_stays_finite() -> None:
    found = win_rate(np.ones(12), np.arange(12.0), np.zeros(12))
    assert 0.9 < found.length_controlled.value <= 1
    assert np.isfinite(found.length_controlled.low)


def test_five_wins_of_five_are_no_certainty() -> None:
    """Every resample of them is five wins again; Wilson's interval of 5 of 5 begins at 5 / (5 + 1.96^2) = 0.566."""
    found = win_rate(np.ones(5), np.array([3.0, 5, 4, 6, 5]), np.array([4.0, 4, 4, 6, 6]))
    assert found.win_rate.low == pytest.approx(0.5655, abs=1e-4)
    assert found.length_controlled.low < 0.6
    assert found.length_controlled.high > found.length_controlled.value
