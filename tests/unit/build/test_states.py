"""Recurrent layers on CUDA: which kernels they use, and what the user is told."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from isopref.build.run import Run
from isopref.build.states import check_kernels
from isopref.config.schema import Config
from isopref.engine.display import Display
from isopref.engine.environment import Environment
from isopref.errors import ConfigError
from isopref.models.policy import Policy
from isopref.ops import delta, fla, state_space
from isopref.testing.models import tiny_model


def run_of(rows: str = "shared", device: str = "cuda") -> Run:
    """A run on CUDA, as far as its settings say."""
    config = Config.model_validate({"model": {"path": "m"}, "data": {"train": "d"}, "layout": {"rows": rows}})
    return Run(config, Path("run"), Environment(0, 1, torch.device(device)), Display())


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine with a Hopper card and these packages."""

    def machine(*packages: str, triton: str = "3.6.0", capability: int = 9) -> None:
        fla.load.cache_clear()
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (capability, 0))
        monkeypatch.setattr(fla, "find_spec", lambda name: name if name in packages else None)
        monkeypatch.setattr(fla, "version", {"triton": triton}.__getitem__)
        functions = SimpleNamespace(chunk_gated_delta_rule="delta", chunk_simple_gla="gla")
        monkeypatch.setattr(fla, "import_module", lambda _name: functions)

    yield machine
    fla.load.cache_clear()


@pytest.mark.parametrize("rows", ["shared", "packed", "padded"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("architecture", ["olmo_hybrid", "bamba", "lfm2", "llama"])
def test_a_missing_kernel_is_told(
    architecture: str, device: str, rows: str, hopper: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    hopper()
    policy = Policy(tiny_model(architecture))
    check_kernels(run_of(rows, device), policy)
    assert bool(policy.following) is (architecture != "llama")
    said = capsys.readouterr()
    slow = device == "cuda" and rows != "padded" and architecture in ("olmo_hybrid", "bamba")
    assert ("flash-linear-attention is not installed" in said.out + said.err) is slow
    assert ("pip install 'isopref[linear]'" in said.out + said.err) is slow


@pytest.mark.parametrize(
    ("packages", "triton", "capability", "delta_runs", "space_runs"),
    [
        (["fla"], "3.3.1", 9, True, True),
        (["fla"], "3.4.0", 9, False, False),
        (["fla"], "3.7.0", 9, False, False),
        (["fla"], "3.7.1", 9, True, True),
        (["fla"], "3.6.0", 10, True, True),
        (["fla", "tilelang"], "3.6.0", 9, True, False),
        (["tilelang"], "3.3.1", 9, False, False),
    ],
)
def test_kernels_that_are_miscompiled_are_not_used(
    packages: list[str], triton: str, capability: int, delta_runs: bool, space_runs: bool, hopper: Any
) -> None:
    hopper(*packages, triton=triton, capability=capability)
    assert (delta.kernel().run is not None) is delta_runs
    assert (state_space.kernel().run is not None) is space_runs


def test_a_kernel_that_refuses_the_card_is_told(hopper: Any, capsys: pytest.CaptureFixture[str]) -> None:
    hopper("fla")
    check_kernels(run_of(), Policy(tiny_model("olmo_hybrid")))
    said = capsys.readouterr()
    assert "refuses Hopper GPUs with Triton 3.6.0. For speed: pip install tilelang, or" in " ".join(
        (said.out + said.err).split()
    )


def test_padded_rows_would_run_into_a_kernel_that_refuses_the_card(hopper: Any) -> None:
    hopper("fla")
    check_kernels(run_of("padded"), Policy(tiny_model("bamba")))  # transformers does not use the package there
    with pytest.raises(ConfigError, match=r"layout\.rows: padded .* refuses Hopper GPUs .*pip install tilelang"):
        check_kernels(run_of("padded"), Policy(tiny_model("olmo_hybrid")))
    hopper("fla", "tilelang")
    check_kernels(run_of("padded"), Policy(tiny_model("olmo_hybrid")))
