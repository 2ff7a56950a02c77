"""`isopref score`, ended by SIGKILL at random: the file in the end is that of a command that nobody disturbed."""

from __future__ import annotations

import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from support.project import SCRIPT, TIMEOUT_S, Project, make_pairs

NUM_PAIRS = 3 * 1024 + 100  # three whole chunks and a part of one
KILLS = 2


def command(project: Project, reward: Path, out: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(SCRIPT), "score", "many.jsonl", "--model", str(reward), "--out", out],
        cwd=project.folder,
        env=project.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_bytes(process: subprocess.Popen[str], path: Path, size: int) -> None:
    """Until the file has more than `size` bytes, or the process has ended."""
    give_up = time.monotonic() + TIMEOUT_S
    while process.poll() is None and not (path.exists() and path.stat().st_size > size):
        assert time.monotonic() < give_up, f"{path} does not grow"
        time.sleep(0.005)


@pytest.mark.xdist_group("ranks")
def test_killed_again_and_again(project: Project) -> None:
    reward = project.train("run", "objective.loss=bradley_terry", "optim.epochs=1", "optim.lr=1e-2") / "model"
    project.write_pairs("many.jsonl", make_pairs(NUM_PAIRS, seed=3))
    outcome = project.isopref("score", "many.jsonl", "--model", str(reward), "--out", "whole.jsonl")
    assert outcome.code == 0, outcome.err
    rng, partial = random.Random(), project.folder / ".again.jsonl.partial"
    done = []
    for _ in range(KILLS):
        if (project.folder / "again.jsonl").exists():  # it was faster than the last kill
            break
        process = command(project, reward, "again.jsonl")
        wait_for_bytes(process, partial, partial.stat().st_size if partial.exists() else 0)
        time.sleep(rng.uniform(0, 0.3))  # somewhere in the next chunk, or while it is written
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert process.returncode in (-signal.SIGKILL, 0)
        done.append(len(partial.read_bytes().splitlines()) if partial.exists() else NUM_PAIRS)
    assert 0 < done[0] < NUM_PAIRS, "the first kill came too late to test anything"
    if done[-1] < NUM_PAIRS:
        process = command(project, reward, "again.jsonl")
        out, _ = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0, out
        assert f"resume after {done[-1] // 1024 * 1024} of {NUM_PAIRS} pairs" in out
    assert (project.folder / "again.jsonl").read_bytes() == (project.folder / "whole.jsonl").read_bytes()
    assert not list(project.folder.glob(".again*"))
