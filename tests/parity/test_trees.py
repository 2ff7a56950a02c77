"""Prefix trees: any number of answers, nested beginnings, one prompt in several examples, against the oracle."""

from functools import cache
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from isopref.batch import rows
from isopref.batch.packing import RowKind
from isopref.batch.rows import build_microbatch
from isopref.batch.terms import compared
from isopref.examples import PairTokens
from isopref.models.policy import Policy
from isopref.score import score
from isopref.testing import oracle
from isopref.testing.families import tiny_config, tiny_family
from isopref.testing.models import tiny_model, tree_examples
from isopref.types import IntArray, Needs

KINDS: tuple[RowKind, ...] = ("shared", "packed", "padded", "padded_separate")
BOUNDS = {"gpt2": 1e-10, "llama": 1e-6, "mistral": 1e-6}  # float64 throughout; float32 inside; with a window of 12


EXAMPLES = tree_examples(seed=5)


def in_rounds(values: list[list[Any]]) -> list[Any]:
    """The first of every list, the second of every list that has one, and so on: how a microbatch numbers answers."""
    return [one[k] for k in range(max(map(len, values))) for one in values if k < len(one)]


@cache
def expected(architecture: str) -> tuple[Policy, list[Tensor], Tensor, dict[str, Tensor]]:
    """Log-probabilities of all answers by example, a mix of them, and its gradient."""
    policy = Policy(tiny_model(architecture, dtype=torch.float64))
    with policy.plain() as model:
        logps = [
            torch.stack([oracle.sequence_logp(model, one.prompt, answer) for answer in one.answers]) for one in EXAMPLES
        ]
    mix = torch.randn(sum(map(len, logps)), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    flat = torch.stack(in_rounds([list(one) for one in logps]))
    return policy, logps, mix, oracle.gradient(policy.model, (flat * mix).sum(), again=True)


@pytest.mark.parametrize("architecture", BOUNDS)
@pytest.mark.parametrize("kind", KINDS)
def test_answers_and_gradients_are_the_oracles(kind: RowKind, architecture: str) -> None:
    policy, logps, mix, gradient = expected(architecture)
    found = policy(build_microbatch(EXAMPLES, kind)).logp
    torch.testing.assert_close(found, torch.stack(in_rounds([list(one) for one in logps])), rtol=1e-6, atol=0)
    assert oracle.relative_error(oracle.gradient(policy.model, (found * mix).sum()), gradient) <= BOUNDS[architecture]


@pytest.mark.parametrize("kind", ["shared", "packed"])
@pytest.mark.parametrize(
    "family",
    [
        *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "lfm2", "lfm2_moe"),
        *("bamba", "falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h", "zamba2"),
    ],
)
def test_layers_that_follow_a_tree_are_transformers_own(family: str, kind: RowKind) -> None:
    """Every model with such layers: scores and gradients of a row against those of a padded batch."""
    check_following(tiny_family(family), kind)


@pytest.mark.parametrize("before_gate", [False, True])
def test_falcon_h1_may_norm_what_its_states_give(before_gate: bool) -> None:
    config = tiny_config("falcon_h1")
    config.mamba_rms_norm, config.mamba_norm_before_gate = True, before_gate
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config)
    check_following(model, "shared")


def test_steps_of_mamba_keep_to_their_limits() -> None:
    check_following(tiny_model("bamba", time_step_limit=(0.5, 1.0)), "shared")


def check_following(model: PreTrainedModel, kind: RowKind) -> None:
    policy = Policy(model).train()
    assert policy.following
    found = {}
    both: tuple[RowKind, ...] = (kind, "padded")
    for rows_kind in both:
        logp = policy(build_microbatch(EXAMPLES, rows_kind)).logp
        mix = torch.linspace(-1, 1, len(logp))
        found[rows_kind] = logp.detach(), oracle.gradient(policy.model, (logp * mix).sum())
    torch.testing.assert_close(found[kind][0], found["padded"][0], rtol=1e-5, atol=1e-4)
    assert oracle.relative_error(found[kind][1], found["padded"][1]) <= 5e-5


@pytest.mark.parametrize("kind", KINDS)
def test_comparisons_are_the_pairs_they_stand_for(kind: RowKind) -> None:
    """Values and gradient of what a pair's loss takes: also the discounted ones of LD-DPO, and WPO's weights."""
    policy = expected("gpt2")[0]
    needs = Needs(heads=True, confidence=True)
    trees = build_microbatch(EXAMPLES, kind)
    pairs = [PairTokens(*pair[:3]) for pair in oracle.comparisons(EXAMPLES)]
    alone = build_microbatch([pair.example for pair in pairs], "padded")
    found, wanted = (compared(score(policy, one, needs), one) for one in (trees, alone))
    mix = torch.randn(2, len(wanted.chosen), dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    gradients = []
    for one in (found, wanted):
        assert one.heads is not None
        values = torch.stack([one.chosen, one.rejected]) + 0.3 * one.heads
        gradients.append(oracle.gradient(policy.model, (values * mix).sum()))
    for name in ("chosen", "rejected", "num_chosen", "num_rejected", "heads", "weight"):
        torch.testing.assert_close(getattr(found, name), getattr(wanted, name), rtol=1e-10, atol=0)
    assert oracle.relative_error(*gradients) <= 1e-10


def test_a_row_of_trees_holds_far_fewer_tokens() -> None:
    (shared,), (packed,) = (build_microbatch(EXAMPLES, kind).passes for kind in ("shared", "packed"))
    assert shared.input_ids.numel() < 0.7 * packed.input_ids.numel()


@pytest.mark.parametrize("example", [0, 1, 2, 4], ids=["one", "three", "nested", "eight"])
def test_a_branch_that_sees_its_sibling_is_noticed(example: int) -> None:
    """The bug that trees invite: what a segment sees is the row before it, not the path from its root."""
    policy, logps, _, _ = expected("gpt2")
    own = rows._Row.segment

    def leaking(row: Any, some: IntArray, positions: IntArray, seen_before: IntArray) -> IntArray:
        before = np.arange(row.length)
        return own(row, some, positions, before if len(seen_before) else seen_before)

    with mock.patch.object(rows._Row, "segment", leaking):
        found = policy(build_microbatch([EXAMPLES[example]], "shared")).logp
    off = float((found - logps[example]).detach().abs().max())
    assert (off > 1e-3) == (example != 0)  # a single answer has no sibling
