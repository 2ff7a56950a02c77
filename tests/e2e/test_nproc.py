"""`--nproc`: several processes, the same weights; and when one of them ends, all end."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from isopref.testing import oracle
from support.forked import isopref_on_ranks
from support.project import Command, MakeProject, Project, Weights

LoadWeights = Callable[[Path], "Weights"]

# They start processes that start processes; two such tests at once would take memory and time from each other.
pytestmark = [
    pytest.mark.xdist_group("ranks"),
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds its processes in /proc"),
]


@pytest.fixture(scope="module")
def alone(make_project: MakeProject) -> Path:
    """The same training by one process."""
    return make_project().train("alone")


def test_same_weights_as_one_process(
    project: Project, start: Callable[..., Command], alone: Path, load_weights: LoadWeights
) -> None:
    command = start(project, "run.folder=run")
    code, out, err = command.end()
    assert code == 0, err
    opening, _, rest = out.partition("\n")
    assert opening.endswith(": starting 2 processes")
    assert rest.startswith("run   run (run id ")  # and nothing of the engine's before
    assert out.count("step 10/10  ") == 1
    assert command.family() == {}
    assert oracle.relative_error(load_weights(project.folder / "run" / "model"), load_weights(alone / "model")) <= 1e-8
    # One process writes: every step is there once.
    assert len((project.folder / "run" / "metrics.jsonl").read_text().splitlines()) == 10
    assert (project.folder / "run" / "evaluation.json").exists()


def test_more_processes_than_pairs_in_a_step(project: Project) -> None:
    settings = ("run.folder=run", "optim.batch_size=1", "optim.max_steps=2", "data.eval=null")
    outcome = isopref_on_ranks(project, "train", "my.yaml", *settings)
    assert outcome.code == 0, outcome.err
    assert outcome.out.count("warning: 2 ranks share 1 pairs per step; some will be idle\n") == 1
    assert outcome.out.count("step 2/2  ") == 1


def test_the_cache_filled_by_two_serves_one_and_eval_is_the_same_by_both(project: Project) -> None:
    filled = isopref_on_ranks(project, "cache", "my.yaml")
    assert filled.code == 0, filled.err
    assert filled.out.count("cache 0 of 23 training pairs have their reference ") == 1
    again = project.isopref("cache", "my.yaml", "layout.rows=padded")
    assert "cache 23 of 23 training pairs have their reference " in again.out
    assert "cache 8 of 8 held-out pairs have their reference " in again.out
    project.train("run", "optim.max_steps=3")
    options = ("--model", "run/model", "--json")
    both = isopref_on_ranks(project, "eval", "my.yaml", *options, "two.json", "layout.parallel=fsdp")
    assert both.code == 0, both.err
    assert both.out.count("held-out pairs, with 95% intervals") == 1
    assert project.isopref("eval", "my.yaml", *options, "one.json").code == 0
    one, two = (json.loads((project.folder / name).read_text()) for name in ("one.json", "two.json"))
    for name in ("accuracy", "reward_margin", "reward_margin_std", "logp_accuracy", "loss", "length_correlation"):
        assert two[name] == pytest.approx(one[name], rel=1e-9), name


def test_a_mistake_ends_all_processes(project: Project, start: Callable[..., Command]) -> None:
    command = start(project, "run.folder=run", "layout.parallel=single")
    code, _, err = command.end()
    assert code == 1
    message = "error: layout.parallel: single, but 2 processes were started. Set layout.parallel: auto, or start one.\n"
    assert err.count(message) == 1
    assert "Traceback" not in err
    assert "rank 1" not in err
    assert command.family() == {}
    assert not (project.folder / "run" / "config.yaml").exists()


def test_a_mistake_in_the_config_starts_no_process(project: Project, start: Callable[..., Command]) -> None:
    command = start(project, "optim.epochs=some")
    code, _, err = command.end()
    assert code == 1
    assert err == (
        "error: override 'optim.epochs=some': optim.epochs: must be a whole number, at least 1; found \"some\".\n"
    )
    assert command.family() == {}


def test_a_rank_that_dies_ends_the_others_and_one_process_goes_on(
    project: Project, start: Callable[..., Command], make_project: MakeProject, load_weights: LoadWeights
) -> None:
    """Killed while it trains sharded on two ranks; resumed on one, in other rows."""
    settings = ("optim.epochs=10", "run.save_every=2", "data.eval=null")  # 50 steps: enough to be killed in
    command = start(project, "run.folder=run", *settings, "layout.parallel=fsdp")
    command.wait_for(project.folder / "run" / "checkpoints" / "step4" / "seal.json")
    os.kill(command.rank(1), signal.SIGKILL)
    code, _, err = command.end()
    assert code == 128 + signal.SIGKILL
    assert "error: rank 1 was killed by signal 9.\n" in err
    assert command.family() == {}
    assert not (project.folder / "run" / "model").exists()

    run = project.train("run", *settings, "layout.parallel=auto", "layout.rows=padded", "--resume")
    whole = make_project().train("whole", *settings, "run.save_every=250")
    assert oracle.relative_error(load_weights(run / "model"), load_weights(whole / "model")) <= 1e-8
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 50


@pytest.mark.skipif(sys.platform != "linux", reason="processes end with their parent on Linux alone")
def test_a_launcher_that_is_killed_takes_all_its_processes_along(
    project: Project, start: Callable[..., Command]
) -> None:
    settings = ("optim.epochs=1000", "run.save_every=2", "data.eval=null")
    command = start(project, "run.folder=run", *settings)
    command.wait_for(project.folder / "run" / "checkpoints" / "step2" / "seal.json")
    assert len(command.family()) >= 4  # the launcher, torchrun's agent, two ranks
    command.process.kill()
    command.process.wait()
    give_up = time.monotonic() + 20
    while command.family():
        assert time.monotonic() < give_up, command.family().keys()
        time.sleep(0.05)
