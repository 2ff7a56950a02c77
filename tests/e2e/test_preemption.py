"""Processes that are stopped and killed: the run ends as if nothing had happened, to the last bit."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from isopref.runs.read import read_run
from isopref.testing import oracle
from support.forked import isopref_on_ranks
from support.project import Command, MakeProject, Project, Weights

Start = Callable[..., "Command"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
SETTINGS = ("run.folder=run", "optim.epochs=6", "run.save_every=2", "data.eval=null")  # 30 steps

pytestmark = [
    pytest.mark.xdist_group("ranks"),
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds its processes in /proc"),
]


def sealed(project: Project, step: int) -> Path:
    return project.folder / "run" / "checkpoints" / f"step{step}" / "seal.json"


def same(metrics: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{name: value for name, value in line.items() if not name.startswith("speed/")} for line in metrics]


def test_stopped_killed_and_restarted_it_ends_in_the_same_bits(
    project: Project,
    make_project: MakeProject,
    start: Start,
    load_weights: Callable[[Path], Weights],
    read_metrics: Callable[[Path], list[dict[str, float]]],
) -> None:
    """Two ranks: SIGTERM to all, then kill -9 of all, then kill -9 of one, after which torchrun starts them again.

    How `--nproc` itself passes on a SIGTERM is tested in test_tensor_parallel.py.
    """
    other = make_project()
    assert isopref_on_ranks(other, "train", "my.yaml", *SETTINGS).code == 0

    resumed = ("train", "my.yaml", *SETTINGS, "--resume", "auto")
    stopped = isopref_on_ranks(project, *resumed, stop=(sealed(project, 4), signal.SIGTERM))
    assert stopped.code == 128 + signal.SIGTERM, stopped.err
    assert stopped.out.count("\nStopped by SIGTERM after step ") == 1
    assert stopped.out.endswith(" of 30; checkpoint saved. To resume, run the same command with --resume.\n")
    (at,) = (int(line.split()[5]) for line in stopped.out.splitlines() if line.startswith("Stopped by"))
    assert sealed(project, at).exists()

    killed = isopref_on_ranks(project, *resumed, stop=(sealed(project, at + at % 2 + 4), signal.SIGKILL))
    assert killed.code == signal.SIGKILL, killed.err

    command = start(project, *SETTINGS, "--resume", launcher=[*TORCHRUN, "--max-restarts", "1", "-m", "isopref"])
    command.wait_for(sealed(project, at + at % 2 + 10))
    os.kill(command.rank(1), signal.SIGKILL)
    code, out, err = command.end()
    assert code == 0, err
    assert out.count("resume after step ") == 2
    assert command.family() == {}

    found, expected = (load_weights(one.folder / "run" / "model") for one in (project, other))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert same(read_metrics(project.folder / "run")) == same(read_metrics(other.folder / "run"))
    left = {path.name for path in (project.folder / "run").iterdir()}
    assert left == {path.name for path in (other.folder / "run").iterdir()}
    assert {path.name for path in sealed(project, 0).parents[1].iterdir()} == {"step28", "step30"}


def test_from_one_to_four_sharded_to_two_whole(
    project: Project, make_project: MakeProject, load_weights: Callable[[Path], Weights]
) -> None:
    """Each part of a run on another number of ranks, with the model spread and the batches cut in another way."""
    whole = make_project().train("run", *SETTINGS[1:])
    project.train("run", *SETTINGS[1:], "run.keep=20", "layout.rows=padded")
    run = project.folder / "run"
    shutil.rmtree(run / "model")
    for step in range(10, 31, 2):  # as if it had been stopped after step 8
        shutil.rmtree(run / "checkpoints" / f"step{step}")
    sharded = (*SETTINGS, "layout.parallel=fsdp", "layout.microbatch_tokens=60", "--resume")
    stop = (sealed(project, 12), signal.SIGINT)
    outcome = isopref_on_ranks(project, "train", "my.yaml", *sharded, num_ranks=4, stop=stop)
    assert outcome.code == 128 + signal.SIGINT, outcome.err
    assert "resume after step 8\n" in outcome.out
    assert "Stopped by SIGINT" in outcome.out
    assert read_run(run).status.startswith("stopped at step ")
    settings = (*SETTINGS, "layout.parallel=ddp", "layout.rows=packed")
    outcome = isopref_on_ranks(project, "train", "my.yaml", *settings, "--resume")
    assert outcome.code == 0, outcome.err
    assert "resume after step 1" in outcome.out
    assert oracle.relative_error(load_weights(run / "model"), load_weights(whole / "model")) <= 1e-8
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 30


def test_a_signal_to_one_rank_stops_all_and_torchrun_fails(project: Project, start: Start) -> None:
    """As on a node that is preempted: every rank learns which signal it was. torchrun itself only knows exit code 1."""
    command = start(project, *SETTINGS, launcher=[*TORCHRUN, "-m", "isopref"])
    command.wait_for(sealed(project, 4))
    os.kill(command.rank(1), signal.SIGTERM)
    code, out, err = command.end()
    assert code == 1, err
    assert out.count("\nStopped by SIGTERM after step ") == 1
    assert "exitcode  : 143" in err
    assert read_run(project.folder / "run").status.startswith("stopped at step ")
