"""On a CUDA device: OLMo-core's own models, plain and compiled, against float64 and by the command."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from isopref.batch.packing import RowKind
from isopref.batch.rows import build_microbatch
from isopref.models.conversion import from_hf
from isopref.models.parallel import compile_layers
from isopref.models.policy import Policy
from isopref.models.probe import check_layout
from isopref.testing import oracle
from isopref.testing.models import examples, random_pairs, tiny_model
from support.cuda import Command

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
WIDE: dict[str, Any] = {"head_dim": 64, "hidden_size": 256, "intermediate_size": 512}


@pytest.mark.parametrize("kind", ["shared", "packed", "padded"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "olmo2", "olmo3", "gemma3"])
def test_scores(architecture: str, kind: RowKind) -> None:
    shape = {**WIDE, "query_pre_attn_scalar": WIDE["head_dim"]} if architecture == "gemma3" else WIDE
    pairs = random_pairs(6, seed=1, longest=40)
    with torch.no_grad():
        expected = oracle.pair_logps(tiny_model(architecture, dtype=torch.float64, **shape), pairs)
        answers = torch.stack([expected.chosen, expected.rejected])
        for dtype, bound in ((torch.float32, 1e-4), (torch.bfloat16, 3e-2)):
            policy = Policy(from_hf(tiny_model(architecture, dtype=dtype, **shape))).to(CUDA)
            found = policy(build_microbatch(examples(pairs), kind).to(CUDA)).logp.view(2, -1).double().cpu()
            assert (found - answers).norm() / answers.norm() < bound
            check_layout(policy, kind)


@pytest.mark.parametrize("architecture", ["llama", "olmo3"])
def test_compiled_blocks_score_as_the_model_does(architecture: str) -> None:
    torch._dynamo.reset()
    policy = Policy(from_hf(tiny_model(architecture, dtype=torch.bfloat16, **WIDE))).to(CUDA)
    compile_layers(policy)
    check_layout(policy, "shared")


@pytest.mark.parametrize("changes", [["model.compute_dtype=bfloat16"], ["layout.compile=true", "model.dtype=bfloat16"]])
def test_train(isopref_train: Command, changes: list[str]) -> None:
    done = isopref_train("model.native=true", "optim.lr=1e-3", *changes, initializer_range=0.1)
    assert done.before == 0.5
    assert done.after > 0.8
