"""What layers learn of the row being computed: those that are not handed its segments, and those with a state."""

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from isopref.batch.packing import RowKind
from isopref.batch.rows import build_microbatch
from isopref.errors import ModelError
from isopref.examples import PairTokens
from isopref.models import offload
from isopref.models.parallel import checkpoint_layers
from isopref.models.policy import Policy
from isopref.models.probe import check_layout
from isopref.models.row import Row, computing, current_row
from isopref.testing import oracle
from isopref.testing.families import tiny_family
from isopref.testing.models import examples, random_pairs, tiny_model, tree_examples
from isopref.types import Segments
from support import mutations

# The same lengths with the sides exchanged: two rows as long as each other, cut at other places.
BATCHES = [random_pairs(3, seed=1, longest=20)]
BATCHES.append([PairTokens(pair.prompt, pair.rejected, pair.chosen) for pair in BATCHES[0]])
FOLLOWING = ("olmo_hybrid", "lfm2", "bamba")
ASKING = ("stablelm", *FOLLOWING, "mamba")


def gradient(policy: Policy, *, together: bool) -> dict[str, Tensor]:
    """Of two microbatches: each forward and backward by itself, or both forward passes before any backward."""
    policy.zero_grad()
    losses = []
    for pairs in BATCHES:
        losses.append(policy(build_microbatch(examples(pairs), "shared")).logp.sum())
        if not together:
            losses.pop().backward()
    for loss in losses:
        loss.backward()
    return {name: parameter.grad.clone() for name, parameter in policy.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("architecture", [*ASKING, "llama"])
def test_a_layer_recomputes_in_its_own_row(architecture: str) -> None:
    """Checkpointing calls layers again in the backward pass, when another microbatch was the last to be computed."""
    policy = Policy(tiny_model(architecture, dtype=torch.float64)).train()
    expected = gradient(policy, together=False)
    checkpoint_layers(policy, 2)
    for together in (False, True):
        assert oracle.relative_error(gradient(policy, together=together), expected) <= 1e-12


@pytest.mark.parametrize("family", ["falcon", "glm_moe_dsa", "llama4_text", "minimax_m3_vl_text", "deepseek_v4"])
def test_unfolded_attention_recomputes_in_its_own_row(family: str) -> None:
    """Some layers of MiniMax-M3 follow segments, the others are unfolded with another attention."""
    policy = Policy(tiny_family(family)).train()
    expected = gradient(policy, together=False)
    checkpoint_layers(policy, 2)
    for together in (False, True):
        assert oracle.relative_error(gradient(policy, together=together), expected) <= 1e-5


@pytest.mark.parametrize("architecture", ["stablelm", "olmo_hybrid"])
@pytest.mark.parametrize("wrong", ["none", "other"])
def test_another_row_in_the_recomputation_would_be_noticed(
    architecture: str, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bug that the test above is for: a recomputation without a row, or in the row of the last microbatch."""
    policy = Policy(tiny_model(architecture, dtype=torch.float64)).train()
    expected = gradient(policy, together=False)
    last = build_microbatch(examples(BATCHES[1]), "shared").passes[0].segments
    assert last is not None
    planted = None if wrong == "none" else Row(last)
    monkeypatch.setattr(offload, "contexts", lambda: (nullcontext(), computing(planted)))
    checkpoint_layers(policy, 2)
    with pytest.raises((AssertionError, CheckpointError, ModelError, RuntimeError)):
        assert oracle.relative_error(gradient(policy, together=True), expected) <= 1e-3


def test_no_row_is_left_behind() -> None:
    policy = Policy(tiny_model("stablelm"))
    policy(build_microbatch(examples(BATCHES[0]), "shared"))
    assert current_row() is None
    policy.model.model.layers[0].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        policy(build_microbatch(examples(BATCHES[0]), "shared"))
    assert current_row() is None


def test_a_second_policy_of_a_model_unfolds_once() -> None:
    model: Any = tiny_model("mamba")
    names = [Policy(model).unfolded for _ in range(2)]
    assert names == [("backbone.layers.0.mixer", "backbone.layers.1.mixer")] * 2
    assert len(model.backbone.layers[0].mixer._forward_pre_hooks) == 1


@pytest.mark.parametrize(("architecture", "name"), zip(FOLLOWING, ("linear_attn", "conv", "mamba"), strict=True))
def test_a_second_policy_of_a_model_follows_as_the_first(architecture: str, name: str) -> None:
    model = tiny_model(architecture)
    assert [Policy(model).following for _ in range(2)] == [(f"model.layers.0.{name}",)] * 2
    Policy(model).unfold_all()
    again = Policy(model)  # the probe had its reasons
    assert (again.following, again.unfolded) == ((), (f"model.layers.0.{name}",))
    check_layout(again, "shared")


@pytest.mark.parametrize("architecture", FOLLOWING)
def test_a_following_layer_computes_a_prompt_once(architecture: str) -> None:
    """What its projections get is the row, and not a sequence more."""
    policy = Policy(tiny_model(architecture))
    seen: list[torch.Size] = []
    layer = policy.model.get_submodule(policy.following[0])
    projection = layer.get_submodule("q_proj" if architecture == "olmo_hybrid" else "in_proj")
    projection.register_forward_hook(lambda _, args, __: seen.append(args[0].shape))
    microbatch = build_microbatch(tree_examples(), "shared")
    policy(microbatch)
    assert seen == [(microbatch.passes[0].input_ids.shape[1], 32)]


@pytest.mark.parametrize("kind", ["shared", "packed"])
@pytest.mark.parametrize("architecture", FOLLOWING)
def test_a_layer_that_follows_wrongly_is_unfolded(
    architecture: str, kind: RowKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kind of layer may change with a version of transformers: then the probe notices, and the run goes on."""
    policy = Policy(tiny_model(architecture))
    names = policy.following
    monkeypatch.setattr("isopref.models.follow.tree_convolution", lambda x, *_: x)
    check_layout(policy, kind)
    assert (policy.following, policy.unfolded) == ((), names)


def test_generation_keeps_the_layers_own_cache() -> None:
    """Outside packed rows a following layer is transformers' own, with its cache."""
    for architecture in FOLLOWING:
        model: Any = tiny_model(architecture)
        ids = torch.arange(3, 12)[None]
        expected = model.generate(ids, max_new_tokens=6, do_sample=False)
        with Policy(model).plain():
            assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False), expected)


