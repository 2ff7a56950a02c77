"""Models whose attention cannot be hooked: refused in packed rows, trained in padded ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from support.project import MakeProject, Project

ARCHITECTURES = {"mpt": "MptForCausalLM"}


@pytest.fixture(scope="module", params=ARCHITECTURES)
def unhookable(request: pytest.FixtureRequest, make_project: MakeProject) -> Project:
    return make_project(request.param, model={"dtype": "float32"}, optim={"max_steps": 2})


@pytest.mark.parametrize("rows", ["shared", "packed"])
def test_refused_in_packed_rows(unhookable: Project, rows: str) -> None:
    message = unhookable.refused(f"run-{rows}", f"layout.rows={rows}")
    assert any(
        message.startswith(f"{name} cannot be trained with layout.rows: {rows}") for name in ARCHITECTURES.values()
    )
    assert message.endswith("Set layout.rows: padded.")

    # What it says, done.
    unhookable.train(f"run-{rows}", "layout.rows=padded", "optim.max_steps=1")


@pytest.mark.parametrize("rows", ["padded", "padded_separate"])
def test_trained_in_padded_rows(
    unhookable: Project, read_metrics: Callable[[Path], list[dict[str, float]]], rows: str
) -> None:
    run = unhookable.train(rows, f"layout.rows={rows}", "run.samples=1")
    lines = read_metrics(run)
    assert [line["step"] for line in lines] == [1, 2]
    assert lines[0]["train/loss"] == pytest.approx(math.log(2), abs=1e-4)
    assert lines[1]["train/loss"] < lines[0]["train/loss"]
    assert (run / "model" / "model.safetensors").exists()
    assert (run / "samples.jsonl").exists()
