"""Checkpoints in host memory and MLPs in tiles, on a GPU: copies overlap computing and change nothing."""

import gc

import pytest
import torch
from torch import Tensor

from isopref.batch.rows import build_microbatch
from isopref.models.offload import BLOCK
from isopref.models.parallel import checkpoint_layers, compile_layers
from isopref.models.policy import Policy
from isopref.models.tiles import tile_mlps
from isopref.testing import oracle
from isopref.testing.models import examples, random_pairs, tiny_model

pytestmark = pytest.mark.gpu

LAYERS, WIDTH = 6, 1024


def policy_of() -> Policy:
    model = tiny_model(
        "llama", dtype=torch.bfloat16, num_hidden_layers=LAYERS, hidden_size=WIDTH, intermediate_size=4 * WIDTH,
        num_attention_heads=8, num_key_value_heads=2, head_dim=128, initializer_range=0.02,  # larger: chaos in bfloat16
    )  # fmt: skip
    return Policy(model).cuda().train()


def gradients(policy: Policy) -> dict[str, Tensor]:
    """Of rows that are longer than a block of host memory."""
    row = build_microbatch(examples(random_pairs(24, seed=1, longest=1200)), "shared").to(torch.device("cuda"))
    assert row.passes[0].input_ids.numel() * WIDTH * 2 > BLOCK
    policy.zero_grad()
    policy(row).logp.sum().backward()
    return {name: one.grad.clone() for name, one in policy.named_parameters() if one.grad is not None}


def test_offloaded_checkpoints_give_the_same_gradient_every_time() -> None:
    policy = policy_of()
    checkpoint_layers(policy, LAYERS)
    expected = gradients(policy)
    checkpoint_layers(policy, LAYERS, offloaded=LAYERS - 1)
    for _ in range(5):
        assert oracle.relative_error(gradients(policy), expected) < 5e-3  # the kernel adds up in any order


def test_they_leave_the_memory_of_the_device() -> None:
    policy = policy_of()
    kept = []
    for offloaded in (0, LAYERS - 1):
        checkpoint_layers(policy, LAYERS, offloaded=offloaded)
        row = build_microbatch(examples(random_pairs(24, seed=1, longest=1200)), "shared").to(torch.device("cuda"))
        gc.collect()
        before = torch.cuda.memory_allocated()
        loss = policy(row).logp.sum()
        torch.cuda.synchronize()
        kept.append(torch.cuda.memory_allocated() - before)
        loss.backward()
    size = row.passes[0].input_ids.numel() * WIDTH * 2
    assert kept[0] - kept[1] >= (LAYERS - 2) * size  # one may still be on its way


@pytest.mark.parametrize("compiled", [False, True])
def test_tiles_give_the_same_gradient(compiled: bool) -> None:
    policy = policy_of()
    if compiled:
        compile_layers(policy)
    checkpoint_layers(policy, LAYERS, offloaded=LAYERS - 1)
    expected = gradients(policy)
    tile_mlps(policy, 2048)
    assert oracle.relative_error(gradients(policy), expected) < 0.02  # compiled, bfloat16 is rounded elsewhere
