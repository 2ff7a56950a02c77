"""Objectives from the command line: by hand, under other layouts, refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from support.project import MakeProject, Project

SHORT = ("optim.max_steps=4", "run.export=false")


@pytest.fixture(scope="module")
def shared(make_project: MakeProject) -> Project:
    return make_project()


def test_simpo_and_the_likelihood_term_by_hand(
    shared: Project, tmp_path: Path, read_metrics: Callable[[Path], list[dict[str, float]]]
) -> None:
    run = shared.train(
        str(tmp_path / "run"), "objective.loss=simpo", "objective.gamma=0.4", "objective.nll_weight=0.3",
        "optim.batch_size=1", "data.eval=null", *SHORT,
    )  # fmt: skip
    for line in read_metrics(run):  # one pair a batch; beta is simpo's default
        preference = math.log1p(math.exp(0.4 - 2.0 * line["train/margin"]))
        assert line["train/loss"] == pytest.approx(preference + 0.3 * line["train/nll"], rel=1e-5)
        assert line["train/rewards_chosen"] == pytest.approx(-2.0 * line["train/nll"], rel=1e-5)


@pytest.mark.parametrize(
    "objective",
    [
        ["objective.loss=orpo"],
        ["objective.loss=ipo", "objective.nll_weight=0.5"],
        ["objective.loss={aot: 1, bco_pair: 0.5}"],
        ["objective.reference_moves=[2, 0.5]"],
        ["objective.ld_alpha=0.5", "objective.wpo=true", "objective.nll_weight=0.2"],
        ["objective.divergence=0.5", "objective.label_smoothing=0.1"],
    ],
)
def test_a_layout_changes_no_step(
    shared: Project, tmp_path: Path, read_metrics: Callable[[Path], list[dict[str, float]]], objective: list[str]
) -> None:
    layouts = [["layout.rows=shared"], ["layout.rows=padded_separate", "layout.microbatch_tokens=80"]]
    runs = [shared.train(str(tmp_path / str(n)), *objective, *SHORT, *layout) for n, layout in enumerate(layouts)]
    one, other = ([line["train/loss"] for line in read_metrics(run) if "train/loss" in line] for run in runs)
    assert len(set(one)) == 4  # it trains
    assert other == pytest.approx(one, rel=1e-6)
    held_out = [json.loads((run / "evaluation.json").read_text())["after"]["loss"]["value"] for run in runs]
    assert held_out[0] == pytest.approx(held_out[1], rel=1e-6)


def test_a_parameter_of_another_loss_is_refused(shared: Project) -> None:
    message = shared.refused("run", "objective.loss=hinge", "objective.gamma=1")
    assert "objective.gamma: 1.0 does nothing with the loss hinge, which takes beta. Remove gamma, or" in message
    assert not (shared.folder / "run").exists()


def test_experts_that_there_are_not_are_refused(shared: Project) -> None:
    message = shared.refused("experts", "objective.balance_weight=0.01")
    assert "objective.balance_weight: GPT2LMHeadModel shows no router logits" in message
    assert not (shared.folder / "experts" / "config.yaml").exists()


def test_every_ld_alpha_has_the_same_store(project: Project) -> None:
    """It holds log-probabilities of whole answers and of their first tokens, which no alpha changes."""
    stores = []
    for number, alpha in enumerate((0.5, 1.0, 0.5)):
        project.train(f"run{number}", *SHORT, f"objective.ld_alpha={alpha}")
        stores.append(len(list((project.folder / "cache" / "reference").iterdir())))
    assert stores == [1, 1, 1]


def test_a_moving_reference_is_not_scored_ahead(project: Project) -> None:
    moves = "objective.reference_moves=[2, 0.5]"
    outcome = project.isopref("train", "my.yaml", "run.folder=run", *SHORT, moves)
    assert outcome.code == 0, outcome.err
    assert "reference: moves 0.5 of the way to the model every 2 steps; keeps a second model in memory" in outcome.out
    assert "held-out pairs have their reference" in outcome.out
    assert "training pairs have their reference" not in outcome.out
    outcome = project.isopref("cache", "my.yaml", moves)
    assert outcome.code == 1
    assert "objective.reference_moves is [2, 0.5]: a moving reference cannot be scored ahead of time" in outcome.err
