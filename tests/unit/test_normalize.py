"""Weights and coefficients by their definition, and one example whose answer no cut may change."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isopref.examples import Example, Lengths, PairTokens
from isopref.normalize import (
    Weighting,
    coefficients,
    comparison_weights,
    share_of_loss,
    token_coefficients,
    token_weight,
)
from isopref.testing import oracle

WEIGHTINGS: tuple[Weighting, ...] = ("token", "completion", "example")

# DESIGN.md's example: pairs of 100, 900, 100, 900 tokens (the prompt counted twice) with losses 1, 2, 3, 4.
LENGTHS = Lengths.of_pairs(np.array([[10, 40, 40], [100, 300, 400], [10, 30, 50], [100, 350, 350]]))
LOSSES = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
EXPECTED: dict[Weighting, float] = {
    "token": (1 * 100 + 2 * 900 + 3 * 100 + 4 * 900) / 2000,  # 2.9
    "completion": (1 * 80 + 2 * 700 + 3 * 80 + 4 * 700) / 1560,
    "example": 2.5,
}


def partitions(items: list[int]) -> Iterator[list[list[int]]]:
    """Every way to cut items into microbatches."""
    if not items:
        yield []
        return
    for rest in partitions(items[1:]):
        yield [[items[0]], *rest]
        for n in range(len(rest)):
            yield [*rest[:n], [items[0], *rest[n]], *rest[n + 1 :]]


@pytest.mark.parametrize(
    ("weighting", "expected"),
    [("token", [24.0, 7.0]), ("completion", [14.0, 5.0]), ("example", [1.0, 1.0])],
)
def test_weights_by_hand(weighting: Weighting, expected: list[float]) -> None:
    lengths = Lengths.of_pairs(np.array([[5, 6, 8], [1, 2, 3]]))
    assert comparison_weights(lengths, weighting, np.ones(2)).tolist() == expected
    own = np.array([0.5, 3.0])
    assert comparison_weights(lengths, weighting, own).tolist() == [0.5 * expected[0], 3.0 * expected[1]]


def test_weights_by_the_gap_between_scores() -> None:
    lengths = Lengths.of_pairs(np.array([[5, 6, 8], [1, 2, 3]]))
    assert comparison_weights(lengths, "gap", np.array([0.5, 3.0]), np.array([1.5, 4.0])).tolist() == [0.75, 12.0]


def test_comparisons_of_an_example_share_it() -> None:
    """A prompt of 5 tokens with answers of 1, 2 and 4, all compared; and a pair of 1, 2 and 3."""
    three = Example(np.arange(5), (np.arange(1), np.arange(2), np.arange(4)), ((0, 1), (0, 2), (1, 2)))
    lengths = Lengths.of([three, PairTokens(np.arange(1), np.arange(2), np.arange(3)).example])
    own = np.array([3.0, 2.0])
    assert comparison_weights(lengths, "token", own).tolist() == [39.0, 45.0, 48.0, 14.0]
    assert comparison_weights(lengths, "completion", own).tolist() == [9.0, 15.0, 18.0, 10.0]
    assert comparison_weights(lengths, "example", own).tolist() == [1.0, 1.0, 1.0, 2.0]


@settings(deadline=None)
@given(
    lengths=st.lists(st.tuples(*[st.integers(1, 9)] * 3), min_size=1, max_size=8),
    weighting=st.sampled_from(WEIGHTINGS),
    seed=st.integers(0, 99),
)
def test_weights_and_their_sum_are_the_oracles(
    lengths: list[tuple[int, int, int]], weighting: Weighting, seed: int
) -> None:
    own = np.random.default_rng(seed).uniform(0.1, 5, len(lengths))
    weights = comparison_weights(Lengths.of_pairs(np.array(lengths)), weighting, own)
    pairs = [PairTokens(*(np.zeros(n, np.int64) for n in pair)) for pair in lengths]
    np.testing.assert_allclose(weights, oracle.weights(pairs, weighting, own.tolist()), rtol=1e-15)
    assert coefficients(weights).sum() == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize(
    "dtype",
    [
        np.int32,
        np.uint16,
        np.int16,
    ],
)
def test_narrow_integers_do_not_overflow(dtype: type[np.integer[Any]]) -> None:
    lengths = Lengths.of_pairs(np.array([[30000, 30000, 30000]], dtype=dtype))
    assert comparison_weights(lengths, "token", np.ones(1)).tolist() == [120000.0]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_no_cut_changes_the_loss(weighting: Weighting, num_ranks: int) -> None:
    """Microbatches of any four pairs, dealt to ranks whose losses are then averaged, as DDP and FSDP do."""
    share = torch.from_numpy(coefficients(comparison_weights(LENGTHS, weighting, np.ones(4))))
    cuts = list(partitions([0, 1, 2, 3]))
    assert len(cuts) == 15  # Bell's number of 4
    for cut in cuts:
        ranks = [cut[rank::num_ranks] for rank in range(num_ranks)]
        losses = [sum(float(share_of_loss(LOSSES[m], share[m], num_ranks=num_ranks)) for m in rank) for rank in ranks]
        assert sum(losses) / num_ranks == pytest.approx(EXPECTED[weighting], rel=1e-14), cut


def test_a_part_of_the_batch_is_weighed_against_the_whole() -> None:
    assert coefficients(np.array([1.0, 2.0]), total=12.0).tolist() == pytest.approx([1 / 12, 2 / 12])


@pytest.mark.parametrize("weights", [[0.0, 0.0], [1.0, -1.0], [float("nan"), 1.0], []])
def test_a_batch_that_weighs_nothing_is_an_error(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="positive sum"):
        coefficients(np.array(weights))


def test_an_empty_microbatch_adds_zero_and_keeps_a_gradient_path() -> None:
    loss = torch.ones(3, requires_grad=True)
    share = share_of_loss(loss[:0], torch.zeros(0, dtype=torch.float64), num_ranks=4)
    share.backward()
    assert share.item() == 0.0
    assert loss.grad is not None
    assert loss.grad.tolist() == [0.0, 0.0, 0.0]


def test_a_mean_over_tokens_by_hand() -> None:
    """Chosen answers of 40, 300, 30, 350 tokens; sums of -1, -2, -3, -4 nats; the second pair counts double."""
    own, tokens = np.array([1.0, 2.0, 1.0, 1.0]), LENGTHS.compared_tokens[0]
    share = token_coefficients(own, tokens)
    assert float(share @ np.array([1.0, 2.0, 3.0, 4.0])) == pytest.approx((1 + 2 * 2 + 3 + 4) / (40 + 600 + 30 + 350))
    parts = [token_coefficients(own[some], tokens[some], total=token_weight(own, tokens)) for some in ([0, 2], [1, 3])]
    np.testing.assert_allclose(np.concatenate(parts), share[[0, 2, 1, 3]], rtol=1e-15)
