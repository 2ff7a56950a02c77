"""Layers with a state on CUDA: unfolded, unless the environment asks otherwise."""

from pathlib import Path

import pytest
import torch

from isopref.build.run import Run
from isopref.build.states import FOLLOW_ON_CUDA, settle_states
from isopref.config.schema import Config
from isopref.engine.display import Display
from isopref.engine.environment import Environment
from isopref.models.policy import Policy
from isopref.testing.models import tiny_model


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("rows", ["shared", "packed", "padded"])
@pytest.mark.parametrize("asked", [False, True])
def test_layers_follow_on_cuda_only_if_asked(
    device: str, rows: str, asked: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(FOLLOW_ON_CUDA, "1" if asked else "")
    config = Config.model_validate({"model": {"path": "m"}, "data": {"train": "d"}, "layout": {"rows": rows}})
    run = Run(config, Path("run"), Environment(0, 1, torch.device(device)), Display())
    policy = Policy(tiny_model("olmo_hybrid"))
    settle_states(run, policy)
    unfolds = device == "cuda" and rows != "padded" and not asked
    assert bool(policy.unfolded) is unfolds
    assert bool(policy.following) is not unfolds
    said = capsys.readouterr()
    assert (FOLLOW_ON_CUDA in said.out + said.err) is unfolds
    # No kernels are installed here.
    assert ("isopref[linear]" in said.out + said.err) is (device == "cuda" and rows != "padded" and asked)
