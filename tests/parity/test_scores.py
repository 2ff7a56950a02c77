"""Log-probabilities and gradients of every architecture in every layout, against one sequence at a time."""

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from isopref.batch.packing import Budget, RowKind, plan_step
from isopref.batch.rows import build_microbatch
from isopref.batch.step import build_step
from isopref.data.table import ExampleTable
from isopref.errors import ModelError
from isopref.examples import PairTokens
from isopref.models import unfold
from isopref.models.parallel import checkpoint_layers
from isopref.models.policy import Policy
from isopref.models.probe import check_layout
from isopref.testing import oracle
from isopref.testing.cells import Cell, batch
from isopref.testing.exactness import build_module
from isopref.testing.expected import expected as exact
from isopref.testing.models import ARCHITECTURES, examples, random_pairs, tiny_model

KINDS: tuple[RowKind, ...] = ("shared", "packed", "padded", "padded_separate")
PADDED_ONLY = ("mpt",)
WITH_EXPERTS = ("qwen3_moe", "gpt_oss")
WINDOWED = ("olmo3", "mistral", "gemma2", "gemma3", "gpt_oss")
# Relative. GPT-2 is float64 throughout; the others keep norms or rotary embeddings in float32 inside.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-5}
EXACT = {"gpt2": 1e-10}

