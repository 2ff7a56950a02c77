"""Runs whose ranks compute every layer together: the same model as one process leaves, also when it goes on as one."""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from isopref.models.conversion import read_checkpoint
from isopref.testing import oracle
from support.forked import isopref_on_ranks
from support.project import Command, MakeProject, Project, Weights

Start = Callable[..., "Command"]
Load = Callable[[Path], "Weights"]
SETTINGS = (
    "run.folder=run",
    "run.save_every=2",
    "optim.epochs=4",
    "objective.loss=aot",
)  # 20 steps; pairs that are coupled
TOGETHER = "layout.tensor_parallel=2"
BOUND = 1e-5  # of float32 inside, over 20 steps of AdamW

pytestmark = pytest.mark.xdist_group("ranks")


@pytest.fixture(scope="module")
def make(make_project: MakeProject) -> Callable[[], Project]:
    return lambda: make_project("llama", model={"dtype": "float64", "native": True})


@pytest.fixture(scope="module")
def alone(make: Callable[[], Project], load_weights: Load) -> Weights:
    return load_weights(make().train("run", *SETTINGS[1:]) / "model")


def test_two_ranks_to_a_layer(make: Callable[[], Project], load_weights: Load, alone: Weights) -> None:
    project = make()
    outcome = isopref_on_ranks(project, "train", "my.yaml", *SETTINGS, TOGETHER)
    assert outcome.code == 0, outcome.err
    assert "layout.parallel: auto is fsdp, for layout.tensor_parallel\n" in outcome.out
    assert outcome.err == ""
    run = project.folder / "run"
    found = load_weights(run / "model")
    assert oracle.relative_error(found, alone) <= BOUND
    again = read_checkpoint(str(run / "olmo_core"), dtype=torch.float64)
    assert all(torch.equal(parameter, found[name]) for name, parameter in again.named_parameters())


def test_from_one_process_to_two_and_back(
    make: Callable[[], Project], start: Start, load_weights: Load, alone: Weights
) -> None:
    """Weights and the optimizer's state, of steps before and of steps to come. `--nproc` passes SIGTERM on."""
    project = make()
    run = project.train("run", *SETTINGS[1:], "run.keep=10", "run.export=false")
    for step in range(6, 21, 2):  # as if it had been stopped after step 4
        shutil.rmtree(run / "checkpoints" / f"step{step}")
    command = start(project, *SETTINGS, TOGETHER, "--resume")
    command.wait_for(run / "checkpoints" / "step8" / "seal.json")
    command.process.send_signal(signal.SIGTERM)
    code, out, err = command.end()
    assert code == 128 + signal.SIGTERM, err
    assert "resume after step 4\n" in out
    (at,) = (int(step) for step in re.findall(r"^Stopped by SIGTERM after step (\d+) of 20", out, re.MULTILINE))
    assert 8 <= at <= 16
    assert out.endswith(" of 20; checkpoint saved. To resume, run the same command with --resume.\n")
    assert command.family() == {}
    project.train("run", *SETTINGS[1:], "--resume")
    assert oracle.relative_error(load_weights(run / "model"), alone) <= BOUND


def test_what_cannot_work_is_refused(make: Callable[[], Project]) -> None:
    assert "layout.tensor_parallel: 2 does not divide the number of processes, 1" in make().refused("run", TOGETHER)
    outcome = isopref_on_ranks(make(), "train", "my.yaml", "layout.tensor_parallel=3")
    assert outcome.code == 1
    assert "layout.tensor_parallel: 3 does not divide the number of processes, 2. Change --nproc" in outcome.err
