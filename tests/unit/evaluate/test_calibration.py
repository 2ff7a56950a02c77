"""Expected calibration error, by hand."""

import math

import numpy as np
import pytest

from isopref.evaluate.calibration import calibration_error


def logit(p: float) -> float:
    return math.log(p / (1 - p))


def test_a_model_that_is_right_as_often_as_it_says() -> None:
    """Of ten pairs at a confidence of 0.7, it has seven right."""
    margin = np.array([logit(0.7)] * 7 + [-logit(0.7)] * 3)
    found = calibration_error(margin, (margin > 0).astype(float), np.arange(len(margin)))
    assert found.value == pytest.approx(0, abs=1e-12)
    assert found.high > 0.1


def test_a_model_that_is_too_sure() -> None:
    """At 0.9 it has five of ten right, at 0.6 six of ten: half of the pairs are off by 0.4."""
    sure = np.array([logit(0.9)] * 5 + [-logit(0.9)] * 5)
    unsure = np.array([logit(0.6)] * 6 + [-logit(0.6)] * 4)
    margin = np.concatenate([sure, unsure])
    assert calibration_error(margin, (margin > 0).astype(float), np.arange(len(margin))).value == pytest.approx(
        0.2, abs=1e-12
    )


@pytest.mark.parametrize("seed", range(8))
def test_the_interval_holds_its_figure(seed: int) -> None:
    """Resampling adds noise to every bin, and the error is a sum of absolute values: resamples alone are too high."""
    rng = np.random.default_rng(seed)
    margin = rng.normal(0.1, 0.2, 40)
    found = calibration_error(margin, (margin > 0).astype(float), np.arange(40))
    assert 0 <= found.low <= found.value <= found.high
