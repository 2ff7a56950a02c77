"""How a row's segments reach the attention of models whose layers drop keyword arguments, such as StableLM."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError

from isopref.batch.rows import build_microbatch
from isopref.errors import ModelError
from isopref.examples import PairTokens
from isopref.models import attention
from isopref.models.attention import held_segments, hold_segments
from isopref.models.parallel import checkpoint_layers
from isopref.models.policy import Policy
from isopref.models.probe import check_layout
from isopref.testing import oracle
from isopref.testing.models import examples, random_pairs, tiny_model

# The same lengths with the sides exchanged: two rows as long as each other, cut at other places.
BATCHES = [random_pairs(3, seed=1, longest=20)]
BATCHES.append([PairTokens(pair.prompt, pair.rejected, pair.chosen) for pair in BATCHES[0]])


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
    return {name: parameter.grad.clone() for name, parameter in policy.named_parameters()}  # type: ignore[union-attr]


@pytest.mark.parametrize("architecture", ["stablelm", "nemotron", "llama"])
def test_a_layer_recomputes_with_the_segments_of_its_own_microbatch(architecture: str) -> None:
    """Checkpointing calls layers again in the backward pass, when another microbatch was the last to be computed."""
    policy = Policy(tiny_model(architecture, dtype=torch.float64)).train()
    expected = gradient(policy, together=False)
    checkpoint_layers(policy, 2)
    for together in (False, True):
        assert oracle.relative_error(gradient(policy, together=together), expected) <= 1e-12


def test_segments_of_another_microbatch_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bug that the test above is for: one variable for the whole forward pass. It fails, or differs."""
    policy = Policy(tiny_model("stablelm", dtype=torch.float64)).train()
    expected = gradient(policy, together=False)
    checkpoint_layers(policy, 2)
    last: list[Any] = []

    def latest(module: torch.nn.Module) -> Any:
        if torch._C._current_graph_task_id() < 0:  # not in a backward pass
            last.append(held_segments(module))
        return last[-1]

    monkeypatch.setattr(attention, "held_segments", latest)
    with pytest.raises((AssertionError, CheckpointError)):
        assert oracle.relative_error(gradient(policy, together=True), expected) <= 1e-3


def test_a_padded_batch_leaves_no_segments_behind() -> None:
    policy = Policy(tiny_model("stablelm"))
    inside: Any = policy.model.model.layers[0].self_attn
    for kind, expected in (("shared", True), ("padded", False)):
        policy(build_microbatch(examples(BATCHES[0]), kind))  # type: ignore[arg-type]
        assert (held_segments(inside) is not None) is expected
    assert held_segments(policy.model.get_output_embeddings()) is None


def test_a_second_policy_of_a_model_adds_no_second_hook() -> None:
    model = tiny_model("stablelm")
    for _ in range(2):
        hold_segments(model)
    assert len(model.model.layers[0]._forward_pre_hooks) == 1


def test_a_model_that_gives_its_layers_nothing_is_refused() -> None:
    policy = Policy(tiny_model("stablelm"))
    for layer in policy.model.model.layers:
        layer._forward_pre_hooks.clear()
    with pytest.raises(ModelError, match=r"reached neither StableLmAttention nor its decoder layer.*rows: padded"):
        check_layout(policy, "shared")
