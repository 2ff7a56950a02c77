"""Lists of answers with scores, from the file to the exported model."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.project import Project, Weights

LOSSES = ("plackett_luce", "softmax", "lipo", "sigmoid", "ipo", "aot", "odpo")


def make_lists(count: int, seed: int) -> list[dict[str, Any]]:
    """Lists of two to five answers; those that begin with yes have the better scores."""
    rng = random.Random(seed)

    def word(longest: int) -> str:
        return "".join(rng.choices("abcdefgh", k=rng.randint(2, longest)))

    lists = []
    for _ in range(count):
        kinds = ["yes", *rng.choices(["yes", "no"], k=rng.randint(0, 3)), "no"]
        scores = [(kind == "yes") + rng.random() for kind in kinds]
        answers = [f"{kind} {word(12)}" for kind in kinds]
        lists.append({"prompt": f"{word(8)}?", "responses": answers, "scores": scores})
    return lists


@pytest.fixture
def lists(project: Project) -> Project:
    project.write_pairs("train.jsonl", make_lists(23, seed=0))
    project.write_pairs("eval.jsonl", make_lists(8, seed=1))
    return project


# One of lists, one with gaps between scores, one that couples comparisons; the matrix has all of them.
IN_EVERY_SUITE = ("plackett_luce", "odpo", "aot")


@pytest.mark.parametrize(
    "loss", [pytest.param(one, marks=() if one in IN_EVERY_SUITE else pytest.mark.soak) for one in LOSSES]
)
def test_the_layout_does_not_change_the_weights(
    lists: Project, load_weights: Callable[[Path], Weights], loss: str
) -> None:
    weighting = "gap" if loss == "odpo" else "example"
    common = (f"objective.loss={loss}", f"objective.weighting={weighting}", "optim.epochs=1", "optim.lr=1e-2")
    layouts = [("shared", "4096"), ("shared", "128"), ("padded", "4096"), ("padded_separate", "300")]
    found: list[Weights] = []
    for number, (rows, tokens) in enumerate(layouts):
        layout = (f"layout.rows={rows}", f"layout.microbatch_tokens={tokens}")
        found.append(load_weights(lists.train(f"run{number}", *common, *layout) / "model"))
    for other in found[1:]:
        for name, tensor in found[0].items():
            assert tensor.double().sub(other[name].double()).abs().max() < 1e-8, name


@pytest.mark.parametrize("setting", ["objective.loss=odpo", "objective.weighting=gap"])
def test_pairs_without_scores_have_no_gap(project: Project, setting: str) -> None:
    message = project.refused("run", setting)
    assert f"{setting.replace('=', ': ')}: " in message
    assert "comparisons have no score gap" in message


def test_what_a_run_says_of_lists(lists: Project) -> None:
    outcome = lists.isopref("train", "my.yaml", "run.folder=run", "objective.loss=plackett_luce", "optim.epochs=1")
    assert outcome.code == 0, outcome.err
    assert "data  train.jsonl: 23 lists (jsonl, list)\n" in outcome.out
    assert "train 5 steps: 23 lists, 5 per step, 1 epoch\n" in outcome.out
    assert " lists/s" in outcome.out
    assert re.search(r"\d+ comparisons of 8 held-out lists, with 95% intervals", outcome.out)
    assert all(name in outcome.out for name in ("best answer on top", "Kendall's tau", "NDCG"))
    page = (lists.folder / "run" / "report.html").read_text()
    assert "23 lists" in page
    assert "comparisons of 8 held-out lists" in page
    assert "lists per second" in page


def test_an_answer_is_scored_once_by_the_reference(lists: Project) -> None:
    """Six comparisons of four answers are four values."""
    record = {"prompt": "why?", "responses": ["a", "b", "c", "d"], "scores": [1, 2, 3, 4]}
    lists.write_pairs("train.jsonl", [record])
    outcome = lists.isopref("train", "my.yaml", "run.folder=run", "data.eval=null", "optim.batch_size=1")
    assert outcome.code == 0, outcome.err
    assert "cache 0 of 1 training lists have their reference" in outcome.out
    (values,) = (lists.folder / "run" / "reference" / "training").glob("*/*.shard")
    assert len(values.read_bytes()) == 32 + 4 * 28  # a header, and a record for each answer


def test_the_data_command(lists: Project) -> None:
    outcome = lists.isopref("data", "my.yaml", "data.compare=best_worst", "--json")
    assert outcome.code == 0, outcome.err
    found = json.loads(outcome.out)
    assert (found["train"]["examples"], found["train"]["comparisons"]) == (23, 23)
    assert found["sources"][0]["found"]["shape"] == "list"
    assert all(name.startswith("answer ") for name in found["samples"][0]["answers"])
    outcome = lists.isopref("plan", "my.yaml", "model.dtype=float32", "--card", "H100")
    assert outcome.code == 0, outcome.err
