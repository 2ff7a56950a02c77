"""kto and bco on pairs, from the file to the report: whatever the layout, on one rank and two, stopped and resumed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from isopref.engine.train_module import DPOTrainModule
from support.forked import isopref_on_ranks
from support.project import Project, Weights

COMMON = ("optim.epochs=1", "optim.lr=1e-2", "objective.nll_weight=0.1")


@pytest.mark.parametrize("loss", ["kto", "bco"])
def test_the_layout_does_not_change_the_weights(
    project: Project, load_weights: Callable[[Path], Weights], loss: str
) -> None:
    layouts = [("shared", "4096"), ("shared", "128"), ("padded", "4096"), ("padded_separate", "300")]
    found: list[Weights] = []
    for number, (rows, tokens) in enumerate(layouts):
        layout = (f"objective.loss={loss}", f"layout.rows={rows}", f"layout.microbatch_tokens={tokens}")
        found.append(load_weights(project.train(f"run{number}", *COMMON, *layout) / "model"))
    for other in found[1:]:
        for name, tensor in found[0].items():
            assert tensor.double().sub(other[name].double()).abs().max() < 1e-8, name


@pytest.mark.xdist_group("ranks")
def test_kto_on_two_ranks_ends_where_one_does(project: Project, load_weights: Callable[[Path], Weights]) -> None:
    one = load_weights(project.train("one", "objective.loss=kto", *COMMON) / "model")
    outcome = isopref_on_ranks(project, "train", "my.yaml", "run.folder=two", "objective.loss=kto", *COMMON)
    assert outcome.code == 0, outcome.err
    for name, tensor in load_weights(project.folder / "two" / "model").items():
        assert tensor.double().sub(one[name].double()).abs().max() < 1e-8, name


class PulledPlugError(Exception):
    """Stands for all that ends a process without a warning."""


@pytest.mark.parametrize("loss", ["kto", "bco"])
def test_a_resumed_run_ends_in_the_same_bits(
    project: Project, load_weights: Callable[[Path], Weights], monkeypatch: pytest.MonkeyPatch, loss: str
) -> None:
    settings = (f"objective.loss={loss}", "optim.lr=1e-2", "run.save_every=3")
    straight = load_weights(project.train("straight", *settings) / "model")
    ours = DPOTrainModule.optim_step

    def fails_once(self: DPOTrainModule) -> None:
        if self.trainer.global_step == 5:
            monkeypatch.undo()
            raise PulledPlugError
        ours(self)

    monkeypatch.setattr(DPOTrainModule, "optim_step", fails_once)
    with pytest.raises(PulledPlugError):
        project.train("run", *settings)
    outcome = project.isopref("train", "my.yaml", "run.folder=run", *settings, "--resume")
    assert outcome.code == 0, outcome.err
    assert "resume after step 3" in outcome.out
    resumed = load_weights(project.folder / "run" / "model")
    assert all(tensor.equal(resumed[name]) for name, tensor in straight.items())


def test_metrics_figures_eval_and_report(project: Project) -> None:
    outcome = project.isopref("train", "my.yaml", "run.folder=run", "objective.loss=kto", *COMMON)
    assert outcome.code == 0, outcome.err
    assert "AUC of rewards" in outcome.out
    lines = [json.loads(line) for line in (project.folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["train/loss"] == pytest.approx(0.5 + 0.1 * lines[0]["train/nll"], rel=1e-6)  # policy is reference
    assert lines[0]["train/kl"] == 0
    assert {"eval/loss", "eval/auc", "eval/calibration_error", "eval/accuracy"} <= lines[-1].keys()
    after = json.loads((project.folder / "run" / "evaluation.json").read_text())["after"]
    assert 0 <= after["auc"]["low"] <= after["auc"]["value"] <= after["auc"]["high"] <= 1
    assert sum(one["answers"] for one in after["calibration"]) == after["answers"] == 2 * after["pairs"]
    again = project.isopref(
        "eval", "my.yaml", "--model", "run/model", "--json", "found.json", "objective.loss=kto", *COMMON
    )
    assert again.code == 0, again.err
    found = json.loads((project.folder / "found.json").read_text())
    assert found["auc"]["value"] == pytest.approx(after["auc"]["value"], abs=1e-6)
    assert found["loss"]["value"] == pytest.approx(after["loss"]["value"], rel=1e-4)
    assert "AUC of rewards" in (project.folder / "run" / "report.html").read_text()


def test_lists_with_scores_are_refused_before_anything_is_scored(project: Project) -> None:
    record = {"prompt": "why?", "responses": ["a", "b", "c"], "scores": [1, 2, 3]}
    project.write_pairs("train.jsonl", [record, {**record, "prompt": "how?"}])
    outcome = project.isopref("train", "my.yaml", "run.folder=run", "objective.loss=kto", "data.eval=null")
    assert outcome.code != 0
    assert "kto needs a label for every answer" in outcome.err
    assert "Scores of a list are not labels" in outcome.err
    assert "cache " not in outcome.out
