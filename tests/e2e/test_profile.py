"""run.profile: a trace of a few steps, which changes nothing else."""

import json
from collections.abc import Callable
from pathlib import Path

from support.project import Project

SHORT = ("optim.max_steps=5", "data.eval=null", "run.export=false")


def test_a_trace_of_some_steps(project: Project, read_metrics: Callable[[Path], list[dict[str, float]]]) -> None:
    traced, plain = project.train("traced", "run.profile=2", *SHORT), project.train("plain", *SHORT)
    events = json.loads((traced / "profile" / "trace.json").read_text())["traceEvents"]
    names = [str(event.get("name")) for event in events]
    steps = {name for name in names if name.startswith("ProfilerStep#")}
    assert steps == {"ProfilerStep#2", "ProfilerStep#3"}  # counted from 0: the third and the fourth
    assert any(name.startswith("aten::") for name in names)
    assert "aten::" in (traced / "profile" / "operators.txt").read_text()
    losses = [[line["train/loss"] for line in read_metrics(run)] for run in (traced, plain)]
    assert losses[0] == losses[1]


def test_a_run_that_is_too_short(project: Project) -> None:
    assert project.refused("run", "run.profile=4", *SHORT) == (
        "run.profile: 4 steps are traced after the first 2, but the run has 5 steps. Set it to 3 or less, or train for "
        "longer."
    )
    message = project.refused("run", "run.profile=1", "optim.max_steps=2", *SHORT[1:])
    assert message.endswith("but the run has 2 steps. Remove it, or train for longer.")
