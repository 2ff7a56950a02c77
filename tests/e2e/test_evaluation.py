"""Evaluating: as a command, during training, and without a trace in what is trained."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from olmo_core.train.callbacks import Callback

from isopref.build import trainer as build_trainer
from isopref.build.microbatch import settle_layout
from isopref.engine.loader import ExampleLoader
from isopref.testing.models import tiny_folder
from support.project import MakeProject, Project, Weights

LoadWeights = Callable[[Path], "Weights"]
ReadMetrics = Callable[[Path], list[dict[str, float]]]


# --- the command -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shared(make_project: MakeProject) -> Project:
    return make_project()


@pytest.fixture(scope="module")
def run(shared: Project) -> Path:
    return shared.train("run")


def evaluated(project: Project, *arguments: str) -> dict[str, Any]:
    outcome = project.isopref("eval", "my.yaml", *arguments, "--json", "out/figures.json")
    assert outcome.code == 0, outcome.err
    found: dict[str, Any] = json.loads((project.folder / "out" / "figures.json").read_text())
    return found


LAYOUTS = [[], ["layout.rows=padded", "layout.score_tokens=300"], ["layout.rows=packed", "layout.parallel=fsdp"]]


@pytest.mark.parametrize("layout", LAYOUTS, ids=" ".join)
def test_the_exported_model_has_the_figures_of_the_runs_end(shared: Project, run: Path, layout: list[str]) -> None:
    after = json.loads((run / "evaluation.json").read_text())["after"]
    found = evaluated(shared, *layout, "--model", "run/model")
    assert (found["model"], found["reference"], found["data"]) == ("run/model", str(shared.model), ["eval.jsonl"])
    for name, figure in after.items():
        if figure is None:
            assert found[name] is None, name
        elif name not in ("by_length", "by_source", "pairs"):
            assert found[name] == pytest.approx(figure, rel=1e-7, abs=1e-12), name
    assert [bucket["accuracy"] for bucket in found["by_length"]] == [b["accuracy"] for b in after["by_length"]]


def test_a_model_against_itself_has_no_margin(shared: Project, run: Path) -> None:
    found = evaluated(shared, "--model", "run/model", "--reference", "run/model")
    for bound in ("value", "low", "high"):
        assert found["reward_margin"][bound] == pytest.approx(0, abs=1e-9)
    assert found["reference"] == "run/model"


def test_a_run_stands_for_its_model(shared: Project, run: Path) -> None:
    expected = evaluated(shared, "--model", "run/model", "--reference", "run/model")
    assert evaluated(shared, "--model", "run", "--reference", "run") == expected
    assert expected["model"] == "run/model"
    against_config = evaluated(shared, "--model", "run/model")
    assert against_config["reward_margin"] != expected["reward_margin"]
    assert evaluated(shared, "--model", "./run/") == against_config


def test_another_reference_changes_rewards_and_nothing_else(
    shared: Project, run: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tiny_folder(tmp_path_factory.mktemp("other"), "gpt2", dtype=torch.float64, seed=1)
    first = evaluated(shared, "--model", "run/model")
    second = evaluated(shared, "--model", "run/model", "--reference", str(other))
    third = evaluated(shared, "--model", "run/model", f"model.reference={other}")
    assert first["logp_accuracy"] == second["logp_accuracy"]
    assert first["reward_margin"] != second["reward_margin"]
    assert second == third


def test_the_table(shared: Project, run: Path) -> None:
    outcome = shared.isopref("eval", "my.yaml", "--model", str(run / "model"))
    assert outcome.code == 0, outcome.err
    assert "8 held-out pairs, with 95% intervals" in outcome.out
    for label in ("preference accuracy", "mean reward margin", "reward~length corr.", " tokens "):
        assert label in outcome.out
    # Answers of a pair have half a token more or less on average: no two quarters may share a length.
    borders = [tuple(map(float, found)) for found in re.findall(r"accuracy, ([\d.]+)-([\d.]+) tokens", outcome.out)]
    assert len(borders) > 1
    assert all(longest < shortest for (_, longest), (shortest, _) in pairwise(borders))


def test_mistakes(shared: Project, run: Path) -> None:
    for arguments, code, message in (
        ([], 2, "Missing option '--model'"),
        (["--model", "./nowhere"], 1, "error: --model: there is no folder "),
        (["--model", "run/model", "--reference", "./nowhere"], 1, "error: --reference: there is no folder "),
        (["--model", "run/model", "data.eval=null"], 1, "error: data.eval is null"),
        (["--model", "run/model", "--json", "my.yaml/x.json"], 1, "error: --json: my.yaml/x.json cannot be written"),
    ):
        outcome = shared.isopref("eval", "my.yaml", *arguments)
        assert outcome.code == code, outcome
        assert message in outcome.err


# --- several sources -------------------------------------------------------------------------------


def test_figures_of_each_source_reach_the_metrics(project: Project, read_metrics: ReadMetrics) -> None:
    """Two files of four held-out pairs, named in the config; then a share held out of two files."""
    lines = (project.folder / "eval.jsonl").read_text().splitlines(keepends=True)
    (project.folder / "even.jsonl").write_text("".join(lines[::2]))
    (project.folder / "odd.jsonl").write_text("".join(lines[1::2]))
    run = project.train("run", "optim.max_steps=2", "data.eval=[even.jsonl, odd.jsonl]")
    last = read_metrics(run)[-1]
    assert {"eval/even/accuracy", "eval/odd/accuracy", "eval/odd/loss"} <= last.keys()
    both = (last["eval/even/reward_margin"] + last["eval/odd/reward_margin"]) / 2
    assert both == pytest.approx(last["eval/reward_margin"], rel=1e-5)
    figures = json.loads((run / "evaluation.json").read_text())["after"]
    assert {name: part["pairs"] for name, part in figures["by_source"].items()} == {"even": 4, "odd": 4}

    sources = ("data.train=[train.jsonl, eval.jsonl]", "data.eval=0.5")
    found = evaluated(project, *sources, "--model", "run/model")
    assert found["pairs"] == sum(part["pairs"] for part in found["by_source"].values())
    assert set(found["by_source"]) == {"train", "eval"}


def test_a_held_out_pair_longer_than_two_microbatches(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """Microbatches are fitted to the training pairs; scoring takes what there is, unless it is told otherwise."""
    monkeypatch.setitem(settle_layout.__globals__, "CPU_TOKENS", 16)
    with (project.folder / "eval.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": "a?", "chosen": "b" * 180, "rejected": "c" * 170}) + "\n")
    message = project.refused("run", "optim.max_steps=1", "layout.score_tokens=300")
    assert message.startswith("layout.score_tokens is 300, but eval.jsonl:9 takes ")
    start = json.loads((project.train("run", "optim.max_steps=1") / "starts.jsonl").read_text())
    assert 2 * start["microbatch_tokens"] < 350


# --- without a trace -------------------------------------------------------------------------------


@dataclass
class Recorder(Callback):
    """Random state and weights after every step."""

    seen: list[Any] = field(default_factory=list)
    priority = -1  # after the evaluation

    def post_step(self) -> None:
        module: Any = self.trainer.train_module
        weights = torch.cat([p.detach().flatten() for p in module.model.parameters()])
        state = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
        self.seen.append((weights.clone(), *state))


@pytest.mark.parametrize("layout", [[], ["layout.rows=padded"], ["layout.parallel=ddp"]], ids=" ".join)
def test_evaluating_leaves_training_bit_for_bit_as_it_is(
    project: Project, monkeypatch: pytest.MonkeyPatch, load_weights: LoadWeights, layout: list[str]
) -> None:
    """Weights, random states and the order of the data: without held-out pairs, and evaluated after every step."""
    orders: list[list[list[int]]] = []
    recorders: list[Recorder] = []
    ours, step = build_trainer._callbacks, ExampleLoader.step

    def callbacks(*arguments: Any) -> dict[str, Callback]:
        recorders.append(Recorder())
        orders.append([])
        return {**ours(*arguments), "recorder": recorders[-1]}

    def recorded(loader: ExampleLoader, index: Any) -> Any:
        orders[-1].append(index.tolist())
        return step(loader, index)

    monkeypatch.setattr(build_trainer, "_callbacks", callbacks)
    monkeypatch.setattr(ExampleLoader, "step", recorded)
    without = project.train("without", *layout, "data.eval=null", "run.samples=0")
    with_it = project.train("with", *layout, "run.eval_every=1", "run.samples=3")
    assert len((with_it / "metrics.jsonl").read_text().split("eval/accuracy_high")) == 11
    assert orders[0] == orders[1]
    first, second = (recorder.seen for recorder in recorders)
    assert len(first) == len(second) == 10
    for plain, evaluated in zip(first, second, strict=True):
        assert torch.equal(plain[0], evaluated[0])
        assert torch.equal(plain[1], evaluated[1])
        assert plain[2:] == evaluated[2:]
    a, b = load_weights(without / "model"), load_weights(with_it / "model")
    assert all(torch.equal(a[name], b[name]) for name in a)
