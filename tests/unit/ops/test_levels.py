"""A row cut where its sequences part, and its parts as a padded batch."""

import torch

from isopref.models.tree import levels_of
from isopref.ops.levels import as_batch, from_batch
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


def test_parts_are_a_padded_batch() -> None:
    """Each part at the start of a line, zeros after it, and back; in the gradient too."""
    levels = levels_of(segments_of_trees("shared"))
    for level in levels.levels:
        x = torch.randn(level.bounds[-1], 3, dtype=torch.float64, requires_grad=True)
        batch = as_batch(x, level)
        longest = max(end - start for start, end in zip(level.bounds, level.bounds[1:], strict=False))
        assert batch.shape == (len(level.bounds) - 1, longest, 3)
        for line, start, end in zip(batch, level.bounds, level.bounds[1:], strict=False):
            assert torch.equal(line[: end - start], x[start:end])
            assert not line[end - start :].any()
        back = from_batch(batch * torch.arange(1.0, 4), level)
        assert torch.equal(back, x * torch.arange(1.0, 4))
        found, expected = (gradients([one], [x]) for one in (back, x * torch.arange(1.0, 4)))
        assert torch.equal(found[0], expected[0])
