"""Prefix trees: any number of answers, nested beginnings, one prompt in several examples, against the oracle."""

from functools import cache
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from isopref.batch import rows
from isopref.batch.packing import RowKind
from isopref.batch.rows import FEWEST_SHARED, build_microbatch
from isopref.examples import Example, PairTokens
from isopref.models.policy import Policy
from isopref.score import compared, score
from isopref.testing import oracle
from isopref.testing.models import VOCABULARY, tiny_model
from isopref.types import IntArray, Needs

KINDS: tuple[RowKind, ...] = ("shared", "packed", "padded", "padded_separate")
BOUNDS = {"gpt2": 1e-10, "llama": 1e-6, "mistral": 1e-6}  # float64 throughout; float32 inside; with a window of 12
DRAW = np.random.default_rng(5)
MOST = 8  # answers of an example


def tokens(count: int) -> IntArray:
    return DRAW.integers(3, VOCABULARY, size=count)


def nested(prompt: IntArray) -> Example:
    """Answers that part at different depths: all share `trunk`, two of them `branch` too, one is a part of another."""
    trunk, branch = tokens(FEWEST_SHARED + 3), tokens(FEWEST_SHARED + 1)
    ends = [tokens(n) for n in (4, 1, 6)]
    answers = (
        np.concatenate([trunk, branch, ends[0]]),
        np.concatenate([trunk, ends[1]]),
        np.concatenate([trunk, branch, ends[2]]),
        np.concatenate([trunk, branch]),
        tokens(3),
    )
    return Example(prompt, answers, ((0, 1), (2, 1), (0, 4), (3, 4)))


def everyone_against_the_next(count: int, prompt: IntArray) -> Example:
    answers = tuple(tokens(int(n)) for n in DRAW.integers(1, 30, size=count))
    return Example(prompt, answers, tuple((k, k + 1) for k in range(count - 1)))


PROMPT = tokens(7)
EXAMPLES = [
    everyone_against_the_next(1, tokens(5)),
    everyone_against_the_next(3, PROMPT),
    nested(tokens(9)),
    everyone_against_the_next(MOST, tokens(2)),
    everyone_against_the_next(2, PROMPT),  # the prompt of another example too
    nested(PROMPT),
]


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


def pairs_of(example: Example) -> list[PairTokens]:
    """Every comparison as a pair of its own."""
    return [PairTokens(example.prompt, example.answers[b], example.answers[w]) for b, w in example.comparisons]


@pytest.mark.parametrize("kind", KINDS)
def test_comparisons_are_the_pairs_they_stand_for(kind: RowKind) -> None:
    """Values and gradient of what a pair's loss takes: also the discounted ones of LD-DPO, and WPO's weights."""
    policy = expected("gpt2")[0]
    needs = Needs(heads=True, confidence=True)
    trees = build_microbatch(EXAMPLES, kind)
    alone = build_microbatch([pair.example for one in EXAMPLES for pair in pairs_of(one)], "padded")
    found, wanted = (compared(score(policy, one, needs), one, ld_alpha=0.3) for one in (trees, alone))
    mix = torch.randn(2, len(wanted.chosen), dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    gradients = []
    for one in (found, wanted):
        gradients.append(oracle.gradient(policy.model, (torch.stack([one.chosen, one.rejected]) * mix).sum()))
    for name in ("chosen", "rejected", "num_chosen", "num_rejected", "whole_chosen", "weight"):
        torch.testing.assert_close(getattr(found, name), getattr(wanted, name), rtol=1e-10, atol=0)
    assert oracle.relative_error(*gradients) <= 1e-10


def test_a_row_of_trees_holds_far_fewer_tokens() -> None:
    (shared,), (packed,) = (build_microbatch(EXAMPLES, kind).passes for kind in ("shared", "packed"))
    assert shared.input_ids.numel() < 0.7 * packed.input_ids.numel()


@pytest.mark.parametrize("example", [0, 1, 2, 3], ids=["one", "three", "nested", "eight"])
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
