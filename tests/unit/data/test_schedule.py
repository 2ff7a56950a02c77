"""The schedule: every pair once an epoch, in an order that seed and epoch alone decide and that never changes."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isopref.data.schedule import batch, epoch_order, num_batches

seeds = st.integers(0, 2**40)


@settings(deadline=None)
@given(num_pairs=st.integers(1, 300), batch_pairs=st.integers(1, 50), seed=seeds, epoch=st.integers(1, 9))
def test_batches_hold_every_pair_once_and_only_the_last_is_short(
    num_pairs: int, batch_pairs: int, seed: int, epoch: int
) -> None:
    order = epoch_order(num_pairs, seed=seed, epoch=epoch)
    batches = [batch(order, batch_pairs, n).tolist() for n in range(num_batches(num_pairs, batch_pairs))]
    assert sorted(pair for one in batches for pair in one) == list(range(num_pairs))
    assert all(len(one) == batch_pairs for one in batches[:-1])
    assert len(batches[-1]) == (num_pairs % batch_pairs or batch_pairs)


@pytest.mark.parametrize(
    ("num_pairs", "batch_pairs", "expected"), [(1, 1, 1), (8, 4, 2), (9, 4, 3), (11, 4, 3), (3, 4, 1), (0, 4, 0)]
)
def test_num_batches_counts_the_short_last_one(num_pairs: int, batch_pairs: int, expected: int) -> None:
    assert num_batches(num_pairs, batch_pairs) == expected


def test_seeds_and_epochs_give_different_orders() -> None:
    orders = {tuple(epoch_order(50, seed=seed, epoch=epoch)) for seed in range(8) for epoch in range(1, 9)}
    assert len(orders) == 64


def test_the_order_is_a_function_of_its_arguments_alone() -> None:
    first = epoch_order(50, seed=3, epoch=2)
    np.random.seed(1)
    np.random.permutation(7)
    np.testing.assert_array_equal(first, epoch_order(50, seed=3, epoch=2))


@pytest.mark.parametrize(
    ("num_pairs", "seed", "epoch", "order"),
    [
        (12, 7, 1, [9, 6, 8, 10, 3, 11, 7, 0, 5, 4, 1, 2]),
        (12, 7, 2, [11, 10, 0, 6, 3, 7, 1, 4, 9, 5, 8, 2]),
        (12, 8, 1, [0, 9, 5, 10, 6, 7, 8, 11, 3, 4, 1, 2]),
        (5, 0, 1, [1, 0, 3, 4, 2]),
    ],
)
def test_the_order_is_frozen(num_pairs: int, seed: int, epoch: int, order: list[int]) -> None:
    """Literal values on purpose: a run resumed with a later version must go on in the order it began with."""
    assert epoch_order(num_pairs, seed=seed, epoch=epoch).tolist() == order


def test_the_schedule_needs_no_torch() -> None:
    code = "import sys, isopref.data.schedule, isopref.data.packing; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
