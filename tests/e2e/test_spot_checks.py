"""Spot checks of a run: measured before and after as the definitions say, shown, and without effect on training."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from isopref.models.generate import ANSWER_TOKENS
from isopref.testing.oracle import sequence_logp
from support.project import MakeProject, Project

TEXTS = ["It rained all night.", "The road was dry by noon, and we walked home."]
PROMPTS = ["abc?", "a longer question"]
SETTINGS = ("run.spot_checks=checks.jsonl", "optim.max_steps=3")


def loaded(folder: Path) -> tuple[Any, Any]:
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval(), AutoTokenizer.from_pretrained(folder)


@torch.no_grad()
def greedy(folder: Path, prompt: str) -> str:
    """One token at a time, by the model's own logits."""
    model, tokenizer = loaded(folder)
    messages = [{"role": "user", "content": prompt}]
    start = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(start, add_special_tokens=False)["input_ids"]
    said: list[int] = []
    while len(said) < ANSWER_TOKENS and tokenizer.eos_token_id not in said:
        said.append(int(model(input_ids=torch.tensor([ids + said])).logits[0, -1].argmax()))
    return str(tokenizer.decode(said, skip_special_tokens=True)).strip()


@torch.no_grad()
def mean_logp(folder: Path) -> float:
    model, tokenizer = loaded(folder)
    rows = [np.array(tokenizer(text)["input_ids"]) for text in TEXTS]
    total = sum(float(sequence_logp(model, row[:1], row[1:])) for row in rows)
    return total / sum(len(row) - 1 for row in rows)


@pytest.fixture(scope="module")
def project(make_project: MakeProject) -> Project:
    made = make_project()
    questions = [
        {"prompt": prompt, "expect": [greedy(made.model, prompt) or "nothing", "never said"]} for prompt in PROMPTS
    ]
    records = [*questions, *({"text": text} for text in TEXTS)]
    (made.folder / "checks.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return made


@pytest.fixture(scope="module")
def run(project: Project) -> Path:
    return project.train("run", *SETTINGS)


def test_answers_and_texts_are_measured_before_and_after(project: Project, run: Path) -> None:
    found = json.loads((run / "spot_checks.json").read_text())
    assert [one["prompt"] for one in found["questions"]] == PROMPTS
    for one in found["questions"]:
        assert one["before"] == greedy(project.model, one["prompt"])
        assert one["after"] == greedy(run / "model", one["prompt"])
    assert found["text"]["logp_before"] == pytest.approx(mean_logp(project.model), rel=1e-9)
    assert found["text"]["logp_after"] == pytest.approx(mean_logp(run / "model"), rel=1e-9)
    assert found["text"]["logp_before"] != found["text"]["logp_after"]


@pytest.mark.parametrize("rows", ["packed", "padded", "padded_separate"])
def test_every_kind_of_row_measures_the_same(project: Project, run: Path, rows: str) -> None:
    """`run` has shared rows."""
    other = project.train(rows, *SETTINGS, f"layout.rows={rows}", "optim.max_steps=1")
    logps = [json.loads((one / "spot_checks.json").read_text())["text"]["logp_before"] for one in (run, other)]
    assert logps[0] == pytest.approx(logps[1], rel=1e-9)


def test_the_weights_do_not_depend_on_them(
    project: Project, run: Path, load_weights: Callable[[Path], dict[str, Tensor]]
) -> None:
    without = project.train("without", "optim.max_steps=3")
    a, b = load_weights(run / "model"), load_weights(without / "model")
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_the_run_shows_them(project: Project) -> None:
    outcome = project.isopref("train", "my.yaml", *SETTINGS, "run.folder=shown", "data.eval=null")
    assert outcome.code == 0, outcome.err
    assert "spot checks: what it cost" in outcome.out
    assert "still correct" in outcome.out
    assert "What it cost" in (project.folder / "shown" / "report.html").read_text()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": "a"}', r"bad.jsonl:1: has the fields ['prompt']. A spot check is "),
        ('{"text": "a"}', "bad.jsonl: text 1 has only one token, so there is nothing to predict. Use a longer text."),
        (json.dumps({"text": 300 * "a"}), "text 1 has 300 tokens, but the model's max_position_embeddings is 256."),
    ],
)
def test_a_bad_file_is_refused_before_training(project: Project, content: str, message: str) -> None:
    (project.folder / "bad.jsonl").write_text(content + "\n")
    assert message in project.refused("bad", "run.spot_checks=bad.jsonl")
    assert not (project.folder / "bad").exists()
