"""On a CUDA device: layers with a state over the tree of a row, with flash-linear-attention's kernels and compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus

from isopref.batch.rows import build_microbatch
from isopref.models.parallel import checkpoint_layers, compile_layers
from isopref.models.policy import Policy
from isopref.models.probe import check_layout
from isopref.models.tree import levels_of
from isopref.ops import delta, state_space
from isopref.ops.delta import tree_delta_rule
from isopref.ops.fla import Kernel
from isopref.ops.levels import Levels
from isopref.ops.state_space import tree_state_space
from isopref.testing import oracle
from isopref.testing.models import tiny_model, tree_examples

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
# With a larger range, bamba's own gradient in bfloat16 is off by a quarter.
WIDE: dict[str, Any] = {"head_dim": 64, "hidden_size": 256, "intermediate_size": 512, "initializer_range": 0.05}
SETTINGS: dict[str, dict[str, Any]] = {  # widths that kernels take
    "olmo_hybrid": {**WIDE, "linear_key_head_dim": 64, "linear_value_head_dim": 64},
    "lfm2": WIDE,
    "bamba": {**WIDE, "mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 64},
}


def relative(found: Tensor, expected: Tensor) -> float:
    found, expected = (x.detach().double().cpu() for x in (found, expected))
    return float((found - expected).norm() / expected.norm())


def levels_of_trees(kind: Any) -> Levels:
    row = build_microbatch(tree_examples(), kind, row_tokens=700).passes[0].segments
    assert row is not None
    levels = levels_of(row.to(CUDA))
    assert len(levels.levels) == (4 if kind == "shared" else 1)
    return levels


def drawn(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(CUDA) for shape in shapes]


def check_fused(
    op: Callable[[list[Tensor]], Tensor], inputs: dict[str, Tensor], grad: Tensor, wide: Sequence[str], module: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Values and all gradients, also those that reach a prompt through the first state of its answers.

    Both in bfloat16 against float64: the kernels may be off by twice what the twin is, and little more. Inputs named in
    `wide` are float32.
    """
    if module.kernel().run is None:
        pytest.skip(module.kernel().fault)

    def run(dtype: torch.dtype) -> list[Tensor]:
        narrow = dtype != torch.float64
        leaves = [x.float() if narrow and name in wide else x.to(dtype) for name, x in inputs.items()]
        leaves = [x.detach().requires_grad_() for x in leaves]
        out = op(leaves)
        return [out, *torch.autograd.grad(out, leaves, grad.to(out.dtype))]

    expected, fused = run(torch.float64), run(torch.bfloat16)
    monkeypatch.setattr(module, "kernel", lambda: Kernel(None))
    eager = run(torch.bfloat16)
    for name, one, twin, right in zip(("out", *inputs), fused, eager, expected, strict=True):
        assert relative(one, right) < 2 * relative(twin, right) + 1e-2, name


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("kind", ["shared", "packed"])
def test_fused_delta_rule_is_the_eager_one(kind: Any, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    levels = levels_of_trees(kind)
    shapes = ((700, 2, width), (700, 2, width), (700, 4, width), (700, 4), (700, 4), (700, 4, width))
    q, k, v, g, beta, grad = drawn(*shapes)
    inputs = {"q": q, "k": k, "v": v, "g": -softplus(g - 3), "beta": beta.sigmoid()}  # a decay that reaches far

    def op(given: list[Tensor]) -> Tensor:
        q, k, *others = given
        return tree_delta_rule(delta.Inputs(delta.unit(q), delta.unit(k), *others), levels)

    check_fused(op, inputs, grad, ("g",), delta, monkeypatch)


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("kind", ["shared", "packed"])
def test_fused_state_space_is_the_eager_one(kind: Any, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    levels = levels_of_trees(kind)
    c, b, x, dt, g, grad = drawn((700, 2, width), (700, 2, width), (700, 4, 64), (700, 4), (700, 4), (700, 4, 64))
    inputs = {"c": c, "b": b, "x": x, "dt": softplus(dt), "g": -softplus(g - 3)}

    def op(given: list[Tensor]) -> Tensor:
        return tree_state_space(state_space.Inputs(*given), levels)

    check_fused(op, inputs, grad, ("dt", "g"), state_space, monkeypatch)


@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled"])
@pytest.mark.parametrize("architecture", SETTINGS)
def test_following_layers_train(architecture: str, compiled: bool) -> None:
    """Scores and gradients of trees of several depths in bfloat16, also with layers computed again."""
    settings = SETTINGS[architecture]
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
        assert off < 0.08


def test_a_step_never_waits_for_the_device() -> None:
    """CUDA itself raises where Python would wait for it."""
    from support.counting import one_step

    for architecture, settings in SETTINGS.items():
        step = one_step(tiny_model(architecture, dtype=torch.bfloat16, **settings), CUDA)
        step()  # allocations and kernels of the first time may wait
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
