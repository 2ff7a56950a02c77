"""Rows and padded batches of two tiny pairs, written out by hand."""

from typing import NamedTuple

import numpy as np
import pytest
import torch

from isopref.batch.packing import RowKind
from isopref.batch.rows import build_microbatch
from isopref.examples import Example, PairTokens
from isopref.testing.models import examples
from isopref.types import IntArray, Microbatch, Pass

KINDS: tuple[RowKind, ...] = ("shared", "packed", "padded", "padded_separate")


def pair(prompt: list[int], chosen: list[int], rejected: list[int]) -> PairTokens:
    return PairTokens(*(np.array(part, dtype=np.int32) for part in (prompt, chosen, rejected)))


PAIRS = [pair([10, 11], [12, 13], [14]), pair([20], [21], [22, 23])]


class Expected(NamedTuple):
    """One pass. `predictions`: (flat position, token it predicts, completion), where 0, 1 are chosen, 2, 3 rejected."""

    ids: list[list[int]]
    predictions: set[tuple[int, int, int]]
    positions: list[int] | None = None
    query_bounds: tuple[int, ...] = ()
    key_bounds: tuple[int, ...] = ()
    key_index: list[int] | None = None


SHARED = Expected(
    #    |      pair 0           |       pair 1
    #      0   1   2   3     4      5   6     7   8
    ids=[[10, 11, 12, 13,   14,    20, 21,   22, 23]],
    positions=[0,  1,  2,  3,     2,      0,  1,     1,  2],
    query_bounds=(0,          4,      5,         7,         9),
    key_index=[0, 1, 2, 3,   0, 1, 4,   5, 6,   5, 7, 8],
    key_bounds=(0,        4,         7,      9,         12),
    predictions={(1, 12, 0), (2, 13, 0), (1, 14, 2), (5, 21, 1), (5, 22, 3), (7, 23, 3)},
)  # fmt: skip
PACKED = Expected(
    #      0   1   2   3    4   5    6   7   8    9  10  11
    ids=[[10, 11, 12, 13,  20, 21,  10, 11, 14,  20, 22, 23]],
    positions=[0, 1, 2, 3,   0, 1,    0, 1, 2,     0, 1, 2],
    query_bounds=(0,      4,      6,          9,         12),
    key_bounds=(0,        4,      6,          9,         12),
    predictions={(1, 12, 0), (2, 13, 0), (4, 21, 1), (7, 14, 2), (9, 22, 3), (10, 23, 3)},
)  # fmt: skip
PADDED = Expected(
    ids=[[10, 11, 12, 13], [20, 21, 0, 0], [10, 11, 14, 0], [20, 22, 23, 0]],
    predictions={(1, 12, 0), (2, 13, 0), (4, 21, 1), (9, 14, 2), (12, 22, 3), (13, 23, 3)},
)
SEPARATE = [
    Expected(ids=[[10, 11, 12, 13], [20, 21, 0, 0]], predictions={(1, 12, 0), (2, 13, 0), (4, 21, 1)}),
    Expected(ids=[[10, 11, 14], [20, 22, 23]], predictions={(1, 14, 2), (3, 22, 3), (4, 23, 3)}),
]


def predictions(one: Pass) -> list[tuple[int, ...]]:
    columns = (one.predict_index, one.target, one.answer)
    assert len({len(column) for column in columns}) == 1
    return list(zip(*(column.tolist() for column in columns), strict=True))


def check_copies(index: torch.Tensor, copies: torch.Tensor, size: int) -> None:
    expected = [[k for k, t in enumerate(index.tolist()) if t == token] for token in range(size)]
    assert [[k for k in at if k >= 0] for at in copies.T.tolist()] == expected


