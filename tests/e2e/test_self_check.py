"""Before the first update the policy is the reference; a run where that does not hold is stopped."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from isopref.build.reference import look_up_or_score
from isopref.build.trainer import build_trainer
from isopref.score import TableLogps
from support.project import Project

QUICK = ("optim.max_steps=2", "data.eval=null")
WAYS_OUT = (
    "layout.rows: padded",
    "weights that changed",
    "randomness in the forward pass",
    "To score the reference again: isopref cache rm ",
)


def check_refusal(project: Project, message: str) -> None:
    assert message.startswith("first step: policy and reference are the same model, so the loss should be ")
    assert all(way in message for way in WAYS_OUT)
    run = project.folder / "run"
    assert not (run / "model").exists()
    assert not list((run / "checkpoints").glob("step*"))


@pytest.mark.parametrize("side", ["chosen", "rejected", "both"])
def test_a_reference_that_is_off(project: Project, monkeypatch: pytest.MonkeyPatch, side: str) -> None:
    """By 0.01 nats an answer; off alike on both sides, the loss is still log 2, so rewards have to be looked at."""

    def off(*arguments: Any) -> TableLogps:
        logps = look_up_or_score(*arguments)
        sides = logps.chosen + 0.01 * (side != "rejected"), logps.rejected + 0.01 * (side != "chosen")
        return TableLogps.of_pairs(*sides)

    with monkeypatch.context() as patch:
        patch.setattr("isopref.build.reference.look_up_or_score", off)
        message = project.refused("run", *QUICK)
    check_refusal(project, message)
    assert "should be 0.693147 and rewards 0" in message
    assert "nats per token" in message

    # What the message advises can be tried at once, in the same folder.
    outcome = project.isopref("train", "my.yaml", "run.folder=run", *QUICK, "layout.rows=padded", "--resume")
    assert outcome.code == 0, outcome.err
    assert "resume from the first step: no checkpoint yet\n" in outcome.out


def test_weights_that_changed_after_the_reference(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    def perturbed(run: Any, model: Any, *arguments: Any) -> Any:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.01)
        return build_trainer(run, model, *arguments)

    monkeypatch.setattr("isopref.build.train.build_trainer", perturbed)
    check_refusal(project, project.refused("run", *QUICK))


def test_a_reference_that_is_no_number(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any) -> TableLogps:
        logps = look_up_or_score(*arguments)
        return TableLogps.of_pairs(logps.chosen * math.nan, logps.rejected)

    monkeypatch.setattr("isopref.build.reference.look_up_or_score", broken)
    check_refusal(project, project.refused("run", *QUICK))


@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["objective.label_smoothing=0.1"],
        ["objective.weighting=example", "objective.beta=5"],
        ["model.dtype=float32"],
        ["model.dtype=bfloat16"],
        ["model.dtype=float32", "model.compute_dtype=bfloat16"],
        ["layout.score_tokens=100", "layout.rows=padded"],
    ],
    ids=" ".join,
)
def test_a_right_run_passes(
    project: Project, read_metrics: Callable[[Path], list[dict[str, float]]], settings: list[str]
) -> None:
    first = read_metrics(project.train("run", *QUICK, *settings))[0]
    assert first["train/loss"] == pytest.approx(math.log(2), abs=0.01 if "bfloat16" in str(settings) else 1e-4)
