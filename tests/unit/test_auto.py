"""Rules of `auto`: by hand."""

import pytest

from isopref.build import auto

GIB = 2.0**30


@pytest.mark.parametrize(("weights", "sharded", "expected"), [(65, True, True), (64, True, False), (65, False, False)])
def test_a_model_comes_whole_or_from_the_host(weights: int, sharded: bool, expected: bool) -> None:
    """64 of 80 GiB is the most that a device takes whole; what is not sharded can come in no other way."""
    assert auto.from_host(weights * GIB, 80 * GIB, sharded=sharded) is expected
