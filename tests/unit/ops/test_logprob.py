"""token_logprobs against its eager twin, and both against the definition in float64.

C completion tokens, D hidden width, V vocabulary.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from isopref.ops import logprob
from isopref.ops.logprob import (
    token_collisions_eager,
    token_logprobs,
    token_logprobs_and_collisions,
    token_logprobs_eager,
)

C, D, V = 13, 6, 29
SETTINGS: list[dict[str, Any]] = [{}, {"scale": 0.3}, {"softcap": 4.0}, {"scale": 2.5, "softcap": 3.0}]
CHUNKS = [C, 5, 1]  # tokens at a time: whole, with a short first chunk, one by one

settings = pytest.mark.parametrize("setting", SETTINGS, ids=str)
chunks = pytest.mark.parametrize("chunk", CHUNKS)
biased = pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])


def inputs(*, bias: bool = True, dtype: torch.dtype = torch.float64, tokens: int = C) -> tuple[list[Tensor], Tensor]:
    """[hidden, weight, bias] as leaves, and targets. The values are exact in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    shapes: list[tuple[int, ...]] = [(tokens, D), (V, D), (V,)][: 2 + bias]
    parts = [torch.randn(shape, generator=generator).bfloat16().to(dtype).requires_grad_() for shape in shapes]
    return parts, torch.randint(V, (tokens,), generator=generator)


def definition(parts: list[Tensor], target: Tensor, *, scale: float = 1.0, softcap: float | None = None) -> Tensor:
    """log(exp(z_target) / sum_v exp(z_v)), token by token."""
    hidden, weight, *bias = (part.double() for part in parts)
    out = []
    for c in range(len(hidden)):
        z = torch.stack([hidden[c] @ weight[v] + (bias[0][v] if bias else 0.0) for v in range(len(weight))]) * scale
        if softcap is not None:
            z = softcap * torch.tanh(z / softcap)
        out.append(torch.log(z[target[c]].exp() / z.exp().sum()))
    return torch.stack(out)


def call(parts: list[Tensor], target: Tensor, chunk: int = C, **setting: Any) -> Tensor:
    hidden, weight, *bias = parts
    return token_logprobs(hidden, weight, target, *bias, max_logits=chunk * V, **setting)


def eager(parts: list[Tensor], target: Tensor, **setting: Any) -> Tensor:
    hidden, weight, *bias = parts
    return token_logprobs_eager(hidden, weight, target, *bias, **setting)


def gradients(logp: Tensor, parts: list[Tensor]) -> tuple[Tensor, ...]:
    """Of a weighted sum, so that every token counts differently."""
    return torch.autograd.grad(logp, parts, torch.linspace(-1, 2, len(logp), dtype=logp.dtype))


def relative(found: Tensor, expected: Tensor) -> float:
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm())


@settings
@biased
def test_the_specification_is_the_definition(setting: dict[str, Any], bias: bool) -> None:
    parts, target = inputs(bias=bias)
    logp, expected = eager(parts, target, **setting), definition(parts, target, **setting)
    torch.testing.assert_close(logp, expected, rtol=1e-12, atol=1e-12)
    for grad, by_definition in zip(gradients(logp, parts), gradients(expected, parts), strict=True):
        torch.testing.assert_close(grad, by_definition, rtol=1e-11, atol=1e-12)


@settings
@chunks
@biased
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 2e-6)])
def test_the_fused_twin_meets_the_specification(
    setting: dict[str, Any], chunk: int, bias: bool, dtype: torch.dtype, tolerance: float
) -> None:
    parts, target = inputs(bias=bias, dtype=dtype)
    exact, _ = inputs(bias=bias)
    logp, expected = call(parts, target, chunk, **setting), eager(exact, target, **setting)
    assert logp.dtype == dtype
    assert relative(logp, expected) < tolerance
    for grad, part, by_twin in zip(gradients(logp, parts), parts, gradients(expected, exact), strict=True):
        assert grad.dtype == part.dtype
        assert relative(grad, by_twin) < tolerance


