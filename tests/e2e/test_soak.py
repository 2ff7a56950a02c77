"""What takes too long for every change: `make soak`. Many kills, many steps, and nothing is left behind or lost."""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from support.project import Command, MakeProject, Project, Weights

pytestmark = [pytest.mark.soak, pytest.mark.timeout(7200), pytest.mark.xdist_group("ranks")]

KILLS = 20
HOW = ("SIGTERM", "SIGINT", "kill -9 of rank 0", "kill -9 of rank 1", "kill -9 of all")
Start = Callable[..., "Command"]


def steps_saved(project: Project) -> int:
    """The step of the last whole checkpoint."""
    seals = (project.folder / "run" / "checkpoints").glob("step*/seal.json")
    return max((int(path.parent.name.removeprefix("step")) for path in seals), default=0)


def same(metrics: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{name: value for name, value in line.items() if not name.startswith("speed/")} for line in metrics]


def stop(command: Command, how: str) -> None:
    if how.startswith("SIG"):
        command.process.send_signal(getattr(signal, how))
    elif how == "kill -9 of all":
        command.kill()
    else:
        os.kill(command.rank(int(how[-1])), signal.SIGKILL)


def test_twenty_random_kills_end_in_the_same_bits(
    project: Project,
    make_project: MakeProject,
    start: Start,
    load_weights: Callable[[Path], Weights],
    read_metrics: Callable[[Path], list[dict[str, float]]],
) -> None:
    rng = random.Random(20)
    settings = ("run.folder=run", "optim.epochs=60", "run.save_every=3", "run.eval_every=10")  # 300 steps
    other = make_project()
    code, _, err = start(other, *settings).end()
    assert code == 0, err
    kills = 0
    while kills < KILLS:
        saved = steps_saved(project)
        command = start(project, *settings, "--resume", "auto")
        while steps_saved(project) <= saved and command.process.poll() is None:
            time.sleep(0.02)
        time.sleep(rng.random() / 2)  # anywhere: inside a step, a save, an evaluation
        how = rng.choice(HOW)
        if command.process.poll() is None:
            stop(command, how)
            kills += 1
        code, out, err = command.end()
        expected = 128 + getattr(signal, how) if how.startswith("SIG") else 128 + signal.SIGKILL
        assert code in (expected, -signal.SIGKILL) or "Done in" in out, (how, code, err)
        assert command.family() == {}
        print(f"kill {kills}: {how} after step {steps_saved(project)}: exit code {code}")  # noqa: T201
        if (project.folder / "run" / "model").exists():
            pytest.fail(f"the run was over after {kills} kills; give it more steps")
    code, _, err = start(project, *settings, "--resume", "auto").end()
    assert code == 0, err
    found, expected = (load_weights(one.folder / "run" / "model") for one in (project, other))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert same(read_metrics(project.folder / "run")) == same(read_metrics(other.folder / "run"))


def resident(pid: int) -> int:
    """Memory of a process in KiB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def test_a_thousand_steps_leak_nothing_and_leave_nothing(project: Project, start: Start) -> None:
    """Saved, evaluated, and killed every few seconds for a while; then one process does the rest."""
    temporary = project.folder / "tmp"
    temporary.mkdir()
    project.extra_env["TMPDIR"] = str(temporary)
    often = ("run.save_every=5", "run.eval_every=10", "run.keep_best=true")
    # Nobody reads its output before the end, and a pipe takes 64 KiB.
    settings = ("run.folder=run", "optim.epochs=200", "run.log_every=10", *often)
    script = [sys.executable, "-m", "isopref"]
    for _ in range(5):
        saved = steps_saved(project)
        command = start(project, *settings, "--resume", "auto", launcher=script)
        while steps_saved(project) < saved + 20:
            assert command.process.poll() is None, command.end()
            time.sleep(0.02)
        command.kill()
        command.end()
        assert command.family() == {}
    begin = steps_saved(project)
    command = start(project, *settings, "--resume", "auto", launcher=script)
    sizes: dict[int, int] = {}
    while command.process.poll() is None:
        step = steps_saved(project)
        if step not in sizes and step > begin:
            try:
                sizes[step] = resident(command.process.pid)
            except (OSError, StopIteration):
                break
        time.sleep(0.05)
    code, _, err = command.end()
    assert code == 0, err
    assert command.family() == {}
    early, late = sizes[min(step for step in sizes if step >= 400)], sizes[max(step for step in sizes if step <= 995)]
    print(f"{early} KiB at step 400, {late} KiB at the end")  # noqa: T201
    assert late <= 1.02 * early
    left = [path for place in ("run", "cache", "tmp") for path in (project.folder / place).rglob("*")]
    assert [path for path in left if re.search(r"tmp$|partial", path.name)] == []
    assert not (project.folder / "run" / ".lock").exists()
    assert list(temporary.iterdir()) == []
