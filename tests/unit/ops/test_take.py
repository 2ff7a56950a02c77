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


@pytest.mark.parametrize("times", [2, 8, 128])
def test_a_sum_of_many_in_half_precision_is_as_exact_as_a_sum_of_two(times: int) -> None:
    where = torch.zeros(times, dtype=torch.long)
    copies = torch.from_numpy(copies_of(where.numpy(), 1))
    upstream = torch.rand(times, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    x = torch.zeros(1, 512, dtype=torch.bfloat16, requires_grad=True)
    (gradient,) = torch.autograd.grad(take(x, where, copies), x, upstream)
    exact = upstream.double().sum(dim=0)
    assert float((gradient[0].double() - exact).norm() / exact.norm()) < 0.0025  # a bfloat16 has 8 bits
