"""Steps whose gradient is not finite: skipped on the host, or inside a fused optimizer, as on a GPU."""

import math

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from isopref.engine.guard import Guard, Skipped


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_with_a_norm_that_is_not_finite_changes_nothing(fused: bool) -> None:
    weight = nn.Parameter(torch.ones(4))
    optim, guard = AdamW([weight], lr=0.1, fused=fused), Guard(torch.device("cpu"))
    assert getattr(optim, "_step_supports_amp_scaling", False) is fused
    for number, norm in enumerate((1.0, math.inf, math.nan, 1.0), start=1):
        before = weight.detach().clone()
        weight.grad = torch.full((4,), norm)
        guard.step(optim, torch.tensor(norm), number=number)
        assert torch.equal(weight, before) is not math.isfinite(norm)
    assert float(optim.state[weight]["step"]) == 2
    assert guard.report() == Skipped(first=2, steps=2, in_a_row=0, pair=None)
    assert guard.report() is None
