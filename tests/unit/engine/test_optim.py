"""The optimizers, each by its definition on small matrices."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from isopref.engine.optim import HISTORY, Kind, Muon, SkippingAdamW, build_optimizer, orthogonal
from isopref.models.policy import Policy
from isopref.testing.models import ARCHITECTURES, tiny_model, with_adapter

COMMON: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "seed": 0}


def build(
    kind: Kind, model: nn.Module, *, lr: float = 0.01, dtype: torch.dtype = torch.float32
) -> torch.optim.Optimizer:
    return build_optimizer(kind, model, lr=lr, compute_dtype=dtype, **COMMON)


def train(optimizer: torch.optim.Optimizer, steps: int = 3, seed: int = 0) -> None:
    """Steps with gradients that are drawn anew for each."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        if isinstance(optimizer, SkippingAdamW):
            optimizer.observe(torch.tensor(1.0), torch.tensor(1.0))
        optimizer.step()


def weights(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters() if parameter.requires_grad]


@pytest.mark.parametrize("kind", ["adamw", "adamw_8bit", "adamw_skip", "muon"])
def test_only_what_is_trained_is_held(kind: Kind) -> None:
    policy = Policy(with_adapter(tiny_model("llama"), "lora"))
    held = {id(p) for group in build(kind, policy).param_groups for p in group["params"]}
    assert held == {id(p) for name, p in policy.named_parameters() if "lora_" in name}


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_the_biases_of_fused_experts_are_biases(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are one matrix, of which each row is the bias of an expert: not decayed, nor made orthogonal."""
    monkeypatch.setitem(ARCHITECTURES, "gpt_oss", ("gpt_oss", {**ARCHITECTURES["llama"][1], "num_local_experts": 4}))
    policy = Policy(tiny_model("gpt_oss"))
    found = {
        name: (group["weight_decay"], group.get("orthogonal", False))
        for group in build(kind, policy).param_groups
        for name, one in policy.named_parameters()
        if any(one is parameter for parameter in group["params"])
    }
    biases = {name: how for name, how in found.items() if name.endswith("bias")}
    assert any(dict(policy.named_parameters())[name].ndim == 2 for name in biases)
    assert set(biases.values()) == {(0.0, False)}
    assert found["model.model.layers.0.mlp.experts.down_proj"] == (0.1, False)
    assert found["model.model.layers.0.self_attn.q_proj.weight"] == (0.1, kind == "muon")


@pytest.mark.parametrize(("kind", "bound"), [("adamw_skip", 1e-6), ("adamw_8bit", 2e-2)])
def test_they_are_adamw(kind: Kind, bound: float) -> None:
    """To rounding, and to that of 8 bits where the matrices are large enough for it."""
    models = [Policy(tiny_model("llama", hidden_size=64, intermediate_size=128, head_dim=16)) for _ in range(2)]
    start = weights(models[0])
    with torch.compiler.set_stance("force_eager"):
        for model, one in zip(models, ("adamw", kind), strict=True):
            train(build(one, model))
    for before, expected, found in zip(start, *map(weights, models), strict=True):
        assert (found - expected).norm() <= bound * (expected - before).norm()


def test_8bit_state_is_in_8_bits() -> None:
    policy = Policy(tiny_model("llama", hidden_size=64, intermediate_size=128, head_dim=16))
    optimizer = build("adamw_8bit", policy)
    with torch.compiler.set_stance("force_eager"):
        train(optimizer, steps=1)
    large = [state["exp_avg"] for p, state in optimizer.state.items() if p.numel() >= 4096 and p.numel() % 256 == 0]
    assert len(large) == 10  # five matrices in each of two layers
    assert all(state.codes.dtype == torch.uint8 for state in large)


def test_stochastic_rounding_keeps_small_updates() -> None:
    """Updates of a hundredth of the spacing at 1: rounding to nearest loses all of them, at random none on average.

    With a constant gradient AdamW moves by the rate, so 100 steps of 2**-7 / 100 make 2**-7; of 4,096 weights the mean
    is within 4 standard errors of that.
    """
    steps, spacing = 100, 2.0**-7

    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((64, 64), 1.5, dtype=torch.bfloat16))

    moved = {}
    for kind in ("adamw", "adamw_sr"):
        model = One()
        optimizer = build_optimizer(
            kind,
            model,
            lr=spacing / steps,
            compute_dtype=torch.bfloat16,
            **{**COMMON, "weight_decay": 0.0},
        )
        with torch.compiler.set_stance("force_eager"):
            for _ in range(steps):
                model.weight.grad = torch.ones_like(model.weight)
                optimizer.step()
        moved[kind] = float((1.5 - model.weight.detach().double()).mean())
    assert moved["adamw"] == 0.0
    assert moved["adamw_sr"] == pytest.approx(spacing, rel=4 / 64)


def test_random_rounding_is_the_same_again() -> None:
    """The draws come from the seed and the step, whatever was drawn before."""
    found = []
    for drawn in (0, 7):
        policy = Policy(tiny_model("llama", dtype=torch.bfloat16))
        optimizer = build("adamw_sr", policy, lr=1e-4)
        torch.rand(drawn)
        with torch.compiler.set_stance("force_eager"):
            train(optimizer)
        found.append(weights(policy))
    assert all(map(torch.equal, *found))


def test_a_step_that_stands_out_is_skipped() -> None:
    """After enough steps with norms near 1, one of 100 changes nothing; neither weights nor moments."""
    policy = Policy(tiny_model("llama"))
    optimizer = build("adamw_skip", policy)
    assert isinstance(optimizer, SkippingAdamW)
    generator = torch.Generator().manual_seed(0)
    for _ in range(HISTORY):
        noise = torch.rand((), generator=generator)
        optimizer.observe(1 + 0.1 * noise, 1 + 0.1 * noise)
    again = SkippingAdamW(optimizer.param_groups, rolling_interval_length=HISTORY)
    again.restore(optimizer.history())
    for one in (optimizer, again):
        before = weights(policy)
        for parameter in policy.parameters():
            parameter.grad = torch.ones_like(parameter)
        one.observe(torch.tensor(1.05), torch.tensor(100.0))
        one.step()
        assert float(one.step_skipped) == 1
        assert all(map(torch.equal, before, weights(policy)))
        one.observe(torch.tensor(1.05), torch.tensor(1.05))
        one.step()
        assert float(one.step_skipped) == 0
        assert not any(map(torch.equal, before, weights(policy)))


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (32, 32)])
def test_orthogonal_is_the_polar_factor(shape: tuple[int, int]) -> None:
    """Singular vectors stay, singular values come near 1 (Muon's polynomial leaves them between about 0.7 and 1.2)."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    inner = u.T @ orthogonal(matrix) @ v.T
    values = inner.diagonal()
    assert (inner - values.diag()).abs().max() < 1e-9
    assert values.min() > 0.3
    assert values.max() < 1.3


def test_muon_turns_the_layers_matrices_and_leaves_the_rest_to_adamw() -> None:
    """One step from rest: the momentum is the gradient; 0.2 sqrt(larger side) makes the update as large as AdamW's."""
    policy, other = (Policy(tiny_model("llama", dtype=torch.float64)) for _ in range(2))
    start = dict(zip((n for n, _ in policy.named_parameters()), weights(policy), strict=True))
    optimizer = build("muon", policy, dtype=torch.float64)
    assert isinstance(optimizer, Muon)
    generator = torch.Generator().manual_seed(0)
    gradients = {
        n: torch.randn(p.shape, generator=generator, dtype=torch.float64) for n, p in policy.named_parameters()
    }
    for model, one in ((policy, optimizer), (other, build("adamw", other, dtype=torch.float64))):
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name].clone()
        one.step()
    by_adamw = dict(other.named_parameters())
    for name, found in policy.named_parameters():
        if "layers" in name and found.ndim == 2:
            update = 0.2 * max(found.shape) ** 0.5 * orthogonal(gradients[name])
            expected = start[name] * (1 - 0.01 * 0.1) - 0.01 * update
            assert 0.1 < float(update.square().mean().sqrt()) < 0.3
        else:
            expected = by_adamw[name].detach()
        torch.testing.assert_close(found.detach(), expected, rtol=0, atol=1e-12)