@pytest.mark.parametrize(("chunk", "forward", "backward"), [(C, [C], []), (5, [3, 5, 5], [5, 3])])
def test_the_last_chunk_is_full_and_not_computed_again(
    chunk: int, forward: list[int], backward: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def counted(hidden: Tensor, *rest: Tensor) -> Tensor:
        seen.append(len(hidden))
        return torch.nn.functional.linear(hidden, *rest)

    monkeypatch.setattr(logprob, "linear", counted)
    parts, target = inputs()
    logp = call(parts, target, chunk)
    assert seen == forward
    gradients(logp, parts)
    assert seen == forward + backward
    with torch.no_grad():
        assert torch.equal(call(parts, target, chunk), logp)


@settings
@chunks
def test_gradcheck(setting: dict[str, Any], chunk: int) -> None:
    parts, target = inputs()
    assert torch.autograd.gradcheck(lambda *leaves: call(list(leaves), target, chunk, **setting), tuple(parts))


@chunks
def test_bfloat16_loses_only_the_rounding_of_its_logits(chunk: int) -> None:
    """Half a unit in the last place (eps / 2) of the largest logit, in the target's logit and in the log of the sum."""
    parts, target = inputs(bias=False, dtype=torch.bfloat16)
    exact, _ = inputs(bias=False)
    logp, expected = call(parts, target, chunk), definition(exact, target)
    largest = float((exact[0] @ exact[1].T).detach().abs().max())
    eps = torch.finfo(torch.bfloat16).eps
    assert logp.dtype == torch.float32
    assert float((logp - expected).detach().abs().max()) <= eps * largest
    for grad, by_definition in zip(gradients(logp, parts), gradients(expected, exact), strict=True):
        assert grad.dtype == torch.bfloat16
        # Probabilities are off by e^(eps * largest) - 1 at most; then they are rounded, and once more in the product.
        assert relative(grad, by_definition) <= eps * (largest + 1)


@pytest.mark.parametrize("setting", SETTINGS[1:], ids=str)
def test_bfloat16_scales_and_caps_as_exactly_as_the_specification(setting: dict[str, Any]) -> None:
    """The twin rounds the logits once, when they leave the matmul."""
    parts, target = inputs(bias=False, dtype=torch.bfloat16, tokens=500)
    exact, _ = inputs(bias=False, tokens=500)
    expected = eager(exact, target, **setting)
    assert relative(call(parts, target, **setting), expected) <= 1.1 * relative(
        eager(parts, target, **setting), expected
    )


def test_chunks_of_bfloat16_add_up_in_float32() -> None:
    """Many small gradients after one large one: a bfloat16 sum would lose every one of them."""
    tokens = 400
    hidden = torch.ones(tokens, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    target = torch.zeros(tokens, dtype=torch.long)
    upstream = torch.full((tokens,), 2.0**-9)
    upstream[0] = 1.0
    logp = token_logprobs(hidden, weight, target, max_logits=2)
    (grad,) = torch.autograd.grad(logp, weight, upstream)
    # Two equal logits: each token adds half its upstream to one row and takes it from the other.
    exact = 0.5 * (1 + 399 * 2.0**-9)
    assert grad[:, 0].tolist() == pytest.approx([exact, -exact], rel=2.0**-8)


@chunks
def test_no_tokens_give_no_values_and_zero_gradients(chunk: int) -> None:
    parts, target = inputs(tokens=0)
    logp = call(parts, target, chunk)
    assert logp.shape == (0,)
    for grad, part in zip(gradients(logp, parts), parts, strict=True):
        assert torch.equal(grad, torch.zeros_like(part))


@chunks
def test_without_gradients(chunk: int) -> None:
    parts, target = inputs()
    with torch.no_grad():
        logp = call(parts, target, chunk)
    assert not logp.requires_grad
    assert torch.equal(logp, call(parts, target, chunk))


@chunks
@pytest.mark.parametrize("trained", [0, 1, 2], ids=["hidden", "weight", "bias"])
def test_only_what_is_trained_gets_a_gradient(chunk: int, trained: int) -> None:
    parts, target = inputs()
    every = gradients(call(parts, target, chunk), parts)
    some = [part.detach().requires_grad_(n == trained) for n, part in enumerate(parts)]
    call(some, target, chunk).backward(torch.linspace(-1, 2, C, dtype=torch.float64))
    for n, part in enumerate(some):
        assert (part.grad is not None) == (n == trained)
        if part.grad is not None:
            assert torch.equal(part.grad, every[n])


@chunks
def test_a_second_backward_gives_the_same(chunk: int) -> None:
    """The first one writes its gradient over the logits."""
    parts, target = inputs()
    logp = call(parts, target, chunk)
    upstream = torch.linspace(-1, 2, C, dtype=torch.float64)
    first = torch.autograd.grad(logp, parts, upstream, retain_graph=True)
    second = torch.autograd.grad(logp, parts, upstream)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("size", [1e3, 1e6])
def test_huge_logits_stay_finite(size: float) -> None:
    hidden = torch.tensor([[size], [-size]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0]], requires_grad=True)
    logp = token_logprobs(hidden, weight, torch.tensor([0, 0]))
    assert logp.tolist() == [0.0, -2 * size]  # the second token's logits are -size and size
    grads = torch.autograd.grad(logp.sum(), (hidden, weight))
    assert grads[0].tolist() == [[0.0], [2.0]]
    assert grads[1].tolist() == [[-size], [size]]


# --- collisions ------------------------------------------------------------------------------------


def test_collisions_by_hand() -> None:
    hidden, weight = torch.ones(2, 1).double(), torch.tensor([[0.5], [0.25], [0.25]]).double().log()
    hidden[1] = 0.0  # probabilities 1/2, 1/4, 1/4, and three times 1/3
    expected = torch.tensor([0.25 + 2 * 0.0625, 1 / 3], dtype=torch.float64).log()
    torch.testing.assert_close(token_collisions_eager(hidden, weight), expected, rtol=1e-14, atol=0)


@settings
@chunks
@biased
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 2e-6)])
def test_collisions_come_with_the_same_log_probabilities(
    setting: dict[str, Any], chunk: int, bias: bool, dtype: torch.dtype, tolerance: float
) -> None:
    parts, target = inputs(bias=bias, dtype=dtype)
    hidden, weight, *more = parts
    logp, collision = token_logprobs_and_collisions(hidden, weight, target, *more, max_logits=chunk * V, **setting)
    assert relative(collision, token_collisions_eager(hidden, weight, *more, **setting)) <= tolerance
    assert not collision.requires_grad
    alone = call(parts, target, chunk, **setting)
    assert torch.equal(logp, alone)
    for one, other in zip(gradients(logp, parts), gradients(alone, parts), strict=True):
        assert torch.equal(one, other)


def test_collisions_of_certain_and_of_impossible_tokens_are_finite() -> None:
    hidden, weight = torch.ones(1, 1), torch.tensor([[200.0], [-200.0], [-200.0]])
    logp, collision = token_logprobs_and_collisions(hidden, weight, torch.tensor([1]))
    assert (logp.item(), collision.item()) == (-400.0, 0.0)
