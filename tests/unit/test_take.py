"""take: the gradient of an index that comes any number of times."""

import pytest
import torch

from isopref.data.rows import copies_of
from isopref.ops.take import take


@pytest.mark.parametrize("index", [[0, 1, 2, 3], [3, 0, 0], [2, 1, 2, 1, 3], [1, 2, 1, 0, 1, 1, 0], [1], []])
def test_value_and_gradient_are_those_of_indexing(index: list[int]) -> None:
    where = torch.tensor(index, dtype=torch.long)
    copies = torch.from_numpy(copies_of(where.numpy(), 4))
    x = torch.randn(4, 3, 2, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(len(index), 3, 2, dtype=torch.float64)
    found, expected = take(x, where, copies), x[where]
    assert torch.equal(found, expected)
    (gradient,), (by_indexing,) = (torch.autograd.grad(y, x, upstream) for y in (found, expected))
    torch.testing.assert_close(gradient, by_indexing, rtol=1e-15, atol=1e-15)


def test_what_is_not_taken_keeps_its_distance_from_what_is_not_a_number() -> None:
    x = torch.zeros(3, 1, requires_grad=True)
    copies = torch.from_numpy(copies_of(torch.tensor([1, 1]).numpy(), 3))
    (gradient,) = torch.autograd.grad(take(x, torch.tensor([1, 1]), copies), x, torch.full((2, 1), torch.nan))
    assert gradient.isnan().flatten().tolist() == [False, True, False]
