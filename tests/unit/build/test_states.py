"""Layers with a state on CUDA: unfolded, unless the environment asks otherwise."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from isopref.build import model, samples, spot_checks
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
@pytest.mark.parametrize("architecture", ["olmo_hybrid", "bamba", "lfm2"])
def test_layers_follow_on_cuda_only_if_asked(
    architecture: str,
    device: str,
    rows: str,
    asked: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(FOLLOW_ON_CUDA, "1" if asked else "")
    config = Config.model_validate({"model": {"path": "m"}, "data": {"train": "d"}, "layout": {"rows": rows}})
    run = Run(config, Path("run"), Environment(0, 1, torch.device(device)), Display())
    policy = Policy(tiny_model(architecture))
    settle_states(run, policy)
    unfolds = device == "cuda" and rows != "padded" and not asked
    assert bool(policy.unfolded) is unfolds
    assert bool(policy.following) is not unfolds
    said = capsys.readouterr()
    assert (FOLLOW_ON_CUDA in said.out + said.err) is unfolds
    # No kernels are installed here, and convolutions need none.
    slow = device == "cuda" and rows != "padded" and asked and architecture != "lfm2"
    assert ("isopref[linear]" in said.out + said.err) is slow


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run on CUDA, as far as its settings say."""
    monkeypatch.delenv(FOLLOW_ON_CUDA, raising=False)
    config = Config.model_validate({"model": {"path": "m"}, "data": {"train": "d"}})
    return Run(config, Path("run"), Environment(0, 1, torch.device("cuda")), Display())


def test_a_policy_is_settled_before_it_scores_anything(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The spot checks score packed rows before the policy is spread over ranks."""
    monkeypatch.setattr(model, "_check_readout", lambda *_: None)
    monkeypatch.setattr(model, "_load_whole", lambda *_: Policy(tiny_model("olmo_hybrid")))
    monkeypatch.setattr(model, "place", lambda *_: None)
    monkeypatch.setattr(model, "from_host", lambda *_: False)
    policy = model.load_policy(run)
    assert policy.unfolded
    assert not policy.following


def test_the_exported_model_is_settled_like_the_policy(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    exported = tiny_model("olmo_hybrid")
    monkeypatch.setattr(exported, "to", lambda _device: exported)
    monkeypatch.setattr(samples, "load_exported", lambda _run: exported)
    monkeypatch.setattr(spot_checks, "say_cost", lambda *_: None)
    measured: list[Policy] = []
    monkeypatch.setattr(spot_checks, "measure", lambda _run, policy, *_: measured.append(policy))
    before: Any = SimpleNamespace(prompts=[], checks=SimpleNamespace(), measured=SimpleNamespace())
    samples.say_answers(run, nn.Linear(1, 1), None, before)
    assert measured[0].unfolded
    assert not measured[0].following
    said = capsys.readouterr()
    assert FOLLOW_ON_CUDA not in said.out + said.err  # it was said when the policy was loaded
