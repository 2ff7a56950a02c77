"""Recurrent layers on CUDA: which kernels they use, and what the user is told."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from isopref.build.recurrence import check_recurrence
from isopref.build.run import Run
from isopref.config.schema import Config
from isopref.engine.display import Display
from isopref.engine.environment import Environment
from isopref.errors import ConfigError
from isopref.models.policy import Policy
from isopref.ops import delta, fla, state_space
from isopref.testing.models import tiny_model

Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """Makes this a machine with these packages and this card."""

    def make(*packages: str, triton: str = "3.6.0", hopper: bool = True, nvcc: bool = True) -> None:
        fla.load.cache_clear()
        about = SimpleNamespace(
            IS_NVIDIA_HOPPER=hopper,
            TRITON_ABOVE_3_4_0=triton >= "3.4.0",
            TRITON_ABOVE_3_7_1=triton >= "3.7.1",
            has_usable_nvcc=lambda: nvcc,
            chunk_gated_delta_rule="delta",
            chunk_simple_gla="gla",
        )
        monkeypatch.setattr(fla, "find_spec", lambda name: name if name in packages else None)
        monkeypatch.setattr(fla, "version", {"triton": triton}.__getitem__)
        monkeypatch.setattr(fla, "import_module", lambda _name: about)

    yield make
    fla.load.cache_clear()


def check(architecture: str, rows: str = "shared", device: str = "cuda", **options: Any) -> Policy:
    config = Config.model_validate({"model": {"path": "m"}, "data": {"train": "d"}, "layout": {"rows": rows}})
    run = Run(config, Path("run"), Environment(0, 1, torch.device(device)), Display())
    policy = Policy(tiny_model(architecture))
    followed = policy.following
    if options.pop("unfolded", False):
        policy.unfold_all()
    check_recurrence(run, policy, followed, **{"trained": True, **options})
    return policy


def said(capsys: pytest.CaptureFixture[str]) -> str:
    out, err = capsys.readouterr()
    return " ".join((out + err).split())


@pytest.mark.parametrize("rows", ["shared", "packed", "padded"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("architecture", ["olmo_hybrid", "bamba", "lfm2", "llama"])
def test_a_missing_kernel_is_reported(
    architecture: str, device: str, rows: str, machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine()
    policy = check(architecture, rows, device)
    assert bool(policy.following) is (architecture != "llama")
    slow = device == "cuda" and rows != "padded" and architecture in ("olmo_hybrid", "bamba")
    report = "flash-linear-attention is not installed. For speed: pip install 'isopref[linear]'"
    assert (report in said(capsys)) is slow


@pytest.mark.parametrize(
    ("packages", "options", "delta_runs", "space_runs"),
    [
        (["fla"], {"triton": "3.3.1"}, True, True),
        (["fla"], {"triton": "3.4.0"}, False, False),
        (["fla"], {"triton": "3.7.0"}, False, False),
        (["fla"], {"triton": "3.7.1"}, True, True),
        (["fla"], {"hopper": False}, True, True),
        (["fla", "tilelang"], {}, True, False),
        (["fla", "tilelang"], {"nvcc": False}, False, False),
        (["tilelang"], {"triton": "3.3.1"}, False, False),
    ],
)
def test_kernels_that_are_miscompiled_are_not_used(
    packages: list[str], options: dict[str, Any], delta_runs: bool, space_runs: bool, machine: Machine
) -> None:
    machine(*packages, **options)
    assert (delta.kernel().run is not None) is delta_runs
    assert (state_space.kernel().run is not None) is space_runs


def test_a_kernel_that_refuses_the_card_is_reported(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine("fla")
    check("olmo_hybrid")
    assert "refuses Hopper GPUs with Triton 3.6.0. For speed: install tilelang (with pip)" in said(capsys)


def test_training_would_run_into_a_kernel_that_refuses_the_card(machine: Machine) -> None:
    """In transformers' own layers: in padded rows, or if the probe has unfolded them."""
    machine("fla")
    check("bamba", "padded")  # transformers does not use the package for Mamba2
    check("olmo_hybrid", "padded", trained=False)  # only the backward pass is refused
    with pytest.raises(ConfigError, match=r"refuses Hopper GPUs .* Try: set layout\.rows: shared, install tilelang"):
        check("olmo_hybrid", "padded")
    with pytest.raises(ConfigError, match=r"refuses Hopper GPUs .* Try: install tilelang"):
        check("olmo_hybrid", unfolded=True)
    machine("fla", "tilelang")
    check("olmo_hybrid", "padded")


def test_layers_that_the_probe_has_unfolded_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    check("lfm2", device="cpu", unfolded=True)
    assert "compute a shared prompt once per answer. The result is right, but the run is slower" in said(capsys)
