"""Mixes and splits: reproducible, without a pair twice, and without a prompt on both sides."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isopref.data.mixing import mix, split_by_prompt, without
from isopref.data.pairs import ExampleTable, SourceSpec
from isopref.errors import ConfigError, DataError
from isopref.examples import PairTokens


def specs(*, counts: list[int | None] | None = None, weights: list[float | None] | None = None) -> list[SourceSpec]:
    size = len(counts or weights or [])
    return [
        SourceSpec(f"s{i}", count=(counts or [None] * size)[i], weight=(weights or [None] * size)[i])
        for i in range(size)
    ]


def table_of(prompts: list[int], *, seed: int = 0) -> ExampleTable:
    rng = np.random.default_rng(seed)
    return ExampleTable.from_tokens(
        [PairTokens(np.array([prompt, 1]), rng.integers(0, 9, 5), rng.integers(0, 9, 6)) for prompt in prompts]
    )


@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=4), data=st.data(), seed=st.integers(-(2**70), 2**70))
def test_counts_take_that_many_of_each_source(sizes: list[int], data: st.DataObject, seed: int) -> None:
    counts = [data.draw(st.none() | st.integers(1, size)) for size in sizes]
    indices = mix(sizes, specs(counts=counts), seed)
    assert np.all(np.diff(indices) > 0), "ascending, so no pair comes twice"
    borders = np.cumsum([0, *sizes])
    for start, stop, size, count in zip(borders, borders[1:], sizes, counts, strict=False):
        assert np.sum((indices >= start) & (indices < stop)) == (size if count is None else count)
    assert indices.tolist() == mix(sizes, specs(counts=counts), seed).tolist()


def test_weights_give_the_largest_mix_without_repetition() -> None:
    def taken(sizes: list[int], weights: list[float | None]) -> list[int]:
        indices = mix(sizes, specs(weights=weights), 0)
        return [int(count) for count in np.histogram(indices, bins=np.cumsum([0, *sizes]) - 0.5)[0]]

    assert taken([100, 100], [1, 1]) == [100, 100]
    assert taken([100, 100], [3, 1]) == [100, 33]
    assert taken([3, 3], [0.9, 0.3]) == [3, 1]  # not 0, as in floats
    assert taken([9, 100], [0.1, 0.7]) == [9, 63]  # not 62
    assert taken([100, 10, 1000], [2, 1, 7]) == [20, 10, 70]


def test_a_larger_share_contains_a_smaller_one_and_the_seed_decides_which() -> None:
    few, many = (set(mix([1000], specs(counts=[count]), 7).tolist()) for count in (100, 300))
    assert few < many
    other = set(mix([1000], specs(counts=[100]), 8).tolist())
    assert len(few & other) < 30  # 10 expected of two independent draws
    halves = np.array(mix([1000, 1000], specs(counts=[500, 500]), 7))
    same = set(halves[halves < 1000].tolist()) & set((halves[halves >= 1000] - 1000).tolist())
    assert 150 < len(same) < 350  # 250 expected: sources draw independently
    assert 400 < np.mean(sorted(many)) < 600


def test_the_draw_is_the_same_on_every_machine_and_version() -> None:
    def splitmix(value: int) -> int:  # Steele, Lea, Flood 2014, in Python's own integers
        value = (value + 0x9E3779B97F4A7C15) % 2**64
        value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
        return value ^ (value >> 31)

    def key(index: int) -> int:
        return splitmix(splitmix(index) ^ splitmix(splitmix(42)))

    expected = sorted(sorted(range(50), key=key)[:10])
    assert mix([50], specs(counts=[10]), 42).tolist() == expected


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([SourceSpec("s", count=4)], "count must be 1 to 3, the number of its pairs; found 4"),
        ([SourceSpec("s", count=0)], "count must be 1 to 3, the number of its pairs; found 0"),
        ([SourceSpec("s", weight=0.0)], "positive number; found 0.0"),
        ([SourceSpec("s", weight=float("nan"))], "positive number; found nan"),
        ([SourceSpec("s", weight=1.0, count=1)], "both weight and count"),
        ([SourceSpec("s", weight=1.0), SourceSpec("t")], "some have none"),
        ([SourceSpec("s", weight=9.0), SourceSpec("t", weight=1.0)], "'t': weight 1.0 selects no pair"),
    ],
)
def test_a_mix_that_cannot_be_is_refused(bad: list[SourceSpec], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        mix([3] * len(bad), bad, 0)


@settings(deadline=None, max_examples=50)
@given(
    prompts=st.lists(st.integers(0, 30), min_size=20, max_size=80),
    fraction=st.floats(0.2, 0.8),
    seed=st.integers(0, 5),
    order=st.randoms(use_true_random=False),
)
def test_no_prompt_is_on_both_sides_whatever_the_order(
    prompts: list[int], fraction: float, seed: int, order: object
) -> None:
    table = table_of(prompts)
    try:
        train, held_out = split_by_prompt(table, fraction, seed)
    except DataError:
        return
    assert sorted([*train, *held_out]) == list(range(len(prompts)))
    assert {prompts[i] for i in train}.isdisjoint(prompts[i] for i in held_out)
    shuffled = list(range(len(prompts)))
    order.shuffle(shuffled)  # type: ignore[attr-defined]
    view = table.select(shuffled)
    again, _ = split_by_prompt(view, fraction, seed)
    assert {shuffled[i] for i in again} == set(train.tolist())


def test_the_split_has_about_the_share_asked_for_and_stays_when_data_is_added() -> None:
    table = table_of(list(range(4000)))
    train, held_out = split_by_prompt(table, 0.1, 0)
    assert 320 < len(held_out) < 480
    small_train, small_held_out = split_by_prompt(table.select(range(1000)), 0.1, 0)
    assert set(small_held_out.tolist()) <= set(held_out.tolist())
    assert set(small_train.tolist()) <= set(train.tolist())
    _, other = split_by_prompt(table, 0.1, 1)
    assert len(set(held_out.tolist()) & set(other.tolist())) < 80  # 40 expected


def test_pairs_made_equal_by_truncation_stay_on_one_side(monkeypatch: pytest.MonkeyPatch) -> None:
    same = PairTokens(np.array([1]), np.array([2]), np.array([3]))
    table = ExampleTable.from_tokens([same] * 200)
    # As after keep_end: different prompts, of which max_length left the same tokens.
    table.__dict__["question_ids"] = np.arange(200, dtype=np.uint64)
    with pytest.raises(DataError, match="leaves 200 to train on and 0"):
        split_by_prompt(table, 0.5, 0)


def test_prompts_that_truncation_joined_take_all_they_touch_along() -> None:
    """A chain: question 0 is cut to prompt 1 once, which is also what question 1 is cut to, and so on to the end."""
    size = 60
    table = ExampleTable.from_tokens([PairTokens(np.array([n]), np.array([2]), np.array([3])) for n in range(2 * size)])
    table.__dict__["question_ids"] = np.repeat(np.arange(size, dtype=np.uint64), 2)
    table.__dict__["prompt_ids"] = (np.arange(2 * size, dtype=np.uint64) + 1) // 2
    with pytest.raises(DataError, match="leaves 120 to train on and 0"):
        split_by_prompt(table, 0.5, 0)


def test_fractions() -> None:
    table = table_of([1, 2, 3])
    train, held_out = split_by_prompt(table, 0.0, 0)
    assert (len(train), len(held_out)) == (3, 0)
    for fraction in (-0.1, 1.0, float("nan")):
        with pytest.raises(ConfigError, match="at least 0 and less than 1"):
            split_by_prompt(table, fraction, 0)
    with pytest.raises(DataError, match="Holding out 1e-09 of 3 pairs leaves 3"):
        split_by_prompt(table, 1e-9, 0)


def test_nothing_that_is_held_out_is_left_to_train_on() -> None:
    table = table_of([1, 2, 1, 3, 4])
    held_out = table_of([1, 4, 9], seed=7)  # the same prompts, with other answers
    assert without(table, held_out).tolist() == [1, 3]
    assert without(table, held_out.select([2])).tolist() == [0, 1, 2, 3, 4]
    assert without(table, table).tolist() == []


def test_a_pair_that_max_length_made_equal_is_left_out_too() -> None:
    table, held_out = table_of([1, 2, 3]), table_of([1, 2, 3]).select([1])
    held_out.__dict__["question_ids"] = np.array([77], np.uint64)  # as of a longer prompt, of which the same was kept
    assert without(table, held_out).tolist() == [0, 2]
