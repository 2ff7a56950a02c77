"""On a CUDA device: the varlen kernel, the head, whole steps. Compared with float64 on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from isopref.batch.rows import build_microbatch
from isopref.models.policy import Policy
from isopref.models.probe import check_layout
from isopref.ops import flash
from isopref.ops.attention import segment_attention
from isopref.ops.logprob import (
    token_collisions_eager,
    token_logprobs,
    token_logprobs_and_collisions,
    token_logprobs_eager,
)
from isopref.testing import oracle
from isopref.testing.cells import KINDS
from isopref.testing.models import examples, random_pairs, tiny_model
from support.cuda import Command

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
WIDE: dict[str, Any] = {
    "head_dim": 64,
    "hidden_size": 256,
    "intermediate_size": 512,
}  # as the kernel takes them


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    found, expected = (x.detach().double().cpu() for x in (found, expected))
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("sunk", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("kernel", ["built in", "flash-attn-4"])
@pytest.mark.parametrize("window", [None, 5, 200])
@pytest.mark.parametrize("kind", ["shared", "packed"])
@pytest.mark.parametrize(
    ("width", "dtype"),
    [(64, torch.float16), *((width, torch.bfloat16) for width in (64, 80, 128, 256))],
)
def test_varlen_attention_is_the_portable_one(
    width: int,
    dtype: torch.dtype,
    kind: Any,
    window: int | None,
    kernel: str,
    sunk: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if kernel == "built in":
        monkeypatch.setattr(flash, "has_flash", lambda _device: False)
    elif not flash.has_flash(CUDA):
        pytest.skip("flash-attn-4 is not installed, or not for this card")
    row = build_microbatch(examples(random_pairs(7, seed=5, longest=90)), kind, row_tokens=2000).passes[0].to(CUDA)
    generator = torch.Generator(CUDA).manual_seed(0)
    shapes = ((8, 2000, width), (2, 2000, width), (2, 2000, width), (2000, 8, width))
    *inputs, grad = (torch.randn(shape, generator=generator, device=CUDA, dtype=torch.float64) for shape in shapes)
    if sunk:  # from one that hardly matters to one that takes most of the attention
        inputs.append(torch.linspace(-3, 5, 8, device=CUDA, dtype=torch.float64))

    def run(dtype: torch.dtype) -> list[torch.Tensor]:
        assert row.segments is not None
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        q, k, v, *sinks = leaves
        out = segment_attention(q, k, v, row.segments, scale=0.125, window=window, sinks=sinks[0] if sunk else None)
        return [out, *torch.autograd.grad(out, leaves, grad.to(dtype))]

    # A sink's gradient sums grad * out over all tokens. If grad does not depend on out, these terms nearly cancel, and
    # what is left is mostly rounding.
    grad = grad + run(torch.float64)[0].detach()
    for found, expected in zip(run(dtype), run(torch.float64), strict=True):
        assert relative(found, expected) < 1e-2


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(("query_width", "value_width"), [(192, 128), (64, 128), (512, 512)])
def test_heads_that_the_kernels_do_not_take_as_they_are(query_width: int, value_width: int, window: int | None) -> None:
    """Values of another width, as in DeepSeek-V3, and heads that are too wide for any kernel."""
    row = build_microbatch(examples(random_pairs(7, seed=5, longest=90)), "shared", row_tokens=2000).passes[0].to(CUDA)
    generator = torch.Generator(CUDA).manual_seed(0)
    shapes = ((8, 2000, query_width), (2, 2000, query_width), (2, 2000, value_width), (2000, 8, value_width))
    *inputs, grad = (torch.randn(shape, generator=generator, device=CUDA, dtype=torch.float64) for shape in shapes)

    def run(dtype: torch.dtype) -> list[torch.Tensor]:
        assert row.segments is not None
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        q, k, v = leaves
        out = segment_attention(q, k, v, row.segments, scale=query_width**-0.5, window=window)
        return [out, *torch.autograd.grad(out, leaves, grad.to(dtype))]

    for found, expected in zip(run(torch.bfloat16), run(torch.float64), strict=True):
        assert relative(found, expected) < 1e-2


@pytest.mark.parametrize(("scale", "softcap"), [(1.0, None), (0.3, None), (1.0, 5.0), (2.5, 3.0)])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("max_logits", [None, 3 * 5000])
def test_head(scale: float, softcap: float | None, biased: bool, max_logits: int | None) -> None:
    """The kernels in float32 and bfloat16 against the specification in float64: values, and gradients of all parts."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(301, 128, generator=generator, dtype=torch.float64)
    weight = torch.randn(5000, 128, generator=generator, dtype=torch.float64) * 0.2
    target = torch.randint(5000, (301,), generator=generator)
    grad = torch.randn(301, generator=generator, dtype=torch.float64)
    parts = [hidden, weight, *([torch.randn(5000, generator=generator, dtype=torch.float64)] if biased else [])]

    expected_leaves = [part.clone().requires_grad_() for part in parts]
    head, matrix, *bias = expected_leaves
    expected = token_logprobs_eager(head, matrix, target, *bias, scale=scale, softcap=softcap)
    collision = token_collisions_eager(head, matrix, *bias, scale=scale, softcap=softcap)
    expected_grads = torch.autograd.grad(expected, expected_leaves, grad)
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        leaves = [x.to(CUDA, dtype).requires_grad_() for x in parts]
        head, matrix, *bias = leaves
        found = token_logprobs(
            head, matrix, target.to(CUDA), *bias, scale=scale, softcap=softcap, max_logits=max_logits
        )
        _, squares = token_logprobs_and_collisions(
            head, matrix, target.to(CUDA), *bias, scale=scale, softcap=softcap, max_logits=max_logits
        )
        assert relative(squares, collision) < bound
        grads = torch.autograd.grad(found, leaves, grad.to(CUDA, found.dtype))
        for one, other in zip((found, *grads), (expected, *expected_grads), strict=True):
            assert relative(one, other) < bound


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "olmo2", "olmo3", "mistral", "gemma3"])
@pytest.mark.parametrize("kind", KINDS)
def test_scores(architecture: str, kind: str) -> None:
    pairs = random_pairs(6, seed=1, longest=40)
    with torch.no_grad():
        expected = oracle.pair_logps(tiny_model(architecture, dtype=torch.float64, **WIDE), pairs)
        for dtype, bound in ((torch.float32, 1e-4), (torch.bfloat16, 3e-2)):
            policy = Policy(tiny_model(architecture, dtype=dtype, **WIDE)).to(CUDA)
            found = policy(build_microbatch(examples(pairs), kind).to(CUDA)).logp.view(2, -1)  # type: ignore[arg-type]
            assert relative(found, torch.stack([expected.chosen, expected.rejected])) < bound
            check_layout(policy, kind)  # type: ignore[arg-type]


def test_a_step_never_waits_for_the_device() -> None:
    """CUDA itself raises where Python would wait for it."""
    from support.counting import one_step

    step = one_step(tiny_model("llama", dtype=torch.bfloat16, **WIDE), CUDA)
    step()  # allocations and kernels of the first time may wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("saved_in", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compute_dtype", ["null", "bfloat16"])
def test_train(isopref_train: Command, compute_dtype: str, saved_in: torch.dtype) -> None:
    """The whole command, in pure float32 and with float32 master weights and bfloat16 compute."""
    done = isopref_train(f"model.compute_dtype={compute_dtype}", "optim.lr=1e-3", "run.samples=2", dtype=saved_in)
    assert done.before == 0.5
    assert done.after > 0.9
