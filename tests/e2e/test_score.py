"""`isopref score`: the same scores as transformers, in the order of the file, also where it was killed half-way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from isopref.build import score
from isopref.testing.oracle import sequence_logp, sequence_reward
from support.forked import isopref_on_ranks
from support.project import Project, make_pairs

FLOAT64 = "model.dtype=float64"


@pytest.fixture
def reward(project: Project) -> Path:
    """The folder of a reward model."""
    return project.train("run", "objective.loss=bradley_terry", "optim.epochs=1", "optim.lr=1e-2") / "model"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def tokens(tokenizer: Any, record: dict[str, Any], answer: str) -> tuple[Any, Any]:
    """A prompt and its answer, up to the token that ends it."""
    question = [{"role": "user", "content": record["prompt"]}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, f"{answer}<|im_end|>")]
    return ids[0], ids[1]


@torch.no_grad()
def test_rewards_are_transformers_own(project: Project, reward: Path) -> None:
    outcome = project.isopref("score", "eval.jsonl", "--model", str(reward), FLOAT64)
    assert outcome.code == 0, outcome.err
    found = lines(project.folder / "eval.scores.jsonl")
    model = AutoModelForSequenceClassification.from_pretrained(reward, dtype="auto").eval()
    tokenizer = AutoTokenizer.from_pretrained(reward)
    records = lines(project.folder / "eval.jsonl")
    assert len(found) == len(records)
    for number, (line, record) in enumerate(zip(found, records, strict=True)):
        assert (line["index"], line["origin"]) == (number, f"eval.jsonl:{number + 1}")
        for given, side in zip(line["rewards"], ("chosen", "rejected"), strict=True):
            ids = tokens(tokenizer, record, record[side])
            assert given == pytest.approx(float(sequence_reward(model, *ids)), abs=1e-9)


@torch.no_grad()
def test_a_language_model_gives_log_probabilities_of_lists(project: Project) -> None:
    record: dict[str, Any] = {"prompt": "why?", "responses": ["because", "because it is", "no"], "scores": [2, 3, 1]}
    project.write_pairs("lists.jsonl", [record])
    outcome = project.isopref("score", "lists.jsonl", "--model", str(project.model), "--out", "found.jsonl", FLOAT64)
    assert outcome.code == 0, outcome.err
    (line,) = lines(project.folder / "found.jsonl")
    model = AutoModelForCausalLM.from_pretrained(project.model, dtype="auto").eval()
    tokenizer = AutoTokenizer.from_pretrained(project.model)
    expected = [float(sequence_logp(model, *tokens(tokenizer, record, one))) for one in record["responses"]]
    assert line["logps"] == pytest.approx(expected, abs=1e-9)
    assert line["tokens"] == [len(tokens(tokenizer, record, one)[1]) for one in record["responses"]]


@pytest.mark.parametrize("torn", ["", '{"index": 8, "orig', '{"index": 8}\n{"index": 9}\n'])
def test_it_goes_on_where_it_was_killed(project: Project, reward: Path, torn: str) -> None:
    project.write_pairs("many.jsonl", make_pairs(23, seed=3))
    with mock.patch.object(score, "CHUNK", 4):
        outcome = project.isopref("score", "many.jsonl", "--model", str(reward), "--out", "whole.jsonl")
        assert outcome.code == 0, outcome.err
        append = score.Unfinished.append
        written: list[str] = []

        def killed(self: score.Unfinished, text: str) -> None:
            if len(written) == 2:
                append(self, torn)
                raise MemoryError("killed")
            written.append(text)
            append(self, text)

        arguments = ("score", "many.jsonl", "--model", str(reward), "--out", "again.jsonl")
        with mock.patch.object(score.Unfinished, "append", killed), pytest.raises(MemoryError):
            project.isopref(*arguments)
        assert not (project.folder / "again.jsonl").exists()
        outcome = project.isopref("score", "many.jsonl", "--model", str(project.model), "--out", "again.jsonl")
        assert "with another model or other data" in outcome.err
        outcome = project.isopref(*arguments)
    assert outcome.code == 0, outcome.err
    assert "resume after 8 of 23 pairs" in outcome.out
    assert (project.folder / "again.jsonl").read_bytes() == (project.folder / "whole.jsonl").read_bytes()
    assert not list(project.folder.glob(".again*"))


def test_two_processes(project: Project, reward: Path) -> None:
    command = ("score", "eval.jsonl", "--model", str(reward), FLOAT64, "--out")
    for outcome in (project.isopref(*command, "one.jsonl"), isopref_on_ranks(project, *command, "two.jsonl")):
        assert outcome.code == 0, outcome.err
    one, two = (lines(project.folder / name) for name in ("one.jsonl", "two.jsonl"))
    assert [line["origin"] for line in one] == [line["origin"] for line in two]
    for a, b in zip(one, two, strict=True):
        assert a["rewards"] == pytest.approx(b["rewards"], abs=1e-12)


def test_dropped_records_are_counted(project: Project) -> None:
    short = {"prompt": "why?", "chosen": "because", "rejected": "no"}
    project.write_pairs("mixed.jsonl", [short, short | {"chosen": "because " * 40}, short])
    outcome = project.isopref("score", "mixed.jsonl", "--model", str(project.model), "data.max_length=100")
    assert outcome.code == 0, outcome.err
    assert [line["origin"] for line in lines(project.folder / "mixed.scores.jsonl")] == [
        "mixed.jsonl:1",
        "mixed.jsonl:3",
    ]
    assert "of 4 answers. Of 3 records 1 were dropped: 1 too_long." in " ".join(outcome.out.split())


def test_what_is_refused(project: Project) -> None:
    (project.folder / "there.jsonl").write_text("")
    model = ("--model", str(project.model))
    for arguments, message in (
        (("eval.jsonl", *model, "--out", "there.jsonl"), "there.jsonl already exists"),
        (
            ("eval.jsonl", *model, "--out", "no/folder/out.jsonl"),
            "does not exist or is not writable. Create it, or choose another --out.",
        ),
        (("none.jsonl", *model), "none.jsonl"),
        (("eval.jsonl", *model, "optim.lr=1"), "takes settings of model, data, layout, run"),
        (("eval.jsonl", *model, "data.eval=train.jsonl"), "data.eval: isopref score reads FILE. Remove it."),
        (("eval.jsonl", *model, "data.train.path=train.jsonl"), "data.train: isopref score reads FILE. Remove it."),
        (("eval.jsonl", *model, "model.path=other"), "model.path: isopref score loads --model. Remove it."),
    ):
        outcome = project.isopref("score", *arguments)
        assert outcome.code == 1
        assert message in outcome.err