def segments_of_trees() -> tuple[Segments, Tensor]:
    one = build_microbatch(tree_examples(), "shared", row_tokens=400).passes[0]
    assert one.segments is not None
    return one.segments, one.input_ids


def test_buckets_hold_every_segment_after_its_ancestors() -> None:
    """Nested answers included: each sequence of a bucket is one of the examples' own, or the row's padding."""
    segments, input_ids = segments_of_trees()
    whole = {tuple(np.concatenate([e.prompt, answer]).tolist()) for e in tree_examples() for answer in e.answers}
    the_row = Row(segments)
    found = set()
    for bucket in the_row.buckets:
        batch = the_row.unfold(the_row.keys(input_ids + 1), bucket) - 1  # padding is then -1
        assert batch.shape == bucket.shape
        assert (batch >= 0).sum() * 2 >= batch.numel()
        found |= {tuple(token for token in line if token >= 0) for line in batch.tolist()}
    padding = {line for line in found if not any(line)}
    assert len(padding) == 1
    assert found - padding <= whole
    # An answer that is the beginning of another one has no segment of its own.
    assert all(any(line[: len(one)] == one for line in found) for one in whole)


def test_folding_undoes_unfolding() -> None:
    segments, _ = segments_of_trees()
    the_row = Row(segments)
    x = torch.randn(1, segments.query_bounds[-1], 3, dtype=torch.float64).requires_grad_()
    batches = [the_row.unfold(the_row.keys(x), bucket) for bucket in the_row.buckets]
    folded = the_row.fold(batches)
    assert torch.equal(folded, x)
    grad = torch.randn_like(folded)
    assert torch.equal(torch.autograd.grad(folded, x, grad)[0], grad)


class Sum(nn.Module):
    """The simplest state there is."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states.cumsum(dim=1)


@pytest.mark.parametrize("kind", ["shared", "packed"])
def test_a_layer_with_a_state_that_is_not_known_is_refused(kind: RowKind) -> None:
    """Nothing in its structure tells; the probe does."""
    policy = Policy(tiny_model("llama"))
    policy.model.model.layers[0].mlp.up_proj = nn.Sequential(policy.model.model.layers[0].mlp.up_proj, Sum())
    check_layout(policy, "padded")
    with pytest.raises(ModelError, match="a rejected answer moves by"):
        check_layout(policy, kind)


@pytest.mark.parametrize("kind", ["shared", "packed"])
@pytest.mark.parametrize("architecture", [one for one in ASKING if one != "stablelm"])
def test_a_state_that_runs_through_the_row_is_caught(
    architecture: str, kind: RowKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = Policy(tiny_model(architecture))
    check_layout(policy, kind)
    monkeypatch.setattr("isopref.models.unfold.current_row", lambda: None)
    monkeypatch.setattr("isopref.models.follow.current_row", lambda: None)
    with pytest.raises(ModelError, match=r"Set layout\.rows: padded"):
        check_layout(policy, kind)


@pytest.mark.parametrize("architecture", [*FOLLOWING, "mamba"])
def test_a_branch_that_starts_from_its_siblings_state_is_caught(architecture: str) -> None:
    policy = Policy(tiny_model(architecture))
    with mutations.state_of_a_sibling(), pytest.raises(ModelError, match="a rejected answer moves by"):
        check_layout(policy, "shared")
