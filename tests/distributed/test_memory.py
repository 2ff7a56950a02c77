"""A rank that runs out of memory: the step is done again in smaller microbatches, with the same gradient."""

import json
from functools import partial
from pathlib import Path

import pytest

from isopref.batch.packing import Budget
from isopref.testing.ranks import RankError, Ranks
from support import faults

WARNING = (
    "warning: a step ran out of memory with microbatches of {} tokens. Retrying it with "
    "microbatches of {} tokens, also used from here on. The result does not change."
)


@pytest.mark.parametrize("budget", [faults.SMALL, Budget("padded", 120)])
@pytest.mark.parametrize("microbatch", [0, 1])
def test_one_rank(tmp_path: Path, microbatch: int, budget: Budget) -> None:
    cut = faults.out_of_memory("single", 0, microbatch, str(tmp_path), budget=budget)
    assert cut.gradient_error <= 1e-6  # float32
    assert budget.tokens // 2 <= cut.tokens < budget.tokens
    assert cut.said == [WARNING.format(budget.tokens, cut.tokens)]
    logged, done = cut.padding
    assert logged == done
    assert (done > 0) == (budget.kind == "padded")


def test_two_ranks_shrink_together(two_ranks: Ranks, tmp_path: Path) -> None:
    """Rank 1 fails in its first microbatch; rank 0 has done all but its last when it learns of that."""
    cuts = two_ranks(faults.out_of_memory, "ddp", 1, 0, str(tmp_path))
    assert [cut.tokens for cut in cuts] == [30, 30]
    for cut in cuts:
        assert cut.gradient_error <= 1e-6
        assert cut.said == [WARNING.format(60, cut.tokens)]


def test_where_ranks_have_met_the_run_starts_again(two_ranks: Ranks, tmp_path: Path) -> None:
    """DDP that reduces gradients after every microbatch: others may wait there for a rank that fails."""
    with pytest.raises(RankError, match=r"StartAgainError: out of memory with microbatches of 60 tokens, at a point"):
        two_ranks(partial(faults.out_of_memory, meets=True), "ddp", None, 1, str(tmp_path))
    assert json.loads((tmp_path / "microbatch.json").read_text())["fits"]["tokens"] == 30
