"""A rank that runs out of memory: the step is done again in smaller microbatches, with the same gradient."""

from pathlib import Path

import pytest

from isopref.testing import faults
from isopref.testing.ranks import Ranks

WARNING = (
    "warning: a step ran out of memory with microbatches of 60 tokens and is done again: from here on it is "
    "microbatches of {} tokens. The result does not depend on it."
)


@pytest.mark.parametrize("microbatch", [0, 1])
def test_one_rank(tmp_path: Path, microbatch: int) -> None:
    cut = faults.out_of_memory("single", 0, microbatch, str(tmp_path))
    assert cut.gradient_error <= 1e-6  # float32
    assert 30 <= cut.tokens < 60
    assert cut.said == [WARNING.format(cut.tokens)]


def test_two_ranks_shrink_together(two_ranks: Ranks, tmp_path: Path) -> None:
    """Rank 1 fails in its first microbatch; rank 0 has done all but its last when it learns of that."""
    cuts = two_ranks(faults.out_of_memory, "ddp", 1, 0, str(tmp_path))
    assert [cut.tokens for cut in cuts] == [30, 30]
    for cut in cuts:
        assert cut.gradient_error <= 1e-6
        assert cut.said == [WARNING.format(cut.tokens)]
