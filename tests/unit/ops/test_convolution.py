"""The convolution along the sequences of a row, against torch's own over each sequence by itself."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv1d

from isopref.models.tree import taps_of
from isopref.ops.convolution import tree_convolution
from support.segments import ONE_BY_ONE, PADDED_ROW, SHARED_PAIRS, Layout, keys_of, segments_of

# A list: three answers after one prompt, the last of them a branch of the second.
NESTED: Layout = [(6, []), (4, [0, 1]), (1, [0, 1]), (3, [0, 1, 6, 7]), (2, [])]
LAYOUTS = {"pairs": SHARED_PAIRS, "padded": PADDED_ROW, "one by one": ONE_BY_ONE, "nested": NESTED}


def one_by_one(x: Tensor, weight: Tensor, bias: Tensor | None, layout: Layout) -> Tensor:
    parts = []
    for (own, _), keys in zip(layout, keys_of(layout), strict=True):
        whole = conv1d(x[keys].T, weight[:, None], bias, padding=weight.shape[1] - 1, groups=x.shape[1])
        parts.append(whole[:, : len(keys)].T[len(keys) - own :])
    return torch.cat(parts)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("taps", [1, 3, 4])
@pytest.mark.parametrize("biased", [False, True])
def test_every_sequence_is_convolved_by_itself(layout: str, taps: int, biased: bool) -> None:
    segments = segments_of(LAYOUTS[layout])
    num_tokens = segments.query_bounds[-1]
    generator = torch.Generator().manual_seed(0)
    shapes = [(num_tokens, 5), (5, taps), *([(5,)] if biased else [])]
    leaves = [torch.randn(s, dtype=torch.float64, generator=generator).requires_grad_() for s in shapes]
    grad = torch.randn(num_tokens, 5, dtype=torch.float64, generator=generator)
    x, weight, *rest = leaves
    bias = rest[0] if biased else None
    found = tree_convolution(x, weight, bias, taps_of(segments, taps))
    expected = one_by_one(x, weight, bias, LAYOUTS[layout])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    for one, other in zip(*(torch.autograd.grad(y, leaves, grad) for y in (found, expected)), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_half_precision_is_summed_in_float32() -> None:
    taps = taps_of(segments_of([(3, [])]), 3)
    x = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)  # 256 + 1 is 256 in bfloat16
    found = tree_convolution(x, torch.ones(1, 3, dtype=torch.bfloat16), None, taps)
    assert found.flatten().tolist() == [256.0, 256.0, 258.0]
