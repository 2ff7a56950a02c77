"""Checkpoints in host memory: what comes back is what left, and blocks are used again."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from isopref.batch.rows import build_microbatch
from isopref.errors import ConfigError
from isopref.models import offload, parallel
from isopref.models.offload import HostCheckpoints, _Kept
from isopref.models.parallel import checkpoint_layers
from isopref.models.policy import Policy
from isopref.testing.models import examples, random_pairs, tiny_model


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks smaller than a tensor, so that tensors are cut."""
    monkeypatch.setattr(offload, "BLOCK", 1024)


def gradients(policy: Policy) -> dict[str, Tensor]:
    policy.zero_grad()
    policy(build_microbatch(examples(random_pairs(3, seed=1, longest=20)), "shared")).logp.sum().backward()
    return {name: one.grad.clone() for name, one in policy.named_parameters() if one.grad is not None}


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "qwen3_moe"])
def test_gradients_are_those_of_recomputed_layers_to_the_last_bit(architecture: str) -> None:
    policy = Policy(tiny_model(architecture, dtype=torch.float32)).train()
    checkpoint_layers(policy, 2)
    expected = gradients(policy)
    checkpoint_layers(policy, 2, offloaded=2)
    for _ in range(2):
        found = gradients(policy)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], one) for name, one in expected.items())


@pytest.mark.usefixtures("small_blocks")
def test_only_offloaded_layers_leave_their_inputs_and_blocks_are_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[tuple[int, ...]] = []
    stores: set[int] = set()
    start = _Kept.__init__

    def counted(self: _Kept, store: HostCheckpoints, tensor: Tensor, before: object) -> None:
        kept.append(tuple(tensor.shape))
        stores.add(id(store))
        start(self, store, tensor, before)  # type: ignore[arg-type]
        alive.append(store)

    alive: list[HostCheckpoints] = []
    monkeypatch.setattr(_Kept, "__init__", counted)
    policy = Policy(tiny_model("llama", dtype=torch.float32)).train()
    checkpoint_layers(policy, 2, offloaded=1)
    gradients(policy)
    blocks = len(alive[0]._free)
    assert blocks > 1
    gradients(policy)
    assert len(kept) == 2  # one layer in two passes
    assert len(stores) == 1
    assert len(alive[0]._free) == blocks


@pytest.mark.usefixtures("small_blocks")
def test_asking_for_a_checkpoint_fetches_the_one_before() -> None:
    store = HostCheckpoints()
    tensors = [torch.randn(1, 40, 16) for _ in range(3)]
    first, second, third = kept = [store._keep(tensor) for tensor in tensors]
    assert all(isinstance(one, _Kept) for one in kept)
    assert torch.equal(store._fetch(third), tensors[2])
    assert vars(first)["fetched"] is None
    assert vars(second)["fetched"] is not None
    assert torch.equal(store._fetch(second), tensors[1])
    assert vars(second)["fetched"] is None  # not held twice
    assert torch.equal(store._fetch(first), tensors[0])
    assert torch.equal(store._fetch(first), tensors[0])  # asked twice, copied twice


def test_what_the_last_offloaded_layer_left_is_not_held_through_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Held until it is copied, and no longer: when the backward pass begins, it would be one input more."""
    waited: list[object] = []
    stream = SimpleNamespace(wait_event=waited.append)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: stream)
    store = HostCheckpoints()
    left, copied = torch.zeros(2, 3), SimpleNamespace()
    store._leaving = left, copied  # type: ignore[assignment]
    assert torch.equal(store.recompute_on_device(torch.neg, torch.ones(2, requires_grad=True)), -torch.ones(2))
    assert store._leaving is None
    assert waited == [copied]


def test_what_cannot_be_offloaded_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy(tiny_model("llama", dtype=torch.float32))
    monkeypatch.setattr(parallel, "GradientCheckpointingLayer", int)
    with pytest.raises(ConfigError, match=r"layout\.offload_activations: none"):
        checkpoint_layers(policy, 2, offloaded=1)
    checkpoint_layers(policy, 2)
