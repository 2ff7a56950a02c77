"""Plans: every pair once, within the budget, the same number of microbatches on every rank, and in balance."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isopref.batch.packing import Budget, Group, RowKind, check_budget, padded_tokens, plan_step
from isopref.data.schedule import batch, epoch_order, num_batches
from isopref.errors import ConfigError
from isopref.examples import Example, Lengths
from isopref.types import IntArray

KINDS: tuple[RowKind, ...] = ("shared", "packed", "padded", "padded_separate")
PACKED: tuple[RowKind, ...] = ("shared", "packed")
LENGTH_FILES = sorted((Path(__file__).parents[3] / "benchmarks" / "lengths").glob("*_lengths.npy"))


def slots(pairs: IntArray, kind: RowKind) -> int:
    """Token slots of one microbatch, straight from what each kind is."""
    chosen = [int(p + c) for p, c, _ in pairs]
    rejected = [int(p + r) for p, _, r in pairs]
    if not len(pairs):
        return 0
    match kind:
        case "shared":
            return sum(int(p + c + r) for p, c, r in pairs)
        case "packed":
            return sum(chosen) + sum(rejected)
        case "padded":
            return 2 * len(pairs) * max(chosen + rejected)
        case "padded_separate":
            return len(pairs) * max(chosen) + len(pairs) * max(rejected)


def loads(lengths: IntArray, plan: list[list[Group]], kind: RowKind) -> list[int]:
    """Token slots of each rank."""
    return [sum(slots(lengths[group], kind) for group in rank if group) for rank in plan]


class Case(NamedTuple):
    lengths: IntArray
    budget: Budget
    num_ranks: int
    attention_share: float


@st.composite
def cases(draw: st.DrawFn, kinds: tuple[RowKind, ...] = KINDS) -> Case:
    kind = draw(st.sampled_from(kinds))
    triples = st.tuples(*[st.one_of(st.integers(1, 6), st.integers(1, 60))] * 3)
    lengths = np.array(draw(st.lists(triples, min_size=1, max_size=24)), dtype=np.int32)
    longest = max(slots(lengths[p : p + 1], kind) for p in range(len(lengths)))
    tokens = longest + draw(st.one_of(st.just(0), st.integers(0, 20), st.integers(0, 5000)))
    pairs = draw(st.one_of(st.none(), st.integers(1, 6)))
    return Case(lengths, Budget(kind, tokens, pairs), draw(st.integers(1, 6)), draw(st.sampled_from([0.0, 0.01])))


def plan_of(case: Case) -> list[list[Group]]:
    return plan_step(
        Lengths.of_pairs(case.lengths), case.budget, num_ranks=case.num_ranks, attention_share=case.attention_share
    )


@settings(max_examples=300, deadline=None)
@given(cases())
def test_every_plan_keeps_its_promises(case: Case) -> None:
    plan = plan_of(case)
    groups = [group for rank in plan for group in rank]
    assert sorted(pair for group in groups for pair in group) == list(range(len(case.lengths)))
    assert len(plan) == case.num_ranks
    assert len({len(rank) for rank in plan}) == 1
    assert max(slots(case.lengths[group], case.budget.kind) for group in groups if group) <= case.budget.tokens
    assert max(map(len, groups)) <= (case.budget.examples or len(case.lengths))
    assert sum(not group for group in groups) < case.num_ranks  # never a round in which all ranks idle
    assert plan == plan_of(case)


@settings(deadline=None)
@given(cases(PACKED))
def test_packed_rows_are_few(case: Case) -> None:
    """If n rows do not do, every row lacks room for one pair, so n (budget - longest) < total."""
    sizes = [slots(case.lengths[p : p + 1], case.budget.kind) for p in range(len(case.lengths))]
    tokens = case.budget.tokens + 1  # more than the longest pair
    needed = max(-(-sum(sizes) // tokens), sum(sizes) // (tokens - max(sizes)) + 1)
    num_rows = sum(len(rank) for rank in plan_of(case._replace(budget=Budget(case.budget.kind, tokens))))
    assert num_rows <= -(-needed // case.num_ranks) * case.num_ranks


@settings(deadline=None)
@given(cases(("shared",)))
def test_ranks_differ_by_one_pair_at_most_where_the_budget_is_free(case: Case) -> None:
    """Largest first into the least loaded: the fullest rank was the emptiest before its last pair."""
    lengths = case.lengths
    plan = plan_step(Lengths.of_pairs(lengths), Budget("shared", int(lengths.sum())), num_ranks=case.num_ranks)
    of_rank = loads(lengths, plan, "shared")
    assert max(of_rank) - min(of_rank) <= lengths.sum(axis=1).max()


@settings(deadline=None)
@given(cases(("shared",)))
def test_ranks_differ_by_one_microbatch_at_most(case: Case) -> None:
    plan = plan_step(Lengths.of_pairs(case.lengths), case.budget, num_ranks=case.num_ranks)
    of_rank = loads(case.lengths, plan, "shared")
    largest = max(slots(case.lengths[group], "shared") for rank in plan for group in rank if group)
    assert max(of_rank) - min(of_rank) <= largest


@pytest.mark.parametrize(
    "kind",
    [
        "shared",
        "packed",
    ],
)
def test_balance_is_in_the_tokens_that_are_computed(kind: RowKind) -> None:
    """One pair of long answers against twenty of long prompts."""
    lengths = np.array([[1, 1000, 1000], *[[100, 1, 1]] * 20])
    of_rank = loads(lengths, plan_step(Lengths.of_pairs(lengths), Budget(kind, 10_000), num_ranks=2), kind)
    longest_pair = slots(lengths[:1], kind)
    assert max(of_rank) <= max(longest_pair, sum(of_rank) / 2 + slots(lengths[1:2], kind))


@pytest.mark.parametrize("kind", KINDS)
def test_more_ranks_than_pairs(kind: RowKind) -> None:
    plan = plan_step(Lengths.of_pairs(np.array([[3, 2, 1], [1, 1, 1]])), Budget(kind, 1000), num_ranks=5)
    assert sorted(len(group) for rank in plan for group in rank) == [0, 0, 0, 1, 1]
    assert [len(rank) for rank in plan] == [1] * 5


# A pair of 10 prompt, 5 chosen and 7 rejected tokens; and one of 4, 3, 1 in the same microbatch.
@pytest.mark.parametrize(
    ("kind", "alone", "both"),
    [("shared", 22, 30), ("packed", 32, 44), ("padded", 34, 68), ("padded_separate", 32, 64)],
)
def test_slots_by_hand_and_the_budget_to_the_token(kind: RowKind, alone: int, both: int) -> None:
    pairs = np.array([[10, 5, 7], [4, 3, 1]], dtype=np.int32)
    lengths = Lengths.of_pairs(pairs)
    assert padded_tokens(lengths, [0], kind) == slots(pairs[:1], kind) == alone
    assert padded_tokens(lengths, [0, 1], kind) == slots(pairs, kind) == both
    assert padded_tokens(lengths, [], kind) == 0
    assert len(plan_step(lengths, Budget(kind, both))[0]) == 1
    assert len(plan_step(lengths, Budget(kind, both - 1))[0]) == 2
    check_budget(lengths, Budget(kind, alone))
    with pytest.raises(ConfigError) as refusal:
        plan_step(lengths.select([1, 0]), Budget(kind, alone - 1))
    message = str(refusal.value)
    assert f"is {alone - 1}, but example 1 takes {alone} tokens" in message
    assert "prompt 10, chosen 5, rejected 7" in message
    assert message.startswith("Budget.tokens is ")
    assert message.endswith(f"Raise it to at least {alone}, or shorten it.")
    with pytest.raises(ConfigError) as refusal:
        check_budget(lengths, Budget(kind, alone - 1), setting="layout.microbatch_tokens")
    assert str(refusal.value).startswith(f"layout.microbatch_tokens is {alone - 1}, but example 0 takes {alone} tokens")
    assert str(refusal.value).endswith(
        f"Raise it to at least {alone}, or shorten the data: data.max_length drops longer pairs; with "
        "data.truncation: keep_end or keep_start it truncates their prompts."
    )


@pytest.mark.parametrize("kind", KINDS)
def test_one_pair_too_many_starts_another_microbatch(kind: RowKind) -> None:
    lengths = Lengths.of_pairs(np.full((9, 3), 5))
    assert sorted(map(len, plan_step(lengths, Budget(kind, 10_000, examples=4))[0])) == (
        [3, 3, 3] if kind in PACKED else [1, 4, 4]
    )


def test_lists_by_hand() -> None:
    """Answers of 9, 12 and 3 tokens to a prompt of 10, two of which share their first 8. And a single answer of 4."""
    start = np.arange(100, 108)
    answers = (np.append(start, 1), np.append(start, np.arange(2, 6)), np.array([6, 7, 8]))
    lengths = Lengths.of([Example(np.arange(10), answers), Example(np.arange(6), (np.arange(4),))])
    assert lengths.tree.tolist() == [10 + 9 + 4 + 3, 10]
    sizes: dict[RowKind, tuple[int, int]] = {
        "shared": (26, 36),
        "packed": (19 + 22 + 13, 19 + 22 + 13 + 10),
        "padded": (3 * 22, 4 * 22),
        "padded_separate": (19 + 22 + 13, 2 * 19 + 22 + 13),
    }
    for kind, (alone, both) in sizes.items():
        assert (padded_tokens(lengths, [0], kind), padded_tokens(lengths, [0, 1], kind)) == (alone, both), kind
        assert plan_step(lengths, Budget(kind, both)) == [[[0, 1]]]
        with pytest.raises(ConfigError, match=r"prompt 10, answers 9, 12, 3"):
            plan_step(lengths, Budget(kind, alone - 1))


def real_plans(path: Path, kind: RowKind, num_ranks: int) -> list[tuple[IntArray, list[list[Group]]]]:
    """The plans of an epoch of 64-pair batches, each with its lengths."""
    lengths = np.load(path)
    order = epoch_order(len(lengths), seed=0, epoch=1)
    batches = [lengths[batch(order, 64, n)] for n in range(num_batches(len(lengths), 64))]
    return [(one, plan_step(Lengths.of_pairs(one), Budget(kind, 16384), num_ranks=num_ranks)) for one in batches]


needs_lengths = pytest.mark.skipif(not LENGTH_FILES, reason="no length files on this machine")


@needs_lengths
@pytest.mark.parametrize("path", LENGTH_FILES, ids=lambda path: path.stem)
@pytest.mark.parametrize("kind", PACKED)
def test_rows_of_real_lengths_are_as_few_as_can_be(path: Path, kind: RowKind) -> None:
    plans = real_plans(path, kind, num_ranks=2)
    fewest = sum(-(-slots(lengths, kind) // (2 * 16384)) for lengths, _ in plans)
    assert sum(len(plan[0]) for _, plan in plans) <= 1.05 * fewest


@needs_lengths
@pytest.mark.parametrize("path", LENGTH_FILES, ids=lambda path: path.stem)
@pytest.mark.parametrize("kind", ["padded", "padded_separate"])
def test_sorting_halves_the_padding_of_real_lengths(path: Path, kind: RowKind) -> None:
    plans = real_plans(path, kind, num_ranks=1)
    real = sum(slots(lengths, "packed") for lengths, _ in plans)
    planned = sum(sum(loads(lengths, plan, kind)) for lengths, plan in plans)
    unsorted = sum(slots(lengths[n : n + 8], kind) for lengths, _ in plans for n in range(0, len(lengths), 8))
    assert planned - real < 0.5 * (unsorted - real)


@needs_lengths
@pytest.mark.parametrize("path", LENGTH_FILES, ids=lambda path: path.stem)
@pytest.mark.parametrize("kind", ["shared", "packed", "padded"])
def test_eight_ranks_share_real_lengths_evenly(path: Path, kind: RowKind, request: pytest.FixtureRequest) -> None:
    of_ranks = [loads(lengths, plan, kind) for lengths, plan in real_plans(path, kind, num_ranks=8)]
    slowest, mean = sum(max(of_rank) for of_rank in of_ranks), sum(sum(of_rank) / 8 for of_rank in of_ranks)
    assert slowest <= 1.25 * mean
