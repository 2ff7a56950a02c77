"""data.group_by_prompt and labelled answers, from the file to what commands show and to the exported model."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.project import Project, Weights


def pairs_of_few_prompts(count: int, seed: int) -> list[dict[str, Any]]:
    """Pairs of seven prompts, some with a chosen answer in common."""
    rng = random.Random(seed)
    return [
        {
            "prompt": f"why {rng.randrange(7)}?",
            "chosen": "yes " * rng.randint(1, 4),
            "rejected": f"no {rng.randrange(99)}",
        }
        for _ in range(count)
    ]


@pytest.fixture
def few_prompts(project: Project) -> Project:
    project.write_pairs("train.jsonl", pairs_of_few_prompts(23, seed=0))
    return project


def lines_of(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


def farthest(one: Weights, other: Weights) -> float:
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


@pytest.mark.parametrize("weighting", ["token", "completion"])
def test_a_batch_of_all_pairs_is_the_same_grouped(
    few_prompts: Project, load_weights: Callable[[Path], Weights], weighting: str
) -> None:
    """Each comparison counts by its own tokens, so grouping leaves the loss as it was; by examples it does not."""
    common = ("data.eval=null", "optim.batch_size=23", "optim.epochs=3", "optim.lr=1e-2")
    found = []
    for number, grouped in enumerate(("false", "true")):
        settings = (*common, f"objective.weighting={weighting}", f"data.group_by_prompt={grouped}")
        found.append(load_weights(few_prompts.train(f"run{number}", *settings) / "model"))
    assert farthest(*found) < 1e-8
    other = few_prompts.train("other", *common, "objective.weighting=example", "data.group_by_prompt=true")
    assert farthest(found[0], load_weights(other / "model")) > 1e-5


def test_the_layout_does_not_change_the_weights_of_grouped_pairs(
    few_prompts: Project, load_weights: Callable[[Path], Weights]
) -> None:
    common = ("data.group_by_prompt=true", "optim.batch_size=3", "optim.lr=1e-2")
    found: list[Weights] = []
    for number, (rows, tokens) in enumerate([("shared", "4096"), ("packed", "600"), ("padded", "700")]):
        layout = (f"layout.rows={rows}", f"layout.microbatch_tokens={tokens}")
        found.append(load_weights(few_prompts.train(f"run{number}", *common, *layout) / "model"))
    assert max(farthest(found[0], other) for other in found[1:]) < 1e-8


def test_what_is_said_of_grouped_pairs(few_prompts: Project) -> None:
    changes = ("data.group_by_prompt=true", "data.eval=null", "optim.batch_size=3")
    outcome = few_prompts.isopref("train", "my.yaml", "run.folder=run", "optim.epochs=1", *changes)
    assert outcome.code == 0, outcome.err
    assert "data  train.jsonl: 7 prompts with pairs (jsonl, text)\n" in outcome.out
    assert "      16 records joined to an earlier one with the same prompt\n" in outcome.out
    assert "train 3 steps: 7 prompts, 3 per step, 1 epoch\n" in outcome.out
    outcome = few_prompts.isopref("data", "my.yaml", *changes)
    assert (outcome.code, outcome.err) == (0, "")
    lines = lines_of(outcome.out)
    assert "records 23 read" in lines
    assert "prompts 7 to train on" in lines
    assert "16 records joined to an earlier one with the same prompt" in lines
    assert any(line.startswith("7 prompts to train on, ") and "23 comparisons" in line for line in lines)
    plan = few_prompts.isopref("plan", "my.yaml", "model.dtype=float32", "--card", "H100", *changes)
    assert plan.code == 0, plan.err
    assert "one step of 3 prompts" in plan.out


def test_grouping_that_changes_nothing_is_said_aloud(project: Project) -> None:
    records = [{"prompt": f"why {n}?", "chosen": "yes", "rejected": "no"} for n in range(9)]
    project.write_pairs("train.jsonl", records)
    outcome = project.isopref("data", "my.yaml", "data.group_by_prompt=true", "data.eval=null")
    assert "warning: data.group_by_prompt: no two records of a source have the same prompt" in outcome.out


# --- labels ------------------------------------------------------------------------------------------


@pytest.fixture
def labels(project: Project) -> Project:
    records: list[dict[str, Any]] = [
        {"prompt": "Name a prime.", "completion": "7", "label": True},
        {"prompt": "Name a prime.", "completion": "It is 9.", "label": False},
        {"prompt": "Name a prime.", "completion": "7", "label": False},
        {"prompt": "Capital of Peru?", "completion": "Lima.", "label": "good"},
        {"prompt": "Capital of Peru?", "completion": "Lima.", "label": "perhaps"},
    ]
    project.write_pairs("train.jsonl", records)
    return project


def test_what_is_said_of_labels(labels: Project) -> None:
    changes = ("data.eval=null", "data.on_bad=drop", "optim.batch_size=2")
    outcome = labels.isopref("data", "my.yaml", *changes)
    assert (outcome.code, outcome.err) == (0, "")
    lines = lines_of(outcome.out)
    at = next(n for n, line in enumerate(lines) if "to train on," in line)
    assert lines[at : at + 4] == [
        "4 answers to train on, 2 good, 2 bad, 2 different prompts",
        "answers per prompt: 1 to 3, 2.0 on average",
        "warning: 2 answers contradict another one: the same answer is good and bad",
        "2 answers repeat an earlier prompt; data.group_by_prompt: true computes each prompt once",
    ]
    assert "records 5 read; dropped: 1 label (not a label)" in lines
    assert any(line.startswith("good answer ") for line in lines)
    assert "[[good]]Lima.<|im_end|>" in lines
    found = json.loads(labels.isopref("data", "my.yaml", "--json", *changes).out)
    assert (found["train"]["unit"], found["train"]["good"], found["train"]["bad"]) == ("answer", 2, 2)
    grouped = lines_of(labels.isopref("data", "my.yaml", "data.group_by_prompt=true", *changes).out)
    assert "2 prompts to train on, 4 answers, 2 good, 2 bad" in grouped
    at = grouped.index("[[answer 1, good]]7<|im_end|>")
    assert grouped[at + 1 : at + 3] == ["[[answer 2, bad]]It is 9.<|im_end|>", "[[answer 3, bad]]7<|im_end|>"]


@pytest.mark.parametrize(("grouped", "unit"), [("false", "answers"), ("true", "prompts")])
def test_the_plan_of_labels(labels: Project, grouped: str, unit: str) -> None:
    changes = ("data.eval=null", "data.on_bad=drop", "optim.batch_size=2", f"data.group_by_prompt={grouped}")
    outcome = labels.isopref("plan", "my.yaml", "model.dtype=float32", "--card", "H100", *changes)
    assert outcome.code == 0, outcome.err
    assert f"one step of 2 {unit}" in outcome.out
    assert f"{unit}/s" in outcome.out
    assert "pairs" not in outcome.out
