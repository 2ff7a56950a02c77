"""What the settings of a run say about the memory of its microbatches."""

from pathlib import Path

import pytest
import torch

from isopref.build.microbatch import _input_bytes
from isopref.build.run import Run
from isopref.config.schema import Config
from isopref.engine.display import Display
from isopref.engine.environment import Environment
from isopref.models.policy import Policy
from isopref.testing.models import tiny_model


@pytest.mark.parametrize("kind", ["tensor_parallel", "context_parallel"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_that_compute_a_layer_together_share_its_input(ranks: int, kind: str) -> None:
    """Each offloads its own tokens only, so an offloaded layer saves that much less."""
    layout = {kind: ranks, "parallel": "fsdp"}
    settings = {"model": {"path": "m", "dtype": "float32", "native": True}, "data": {"train": "d"}, "layout": layout}
    run = Run(Config.model_validate(settings), Path("run"), Environment(0, 1, torch.device("cpu")), Display())
    policy = Policy(tiny_model("llama"))
    assert _input_bytes(run, policy) == policy.model.config.hidden_size * 4 // ranks
