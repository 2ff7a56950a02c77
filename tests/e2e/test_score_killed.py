"""`isopref score`, ended by SIGKILL at random: the file in the end is that of a command that nobody disturbed."""

from __future__ import annotations

import random
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from support.forked import start_isopref
from support.project import TIMEOUT_S, Project, make_pairs

NUM_PAIRS = 3 * 1024 + 100  # three whole chunks and a part of one
KILLS = 2


def wait_for_bytes(process: BaseProcess, path: Path, size: int) -> None:
    """Until the file has more than `size` bytes, or the process has ended."""
    give_up = time.monotonic() + TIMEOUT_S
    while process.is_alive() and not (path.exists() and path.stat().st_size > size):
        assert time.monotonic() < give_up, f"{path} does not grow"
        time.sleep(0.005)


@pytest.mark.xdist_group("ranks")
def test_killed_again_and_again(project: Project) -> None:
    reward = project.train("run", "objective.loss=bradley_terry", "optim.epochs=1", "optim.lr=1e-2") / "model"
    project.write_pairs("many.jsonl", make_pairs(NUM_PAIRS, seed=3))
    command = ("score", "many.jsonl", "--model", str(reward), "--out")
    outcome = project.isopref(*command, "whole.jsonl")
    assert outcome.code == 0, outcome.err
    rng, partial = random.Random(), project.folder / ".again.jsonl.partial"
    done = []
    for _ in range(KILLS):
        if (project.folder / "again.jsonl").exists():  # it was faster than the last kill
            break
        process = start_isopref(project, *command, "again.jsonl")
        wait_for_bytes(process, partial, partial.stat().st_size if partial.exists() else 0)
        time.sleep(rng.uniform(0, 0.3))  # somewhere in the next chunk, or while it is written
        process.kill()
        process.join()
        assert process.exitcode in (-signal.SIGKILL, 0)
        done.append(len(partial.read_bytes().splitlines()) if partial.exists() else NUM_PAIRS)
    assert 0 < done[0] < NUM_PAIRS, "the first kill came too late to test anything"
    if done[-1] < NUM_PAIRS:
        outcome = project.isopref(*command, "again.jsonl")
        assert outcome.code == 0, outcome.err
        assert f"resume after {done[-1] // 1024 * 1024} of {NUM_PAIRS} pairs" in outcome.out
    assert (project.folder / "again.jsonl").read_bytes() == (project.folder / "whole.jsonl").read_bytes()
    assert not list(project.folder.glob(".again*"))
