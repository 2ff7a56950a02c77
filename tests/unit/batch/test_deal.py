"""Rows dealt to ranks: between them they have every token, prediction and end once, at the place the row has it."""

import pytest
import torch
from torch import Tensor

from isopref.batch.deal import deal
from isopref.batch.rows import build_microbatch
from isopref.errors import ConfigError
from isopref.testing.models import tree_examples, with_context
from isopref.types import ContextGroup, Pass, Segments

SIZES = (2, 3, 4, 7)


def row(kind: str = "shared") -> Pass:
    (one,) = build_microbatch(with_context(tree_examples(), fractions=True), kind).passes  # type: ignore[arg-type]
    return one


def dealt(one: Pass, size: int) -> list[Pass]:
    return [deal(one, ContextGroup("g", rank, size)) for rank in range(size)]


def gathered(parts: list[Tensor]) -> Tensor:
    """The row again: token i of rank r is token i n + r."""
    return torch.stack(parts, dim=-1).flatten(-2)


@pytest.mark.parametrize("kind", ["shared", "packed"])
@pytest.mark.parametrize("size", SIZES)
def test_tokens_are_dealt_like_cards(kind: str, size: int) -> None:
    one = row(kind)
    num_tokens = one.input_ids.shape[1]
    parts = dealt(one, size)
    assert len({part.input_ids.shape for part in parts}) == 1
    for name in ("input_ids", "position_ids", "times"):
        found = gathered([getattr(part, name) for part in parts])
        assert torch.equal(found[..., :num_tokens], getattr(one, name))
        assert not found[..., num_tokens:].any()


@pytest.mark.parametrize("kind", ["shared", "packed"])
@pytest.mark.parametrize("size", SIZES)
def test_every_prediction_and_end_is_on_the_rank_of_its_token(kind: str, size: int) -> None:
    one = row(kind)
    parts = dealt(one, size)
    fields = {
        ("predict_index", "predict_places"): ("target", "answer", "place", "weight"),
        ("last_index", "last_places"): ("last_answer",),
    }
    for (index, places), names in fields.items():
        expected = sorted(zip(*(getattr(one, name).tolist() for name in (index, *names)), strict=True))
        found: list[tuple[float, ...]] = []
        for rank, part in enumerate(parts):
            assert getattr(part, index).tolist() == getattr(part, places).tolist()
            where = (getattr(part, index) * size + rank).tolist()
            found += zip(where, *(getattr(part, name).tolist() for name in names), strict=True)
        assert sorted(found) == expected


@pytest.mark.parametrize("size", SIZES)
def test_copies_lead_back_to_what_was_taken(size: int) -> None:
    for part in dealt(row(), size):
        for index, copies in ((part.predict_index, part.predict_copies), (part.last_index, part.last_copies)):
            assert copies.shape[1] == part.input_ids.shape[1]
            for token, of_token in enumerate(copies.T.tolist()):
                assert [index[one] for one in of_token if one >= 0] == [token] * sum(one >= 0 for one in of_token)
            assert int((copies >= 0).sum()) == len(index)


@pytest.mark.parametrize("kind", ["shared", "packed"])
@pytest.mark.parametrize("size", SIZES)
def test_segments_are_those_of_the_row_and_of_its_padding(kind: str, size: int) -> None:
    one = row(kind)
    num_tokens, padding = one.input_ids.shape[1], -one.input_ids.shape[1] % size
    longer = build_microbatch(
        with_context(tree_examples(), fractions=True),
        kind,  # type: ignore[arg-type]
        row_tokens=num_tokens + padding,
    )
    expected = longer.passes[0].segments
    assert expected is not None
    for rank, part in enumerate(dealt(one, size)):
        assert part.segments is not None
        assert part.segments.context == ContextGroup("g", rank, size)
        same_segments(part.segments, expected)


def same_segments(found: Segments, expected: Segments) -> None:
    for name, value in vars(expected).items():
        other = getattr(found, name)
        if isinstance(value, Tensor):
            assert torch.equal(other, value), name
        elif name != "context":
            assert other == value, name


def test_a_padded_batch_is_refused() -> None:
    (one,) = build_microbatch(tree_examples(), "padded").passes
    with pytest.raises(ConfigError, match="context parallelism needs packed rows"):
        deal(one, ContextGroup("g", 0, 2))
