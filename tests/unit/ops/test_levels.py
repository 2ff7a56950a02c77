"""A row cut where its sequences part, and its parts in padded batches."""

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from isopref.models.tree import SHORT, _batches, _chunks, levels_of
from isopref.ops.levels import Level, in_batches
from support.recurrences import ROW_TOKENS, gradients, segments_of_trees


def test_a_row_is_cut_where_sequences_part() -> None:
    """Every token is in one part; a part continues the one before it; a shared prompt is there once."""
    row = segments_of_trees("shared")
    levels = levels_of(row)
    assert len(levels.levels) == 4  # prompt, trunk, branch and what follows it
    assert sorted(levels.order.tolist()) == list(range(ROW_TOKENS))
    assert torch.equal(levels.order[levels.place], torch.arange(ROW_TOKENS))
    assert row.key_index is not None
    before = {int(b): int(a) for a, b in zip(row.key_index, row.key_index[1:], strict=False)}  # also across sequences
    firsts = {row.key_index[start].item() for start in row.key_bounds[:-1]}
    start, last_ends = 0, [-1]
    for level in levels.levels:
        ends = []
        for n, (first, last) in enumerate(zip(level.bounds, level.bounds[1:], strict=False)):
            tokens = levels.order[start + first : start + last].tolist()
            assert tokens == list(range(tokens[0], tokens[-1] + 1))
            if level.parent is None:
                assert tokens[0] in firsts
            else:
                assert before[tokens[0]] == last_ends[int(level.parent[n])]
            ends.append(tokens[-1])
        last_ends, start = ends, start + level.bounds[-1]


def test_chunks_by_hand() -> None:
    """Parts of exactly one chunk, of a token more, and of one token."""
    assert _chunks(np.array([64, 65, 1])).tolist() == [[0, 0], [1, 0], [1, 1], [2, 0]]


def counts_of_tokens(given: tuple[Tensor, ...], state: Tensor | None) -> tuple[Tensor, Tensor]:
    """A rule by hand: the state counts tokens, weighed; a token gets the count with its own weight."""
    (x,) = given
    counted = x.cumsum(dim=1) + (0 if state is None else state[:, None])
    return counted, counted[:, -1]


def test_rules_get_parts_as_padded_batches() -> None:
    """Parts of similar lengths from the start of their lines, zeros after them; results in the parts' order."""
    levels = levels_of(segments_of_trees("shared")).levels
    assert any(len(level.batches) > 1 for level in levels)
    for level in levels:
        check_batches(level)


def check_batches(level: Level) -> None:
    parts = list(pairwise(level.bounds))
    x = torch.randn(level.bounds[-1], 3, dtype=torch.float64, requires_grad=True)
    first = torch.randn(len(parts), 3, dtype=torch.float64, requires_grad=True)
    lines: list[Tensor] = []

    def rule(given: tuple[Tensor, ...], state: Tensor | None) -> tuple[Tensor, Tensor]:
        lines.extend(given[0])
        return counts_of_tokens(given, state)

    found = in_batches(rule, [x], level, first)
    for line, (start, end) in zip(lines, parts, strict=True):
        assert torch.equal(line[: end - start], x[start:end])
        assert not line[end - start :].any()
        assert len(line) <= 2 * max(end - start, SHORT)
    alone = [counts_of_tokens((x[None, start:end],), first[n : n + 1]) for n, (start, end) in enumerate(parts)]
    expected = torch.cat([out[0] for out, _ in alone]), torch.cat([last for _, last in alone])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    for one, other in zip(gradients(found, [x, first]), gradients(expected, [x, first]), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    from_zero = [counts_of_tokens((x[None, start:end],), None)[1] for start, end in parts]
    torch.testing.assert_close(in_batches(rule, [x], level, None)[1], torch.cat(from_zero), rtol=0, atol=1e-12)


def test_batches_by_hand() -> None:
    """Half of the longest and more; parts of up to 32 tokens with any that are no longer than 64."""
    assert _batches([100, 60, 50, 49, 33, 32, 25, 24, 1]) == ((3, 100), (6, 49))
    assert _batches([70, 34, 33, 1]) == ((1, 70), (3, 34))
    assert _batches([64, 1]) == ((2, 64),)
    assert _batches([5]) == ((1, 5),)