def check(one: Pass, expected: Expected) -> None:
    check_copies(one.predict_index, one.predict_copies, one.input_ids.numel())
    assert one.input_ids.tolist() == expected.ids
    assert sorted(predictions(one)) == sorted(expected.predictions)
    if expected.positions is None:
        assert one.position_ids is None
        assert one.segments is None
        return
    assert one.position_ids is not None
    assert one.segments is not None
    assert one.position_ids.tolist() == [expected.positions]
    found = one.segments
    assert found.query_bounds == tuple(found.query_offsets.tolist()) == expected.query_bounds
    assert found.key_bounds == tuple(found.key_offsets.tolist()) == expected.key_bounds
    assert (None if found.key_index is None else found.key_index.tolist()) == expected.key_index
    assert found.longest >= max(np.diff(expected.query_bounds).max(), np.diff(expected.key_bounds).max())
    if found.key_index is not None and found.key_copies is not None:
        check_copies(found.key_index, found.key_copies, one.input_ids.numel())
    assert found.query_offsets.dtype == found.key_offsets.dtype == torch.int32


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("shared", [SHARED]), ("packed", [PACKED]), ("padded", [PADDED]), ("padded_separate", SEPARATE)],
)
def test_structure_by_hand(kind: RowKind, expected: list[Expected]) -> None:
    microbatch = build_microbatch(examples(PAIRS), kind)
    for one, by_hand in zip(microbatch.passes, expected, strict=True):
        check(one, by_hand)
    assert microbatch.num_tokens.tolist() == [2, 1, 1, 2]
    assert microbatch.compared.tolist() == [0, 1, 2, 3]
    assert (microbatch.num_answers, microbatch.num_comparisons) == (4, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_filler_runs_the_model_and_scores_nothing(kind: RowKind) -> None:
    filler = build_microbatch([], kind)
    assert (filler.num_answers, filler.num_comparisons) == (0, 0)
    assert len(filler.passes) == len(
        build_microbatch(examples(PAIRS), kind).passes
    )  # as many forwards as on other ranks
    for one in filler.passes:
        assert one.input_ids.numel() > 0
        assert predictions(one) == []
        assert (one.segments is None) == (kind in ("padded", "padded_separate"))
        if one.segments is not None:
            assert one.segments.query_bounds == one.segments.key_bounds == (0, one.input_ids.numel())


@pytest.mark.parametrize(("kind", "by_hand"), [("shared", SHARED), ("packed", PACKED)])
def test_padding_of_a_row_is_a_segment_of_its_own(kind: RowKind, by_hand: Expected) -> None:
    assert by_hand.positions is not None
    used, keys = by_hand.query_bounds[-1], by_hand.key_bounds[-1]
    (one,) = build_microbatch(examples(PAIRS), kind, row_tokens=used + 3).passes
    padding = list(range(used, used + 3))
    padded = by_hand._replace(
        ids=[by_hand.ids[0] + [0] * 3],
        positions=by_hand.positions + [0] * 3,
        query_bounds=(*by_hand.query_bounds, used + 3),
        key_bounds=(*by_hand.key_bounds, keys + 3),
        key_index=None if by_hand.key_index is None else by_hand.key_index + padding,
    )
    check(one, padded)


@pytest.mark.parametrize("kind", ["shared", "packed"])
def test_a_row_that_is_full_gets_no_padding(kind: RowKind) -> None:
    plain = build_microbatch(examples(PAIRS), kind).passes[0]
    full = build_microbatch(examples(PAIRS), kind, row_tokens=plain.input_ids.numel()).passes[0]
    assert full.segments is not None
    assert plain.segments is not None
    assert full.segments.query_bounds == plain.segments.query_bounds


def test_a_filler_has_the_rows_length_too() -> None:
    assert build_microbatch([], "shared", row_tokens=32).passes[0].input_ids.shape == (1, 32)


@pytest.mark.parametrize(("kind", "row_tokens"), [("shared", 8), ("packed", 11), ("padded", 64)])
def test_row_tokens_that_cannot_be_had_are_refused(kind: RowKind, row_tokens: int) -> None:
    with pytest.raises(ValueError, match="row_tokens"):
        build_microbatch(examples(PAIRS), kind, row_tokens=row_tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_prompt_is_refused(kind: RowKind) -> None:
    with pytest.raises(ValueError, match="prompt needs at least one token"):
        build_microbatch(examples([*PAIRS, pair([], [1], [2])]), kind)


@pytest.mark.parametrize(
    "kind",
    [
        "shared",
        "packed",
        "padded",
        "padded_separate",
    ],
)
def test_an_empty_answer_is_scored_as_nothing(kind: RowKind) -> None:
    """log p of no tokens is 0 in every layout (or it would have to be refused in every layout)."""
    microbatch = build_microbatch(examples([pair([1, 2], [3], []), pair([4], [], [5, 6])]), kind)
    found = [triple for one in microbatch.passes for triple in predictions(one)]
    assert sorted(completion for _, _, completion in found) == [0, 3, 3]


@pytest.mark.parametrize("kind", KINDS)
def test_moving_keeps_everything(kind: RowKind) -> None:
    microbatch = build_microbatch(examples(PAIRS), kind)
    moved: Microbatch = microbatch.to(torch.device("meta"))
    for one in moved.passes:
        tensors = [one.input_ids, one.predict_index, one.target, one.answer, moved.num_tokens, moved.compared]
        if one.segments is not None and one.position_ids is not None:
            tensors += [one.position_ids, one.segments.query_offsets, one.segments.key_offsets]
            tensors += [] if one.segments.key_index is None else [one.segments.key_index]
        assert {tensor.device.type for tensor in tensors} == {"meta"}


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_know_their_place_in_their_answer(kind: RowKind) -> None:
    passes = build_microbatch(examples(PAIRS), kind).passes
    places = {int(token): int(place) for one in passes for token, place in zip(one.target, one.place, strict=True)}
    assert places == {12: 0, 13: 1, 14: 0, 21: 0, 22: 0, 23: 1}


def array(*tokens: int) -> IntArray:
    return np.array(tokens, dtype=np.int32)


COMMON = tuple(range(50, 58))  # as many as answers must share for a row to hold them once
TREE = [
    Example(array(10, 11), (array(*COMMON, 1, 2), array(3), array(*COMMON, 4)), ((0, 1), (2, 1))),
    Example(array(20), (array(21),)),
    Example(array(10, 11), (array(*COMMON, 1, 2), array(3, 5)), ((0, 1),)),
]


def test_a_shared_row_is_a_prefix_tree() -> None:
    """Sequences of one example leave out what an earlier one has; a prompt that another example has too is apart."""
    microbatch = build_microbatch(TREE, "shared")
    (row,) = microbatch.passes
    assert row.segments is not None
    assert row.input_ids[0].tolist() == [10, 11, *COMMON, 1, 2, 3, 4, 20, 21, 10, 11, *COMMON, 1, 2, 3, 5]
    assert row.position_ids is not None
    assert row.position_ids[0].tolist() == [*range(12), 2, 10, 0, 1, *range(12), 2, 3]
    assert row.segments.query_bounds == (0, 12, 13, 14, 16, 28, 30)
    assert row.segments.key_bounds == (0, 12, 15, 26, 28, 40, 44)
    assert row.segments.key_index is not None
    assert row.segments.key_index.tolist()[12:26] == [0, 1, 12, *range(10), 13]
    # Answers are numbered round by round: the first ones (0, 1, 2), the second ones (3, 4), the third (5).
    assert microbatch.num_tokens.tolist() == [10, 1, 10, 1, 2, 9]
    assert microbatch.compared.tolist() == [0, 5, 2, 3, 3, 4]
    by_answer: dict[int, list[tuple[int, int]]] = {}
    for at, target, answer in predictions(row):
        by_answer.setdefault(answer, []).append((at, target))
    assert by_answer[0] == list(zip(range(1, 11), (*COMMON, 1, 2), strict=True))
    assert by_answer[2] == list(zip(range(17, 27), (*COMMON, 1, 2), strict=True))
    assert by_answer[5] == [*zip(range(1, 9), COMMON, strict=True), (9, 4)]
    assert by_answer[3] == [(1, 3)]
    assert by_answer[4] == [(17, 3), (28, 5)]
    # Three sequences have the first prompt, and two of them the common tokens.
    assert row.times.tolist() == [3, 3, *[2] * 8, 1, 1, 1, 1, 1, 1, 2, 2, *[1] * 12]


def test_fewer_common_tokens_are_not_shared() -> None:
    first, second = array(*COMMON[:-1], 1), array(*COMMON[:-1], 2)
    (row,) = build_microbatch([Example(array(10), (first, second), ((0, 1),))], "shared").passes
    assert row.input_ids.numel() == 1 + 8 + 8


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_run_as_many_passes_as_the_longest_list_needs(kind: RowKind) -> None:
    short: list[Example] = [Example(array(1), (array(2),))]
    passes = [len(build_microbatch(some, kind, num_passes=4).passes) for some in (TREE, short, [])]
    assert passes == [4 if kind == "padded_separate" else 1] * 3


@pytest.mark.parametrize(
    ("kind", "predict"), [("shared", [1, 3, 5, 6]), ("packed", [1, 3, 7, 8]), ("padded", [1, 3, 7, 8])]
)
def test_context_is_read_and_not_predicted(kind: RowKind, predict: list[int]) -> None:
    # The sequences are 10 11 | 12 13 14, of which 13 is context, and 10 11 | 15 16 17, of which 15 is.
    weights = (np.array([1, 0, 1.0]), np.array([0, 0.5, 2.0]))
    answers = (np.array([12, 13, 14]), np.array([15, 16, 17]))
    microbatch = build_microbatch([Example(np.array([10, 11]), answers, ((0, 1),), weights=weights)], kind)
    (one,) = microbatch.passes
    assert one.predict_index.tolist() == predict
    assert one.target.tolist() == [12, 14, 16, 17]
    assert one.answer.tolist() == [0, 0, 1, 1]
    assert one.place.tolist() == [0, 1, 0, 1]
    assert one.weight is not None
    assert one.weight.tolist() == [1, 1, 0.5, 2]
    assert microbatch.num_tokens.tolist() == [2, 2]


def test_weights_of_one_are_none_at_all() -> None:
    plain = examples(PAIRS)[0]
    ones = plain._replace(weights=tuple(np.ones(len(answer)) for answer in plain.answers))
    assert build_microbatch([ones], "shared").passes[0].weight is None
