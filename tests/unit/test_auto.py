"""Rules of `auto`: by hand."""

from pathlib import Path

import pytest
import torch

from isopref.build import auto
from isopref.build.run import Run
from isopref.config.schema import Config
from isopref.engine.display import Display
from isopref.engine.environment import Environment

GIB = 2.0**30


@pytest.mark.parametrize(("weights", "sharded", "expected"), [(65, True, True), (64, True, False), (65, False, False)])
def test_a_model_comes_whole_or_from_the_host(weights: int, sharded: bool, expected: bool) -> None:
    """64 of 80 GiB is the most that a device takes whole; what is not sharded can come in no other way."""
    assert auto.from_host(weights * GIB, 80 * GIB, sharded=sharded) is expected


@pytest.mark.parametrize(
    ("layout", "fitted", "expected"),
    [
        ({}, None, 16384),
        ({}, 3000, 9030),  # twice what was fitted to the training pairs holds no held-out pair of 9030
        ({}, 8000, 16000),
        ({"microbatch_tokens": 3000}, 3000, 6000),
        ({"score_tokens": 500}, 3000, 500),
    ],
)
def test_tokens_that_are_scored_at_once(layout: dict[str, int], fitted: int | None, expected: int) -> None:
    config = Config.model_validate({"model": {"path": "m"}, "data": {"train": "d"}, "layout": layout})
    env, display = Environment(0, 1, torch.device("cpu")), Display(quiet=True)
    run = Run(config, Path("run"), env, display, longest=9030, microbatch_tokens=fitted)
    assert run.score_budget.tokens == expected