PAIRS = [*random_pairs(3, seed=1), *random_pairs(2, seed=2, longest=40)]  # the long ones pass the windows of 12
MIX = torch.randn(2, len(PAIRS), dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Expected(NamedTuple):
    policy: Policy
    logps: Tensor  # 2, P
    gradient: dict[str, Tensor]  # of a mix of all log-probabilities in which each counts differently


def mixed_gradient(policy: Policy, logps_2P: Tensor) -> dict[str, Tensor]:
    return oracle.gradient(policy.model, (logps_2P.double() * MIX).sum())


def oracle_logps(model: Any, pairs: list[PairTokens]) -> Tensor:
    logps = oracle.pair_logps(model, pairs)
    return torch.stack([logps.chosen, logps.rejected])


@cache
def expected(architecture: str, dtype: torch.dtype) -> Expected:
    policy = Policy(tiny_model(architecture, dtype=dtype))
    with policy.plain() as model:
        logps = oracle_logps(model, PAIRS)
    return Expected(policy, logps.detach(), mixed_gradient(policy, logps))


def cases() -> list[Any]:
    return [
        pytest.param(architecture, dtype, kind, id=f"{architecture}-{str(dtype).removeprefix('torch.')}-{kind}")
        for architecture in ARCHITECTURES
        for dtype in (torch.float64, torch.float32)
        for kind in KINDS
        if not (architecture in PADDED_ONLY and kind in ("shared", "packed"))
        if not (architecture in WITH_EXPERTS and dtype == torch.float64)  # no grouped matmul in float64 on CPUs
    ]


@pytest.mark.parametrize(("architecture", "dtype", "kind"), cases())
def test_scores_and_gradients_are_the_oracles(architecture: str, dtype: torch.dtype, kind: RowKind) -> None:
    policy, logps, gradient = expected(architecture, dtype)
    found = policy(build_microbatch(examples(PAIRS), kind)).logp.view(2, -1)
    tolerance = EXACT.get(architecture, TOLERANCE[dtype]) if dtype == torch.float64 else TOLERANCE[dtype]
    assert found.dtype == dtype
    assert float((found.detach() - logps).abs().max() / logps.abs().max()) <= tolerance
    assert oracle.relative_error(mixed_gradient(policy, found), gradient) <= tolerance


@pytest.mark.parametrize("architecture", WINDOWED)
def test_the_windows_matter_to_these_pairs(architecture: str) -> None:
    """Else the test above could not see whether windows are kept."""
    narrow, wide = (tiny_model(architecture, sliding_window=window) for window in (12, 1000))
    with torch.no_grad():
        difference = oracle_logps(wide, PAIRS) - oracle_logps(narrow, PAIRS)
    assert float(difference.abs().max()) > 0.1


@pytest.mark.parametrize("kind", ["shared", "packed"])
@pytest.mark.parametrize("architecture", ["gpt2", "mistral", "gemma2"])
def test_padding_of_a_row_changes_nothing(architecture: str, kind: RowKind) -> None:
    policy, logps, gradient = expected(architecture, torch.float64)
    row = build_microbatch(examples(PAIRS), kind, row_tokens=400)  # more than the 256 positions the models have
    found = policy(row).logp.view(2, -1)
    tolerance = EXACT.get(architecture, TOLERANCE[torch.float64])
    assert float((found.detach() - logps).abs().max() / logps.abs().max()) <= tolerance
    assert oracle.relative_error(mixed_gradient(policy, found), gradient) <= tolerance


@pytest.mark.parametrize("kind", KINDS)
def test_the_bias_of_a_head_counts(kind: RowKind) -> None:
    """None of the models above has one; Phi does."""
    model: Any = tiny_model("gpt2", dtype=torch.float64)
    model.lm_head.bias = torch.nn.Parameter(torch.linspace(-2, 2, len(model.lm_head.weight), dtype=torch.float64))
    policy = Policy(model)
    with policy.plain() as own:
        logps = oracle_logps(own, PAIRS)
    found = policy(build_microbatch(examples(PAIRS), kind)).logp.view(2, -1)
    torch.testing.assert_close(found, logps, rtol=1e-10, atol=0)
    assert oracle.relative_error(mixed_gradient(policy, found), mixed_gradient(policy, logps)) <= 1e-10


def test_the_embedding_of_the_pad_token_learns() -> None:
    """Not by the oracle's gradient: transformers withholds that row's. By a small step along ours."""
    policy = Policy(tiny_model("llama", dtype=torch.float64, pad_token_id=int(PAIRS[0].prompt[0])))
    weight: Any = policy.model.get_input_embeddings().weight
    pad = policy.model.config.pad_token_id
    row = build_microbatch(examples(PAIRS), "shared")
    with torch.no_grad():
        weight[pad] = weight[pad - 1]  # a new model has zeros there
    (policy(row).logp.view(2, -1).double() * MIX).sum().backward()
    gradient = weight.grad[pad].clone()
    found = []
    with torch.no_grad():
        for step in (1e-4, -2e-4):  # ahead by one, then behind by one
            weight[pad] += step * gradient / gradient.norm()
            found.append(float((policy(row).logp.view(2, -1).double() * MIX).sum()))
    assert gradient.norm() > 0.1
    assert (found[0] - found[1]) / 2e-4 == pytest.approx(float(gradient.norm()), rel=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_a_filler_gives_every_parameter_a_gradient_of_zero(kind: RowKind) -> None:
    policy = Policy(tiny_model("llama"))
    logps = policy(build_microbatch([], kind)).logp
    assert logps.shape == (0,)
    logps.sum().backward()
    for name, parameter in policy.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


@pytest.mark.parametrize("kind", KINDS)
def test_scores_of_a_bfloat16_model_are_in_float32(kind: RowKind) -> None:
    policy = Policy(tiny_model("llama", dtype=torch.bfloat16))
    assert policy(build_microbatch(examples(PAIRS), kind)).logp.view(2, -1).dtype == torch.float32


def test_layouts_may_take_turns_and_leave_the_model_as_it_was() -> None:
    policy, logps, _ = expected("llama", torch.float64)
    own = policy.own_attention
    with torch.no_grad():
        for kind in (*KINDS, *reversed(KINDS)):
            torch.testing.assert_close(
                policy(build_microbatch(examples(PAIRS), kind)).logp.view(2, -1), logps, rtol=1e-6, atol=0
            )
    assert policy.model.config._attn_implementation == "isopref_segments"
    with policy.plain() as model, torch.no_grad():
        assert model.config._attn_implementation == own
        torch.testing.assert_close(oracle_logps(model, PAIRS), logps, rtol=1e-6, atol=0)
    assert policy.model.config._attn_implementation == "isopref_segments"


EXPERTS = {**ARCHITECTURES["llama"][1], "num_local_experts": 4, "num_experts_per_tok": 2, "router_jitter_noise": 0.3}


@pytest.mark.parametrize("recomputed_layers", [0, 2])
@pytest.mark.parametrize("architecture", ["mixtral", "phimoe"])
@pytest.mark.parametrize("kind", KINDS)
def test_routers_choose_in_training_as_they_do_in_eval_mode(
    kind: RowKind, architecture: str, recomputed_layers: int
) -> None:
    """Mixtral's jitter is noise; Phi-MoE's is a threshold as well, and its routers draw from what is above it."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(CONFIG_MAPPING[architecture](**EXPERTS)).eval()
    logps = oracle_logps(model, PAIRS)
    gradient = oracle.gradient(model, (logps.double() * MIX).sum())
    policy = Policy(model)
    checkpoint_layers(policy, recomputed_layers)
    check_layout(policy, kind)
    policy.train()
    found = policy(build_microbatch(examples(PAIRS), kind)).logp.view(2, -1)
    torch.testing.assert_close(found, logps, rtol=1e-5, atol=0)
    assert oracle.relative_error(mixed_gradient(policy, found), gradient) <= 1e-5


MASKED_WINDOW = {"num_local_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize("window", [12, 120])
@pytest.mark.parametrize("kind", ["shared", "packed"])
def test_a_window_that_is_only_in_the_mask_is_refused(
    kind: RowKind, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PhiMoE hands its window to the mask, not to the attention; the long one is too long to be probed.

    Unfolded, its attention gets such masks.
    """
    settings = {**ARCHITECTURES["mistral"][1], **MASKED_WINDOW, "sliding_window": window}
    monkeypatch.setitem(ARCHITECTURES, "phimoe", ("phimoe", settings))
    check_layout(Policy(tiny_model("phimoe")), kind)
    monkeypatch.setattr(unfold, "MASKING", ())
    with pytest.raises(ModelError, match=r"Set layout\.rows: padded"):
        check_layout(Policy(tiny_model("phimoe")), kind)


def test_evaluation_under_the_trainer_scores_as_the_objective_does() -> None:
    cell = Cell(ld_alpha=0.4)
    pairs, _ = batch(cell.num_pairs)
    table = ExampleTable.from_tokens(pairs)
    module, _ = build_module(cell, exact(cell)[3])
    cut = plan_step(table.lengths, Budget("shared", 4096), num_ranks=1)
    step = build_step(table, np.arange(cell.num_pairs), cut, "shared", "token")
    (found,) = module.eval_batch({"step": step})
    wanted = oracle.pair_logps(tiny_model(cell.architecture, dtype=getattr(torch, cell.dtype)), pairs, 0.4)
    order = step.work[0].index
    for side in ("chosen", "rejected"):
        torch.testing.assert_close(getattr(found, side), getattr(wanted, side).detach()[order], rtol=1e-6, atol=0)
