"""On a CUDA device: layers with a state over the tree of a row, with flash-linear-attention's kernels and compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from isopref.batch.rows import build_microbatch
from isopref.models.parallel import checkpoint_layers, compile_layers
from isopref.models.policy import Policy
from isopref.models.probe import check_layout
from isopref.models.tree import levels_of
from isopref.ops import delta
from isopref.ops.delta import Inputs, tree_delta_rule
from isopref.testing import oracle
from isopref.testing.models import tiny_model, tree_examples

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
WIDE: dict[str, Any] = {"head_dim": 64, "hidden_size": 256, "intermediate_size": 512}
DELTA: dict[str, Any] = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}


def relative(found: Tensor, expected: Tensor) -> float:
    found, expected = (x.detach().double().cpu() for x in (found, expected))
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("kind", ["shared", "packed"])
def test_fused_rule_is_the_eager_one(kind: Any, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and all gradients, also those that reach a prompt through the first state of its answers.

    Both in bfloat16 against float64: the kernels may be off by twice what the twin is, and little more.
    """
    if delta.kernel() is None:
        pytest.skip("flash-linear-attention is not installed")
    row = build_microbatch(tree_examples(), kind, row_tokens=700).passes[0].segments
    assert row is not None
    levels = levels_of(row.to(CUDA))
    assert len(levels.levels) == (4 if kind == "shared" else 1)
    generator = torch.Generator().manual_seed(0)
    shapes = ((700, 2, width), (700, 2, width), (700, 4, width), (700, 4), (700, 4), (700, 4, width))
    q, k, v, g, beta, grad = (torch.randn(s, generator=generator, dtype=torch.float64).to(CUDA) for s in shapes)
    inputs = [q, k, v, -torch.nn.functional.softplus(g - 3), beta.sigmoid()]  # a decay that reaches far

    def run(dtype: torch.dtype) -> list[Tensor]:
        leaves = [(x.float() if n == 3 and dtype != torch.float64 else x.to(dtype)) for n, x in enumerate(inputs)]
        leaves = [x.detach().requires_grad_() for x in leaves]
        out = tree_delta_rule(Inputs(*leaves), levels)
        return [out, *torch.autograd.grad(out, leaves, grad.to(out.dtype))]

    expected, fused = run(torch.float64), run(torch.bfloat16)
    monkeypatch.setattr(delta, "kernel", lambda: None)
    eager = run(torch.bfloat16)
    for name, one, twin, right in zip(("out", "q", "k", "v", "g", "beta"), fused, eager, expected, strict=True):
        assert relative(one, right) < 2 * relative(twin, right) + 1e-2, name


@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled"])
@pytest.mark.parametrize("architecture", ["olmo_hybrid", "lfm2"])
def test_following_layers_train(architecture: str, compiled: bool) -> None:
    """Scores and gradients of trees of several depths in bfloat16, also with layers computed again."""
    settings = {**WIDE, **(DELTA if architecture == "olmo_hybrid" else {})}
    trees = tree_examples()
    exact = Policy(tiny_model(architecture, dtype=torch.float64, **settings)).train()
    policy = Policy(tiny_model(architecture, dtype=torch.bfloat16, **settings)).to(CUDA).train()
    assert policy.following
    if compiled:
        compile_layers(policy)
    check_layout(policy, "shared")
    assert policy.following, "the probe found the layers wrong"
    expected = exact(build_microbatch(trees, "shared")).logp
    expected.sum().backward()
    wanted = {name: p.grad for name, p in exact.named_parameters() if p.grad is not None}
    for count in (0, 2):
        checkpoint_layers(policy, count)
        policy.zero_grad()
        found = policy(build_microbatch(trees, "shared").to(CUDA)).logp
        found.sum().backward()
        got = {name: p.grad.double().cpu() for name, p in policy.named_parameters() if p.grad is not None}
        off = oracle.relative_error(got, wanted)
        assert relative(found, expected) < 3e-2
        assert off < 0.15


def test_a_step_never_waits_for_the_device() -> None:
    """CUDA itself raises where Python would wait for it."""
    from support.counting import one_step

    for architecture, settings in (("lfm2", WIDE), ("olmo_hybrid", {**WIDE, **DELTA})):
        step = one_step(tiny_model(architecture, dtype=torch.bfloat16, **settings), CUDA)
        step()  # allocations and kernels of the first time may wait
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
