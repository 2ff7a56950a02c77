"""Reward models, from pairs and lists to an exported folder that transformers and peft load with the same scores."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from isopref.engine import train_module
from isopref.score import score
from support.project import MakeProject, Project, Weights, make_pairs
from support.rewards import check_scores, own_rewards

LOSS = "objective.loss=bradley_terry"
FAST = ("optim.epochs=1", "optim.lr=1e-2")


def load(folder: Path) -> Any:
    """An exported reward model, as a user would load it."""
    return AutoModelForSequenceClassification.from_pretrained(folder, dtype="auto").eval()


def weights(folder: Path) -> Weights:
    return {name: parameter.detach() for name, parameter in load(folder).named_parameters()}


@pytest.mark.parametrize("loss", ["bradley_terry", "plackett_luce_reward"])
def test_the_layout_does_not_change_the_weights(project: Project, loss: str) -> None:
    layouts = [("shared", "4096"), ("shared", "128"), ("padded", "4096"), ("padded_separate", "300")]
    found: list[Weights] = []
    for number, (rows, tokens) in enumerate(layouts):
        layout = (f"layout.rows={rows}", f"layout.microbatch_tokens={tokens}")
        found.append(weights(project.train(f"run{number}", f"objective.loss={loss}", *FAST, *layout) / "model"))
    assert found[0]["score.weight"].shape[0] == 1
    for other in found[1:]:
        for name, tensor in found[0].items():
            assert tensor.sub(other[name]).abs().max() < 1e-9, name


@pytest.mark.parametrize("architecture", ["gpt2", "llama_tied", "qwen3"])
def test_transformers_gives_the_exported_model_s_rewards(make_project: MakeProject, architecture: str) -> None:
    project = make_project(architecture, model={"dtype": "float32"})
    folder = project.train("run", LOSS, *FAST) / "model"
    model, tokenizer = load(folder), AutoTokenizer.from_pretrained(folder)
    assert type(model).__name__.endswith("ForSequenceClassification")
    assert (model.config.num_labels, model.config.id2label) == (1, {0: "LABEL_0"})
    assert model.config.pad_token_id == tokenizer.pad_token_id
    assert tokenizer.pad_token_id not in (None, tokenizer.eos_token_id)
    assert tokenizer.padding_side == "right"
    assert tokenizer.chat_template
    assert not (folder / "generation_config.json").exists()
    check_scores(model, tokenizer.pad_token_id, *own_rewards(folder))


def test_a_reward_model_learns_and_its_run_speaks_of_rewards(
    project: Project, read_metrics: Callable[[Path], list[dict[str, float]]]
) -> None:
    outcome = project.isopref("train", "my.yaml", "run.folder=run", LOSS, "optim.epochs=8", "optim.lr=3e-3")
    assert outcome.code == 0, outcome.err
    run = project.folder / "run"
    assert "AutoModelForSequenceClassification.from_pretrained('run/model')" in outcome.out
    assert "isopref score FILE --model run/model" in outcome.out
    last = [line for line in read_metrics(run) if "train/loss" in line][-1]
    assert last["train/accuracy"] == 1.0
    assert last["train/rewards_chosen"] > last["train/rewards_rejected"]
    assert not any("logp" in name or name.endswith("nll") for line in read_metrics(run) for name in line)
    after = json.loads((run / "evaluation.json").read_text())["after"]
    assert after["accuracy"]["value"] > 0.8
    assert after["logp_accuracy"] is None
    assert 0 < after["loss"]["value"] < math.log(2)
    assert 0 <= after["calibration_error"]["value"] <= 1
    for text in (outcome.out, (run / "report.html").read_text()):
        assert "log-prob" not in text.lower()
        assert "implicit" not in text.lower()
    assert " reference" not in outcome.out


def test_it_goes_on_where_it_was_stopped(project: Project) -> None:
    steps = ("optim.epochs=2", "optim.lr=1e-2", "run.save_every=1", LOSS)
    whole = weights(project.train("whole", *steps) / "model")
    project.train("again", *steps)
    shutil.rmtree(project.folder / "again" / "checkpoints" / "step10")
    shutil.rmtree(project.folder / "again" / "model")
    outcome = project.isopref("train", "my.yaml", "run.folder=again", *steps, "--resume")
    assert outcome.code == 0, outcome.err
    assert "resume after step 9" in outcome.out
    found = weights(project.folder / "again" / "model")
    assert all(torch.equal(tensor, found[name]) for name, tensor in whole.items())


def test_a_step_that_runs_out_of_memory_is_repeated_in_smaller_microbatches(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = weights(project.train("whole", LOSS, *FAST) / "model")

    def limited(model: Any, microbatch: Any, needs: Any) -> Any:
        if model.training and microbatch.passes[0].input_ids.numel() > 150:
            raise torch.OutOfMemoryError("planted")
        return score(model, microbatch, needs)

    monkeypatch.setattr(train_module, "score", limited)
    outcome = project.isopref("train", "my.yaml", "run.folder=small", LOSS, *FAST)
    assert outcome.code == 0, outcome.err
    assert "memory" in outcome.out
    found = weights(project.folder / "small" / "model")
    assert all(tensor.sub(found[name]).abs().max() < 1e-9 for name, tensor in whole.items())


def test_a_new_head_is_the_seed_s_and_replaces_the_language_model_s(project: Project) -> None:
    first, again, other = (
        weights(project.train(f"seed{n}", LOSS, "optim.lr=0", "optim.max_steps=1", f"optim.seed={seed}") / "model")
        for n, seed in enumerate((0, 0, 1))
    )
    assert torch.equal(first["score.weight"], again["score.weight"])
    assert not torch.equal(first["score.weight"], other["score.weight"])
    assert not any("lm_head" in name for name in first)


def test_it_starts_from_a_reward_model(project: Project) -> None:
    first = project.train("first", LOSS, *FAST) / "model"
    start = weights(first)
    second = weights(project.train("second", LOSS, "optim.lr=0", "optim.max_steps=1", f"model.path={first}") / "model")
    assert all(torch.equal(tensor, second[name]) for name, tensor in start.items())


def test_an_adapter_trains_the_head_in_full(make_project: MakeProject) -> None:
    peft = pytest.importorskip("peft")
    project = make_project("llama", model={"dtype": "float32"})
    run = project.train("run", LOSS, "optim.epochs=2", "optim.lr=1e-2", "model.adapter.rank=4")
    config = json.loads((run / "model" / "adapter_config.json").read_text())
    assert (config["task_type"], config["modules_to_save"]) == ("SEQ_CLS", ["score"])
    loaded = peft.AutoPeftModelForSequenceClassification.from_pretrained(run / "model", num_labels=1).eval()
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    loaded.config.pad_token_id = tokenizer.pad_token_id
    sequences, expected = own_rewards(run / "model")
    check_scores(loaded, tokenizer.pad_token_id, sequences, expected)
    outcome = project.isopref("merge", "run", "merged")
    assert outcome.code == 0, outcome.err
    check_scores(load(project.folder / "merged"), tokenizer.pad_token_id, sequences, expected)
    again = project.train("again", LOSS, "optim.lr=0", "optim.max_steps=1", f"model.adapter.path={run / 'model'}")
    np.testing.assert_allclose(own_rewards(again / "model")[1], expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.native=true"], "has no reward models"),
        (["run.samples=2"], "needs a model that writes text"),
        (["objective.nll_weight=1"], "needs log-probabilities"),
        (["objective.beta=0.1"], "does nothing with the loss bradley_terry"),
        (["objective.margin=1"], "no score gap"),
    ],
)
def test_what_makes_no_sense_is_refused(project: Project, overrides: list[str], message: str) -> None:
    outcome = project.isopref("train", "my.yaml", LOSS, *overrides)
    assert outcome.code == 1
    assert message in outcome.err


def test_other_models_are_refused(project: Project) -> None:
    folder = project.train("run", LOSS, *FAST) / "model"
    outcome = project.isopref("train", "my.yaml", f"model.path={folder}")
    assert "is a reward model, which has no log-probabilities" in outcome.err
    config = json.loads((folder / "config.json").read_text())
    config["pad_token_id"] = AutoTokenizer.from_pretrained(folder).eos_token_id
    (folder / "config.json").write_text(json.dumps(config))
    outcome = project.isopref("train", "my.yaml", LOSS, f"model.path={folder}")
    assert "its padding token (2) also ends answers" in outcome.err
    AutoConfig.from_pretrained(folder, num_labels=3).save_pretrained(folder)
    outcome = project.isopref("train", "my.yaml", LOSS, f"model.path={folder}")
    assert "has 3 labels" in outcome.err


def test_accuracy_of_each_subset(project: Project) -> None:
    """RewardBench's column `subset`: in the table, the JSON and the report; of a policy as well."""
    records = make_pairs(9, seed=5)
    for number, record in enumerate(records):
        record["category"] = ["chat", "safety", 3][number % 3]
    project.write_pairs("eval.jsonl", records)
    named = ("data.train={path: train.jsonl, columns: {}}", "data.eval={path: eval.jsonl, columns: {subset: category}}")
    run = project.train("run", LOSS, *FAST, *named)
    report = (run / "report.html").read_text()
    after = json.loads((run / "evaluation.json").read_text())["after"]
    assert {name: part["pairs"] for name, part in after["by_subset"].items()} == {"3": 3, "chat": 3, "safety": 3}
    total = sum(part["accuracy"]["value"] * part["pairs"] for part in after["by_subset"].values())
    assert total / 9 == pytest.approx(after["accuracy"]["value"])
    policy = project.train("policy", "optim.max_steps=2", *named)
    for model, loss in ((run, (LOSS,)), (policy, ())):
        outcome = project.isopref(
            "eval", "my.yaml", *loss, *named, "--model", str(model / "model"), "--json", "figures.json"
        )
        assert outcome.code == 0, outcome.err
        found = json.loads((project.folder / "figures.json").read_text())["by_subset"]
        assert found.keys() == {"3", "chat", "safety"}
        assert found["chat"]["accuracy"].keys() == {"value", "low", "high"}
        for subset in found:
            assert f"accuracy, {subset}" in outcome.out
            assert f"accuracy, {subset}" in report


def test_too_many_subsets_are_not_reported(project: Project) -> None:
    project.write_pairs("eval.jsonl", [{**pair, "subset": f"id {n}"} for n, pair in enumerate(make_pairs(101, seed=6))])
    outcome = project.isopref("train", "my.yaml", "run.folder=run", LOSS, "optim.max_steps=1")
    assert outcome.code == 0, outcome.err
    assert outcome.out.count("the column 'subset' of the held-out data has 101 values, more than 100") == 1
    assert json.loads((project.folder / "run" / "evaluation.json").read_text())["after"]["by_subset"] == {}


def test_the_other_commands(project: Project) -> None:
    folder = project.train("run", LOSS, *FAST) / "model"
    outcome = project.isopref("eval", "my.yaml", LOSS, "--model", str(folder), "--json", "figures.json")
    assert outcome.code == 0, outcome.err
    figures = json.loads((project.folder / "figures.json").read_text())
    assert (
        figures["accuracy"] == json.loads((project.folder / "run" / "evaluation.json").read_text())["after"]["accuracy"]
    )
    outcome = project.isopref("eval", "my.yaml", LOSS, "--model", str(project.model))
    assert "is not a reward model" in outcome.err
    for command in (["plan", "my.yaml", LOSS, "model.dtype=float32"], ["data", "my.yaml", LOSS], ["ls", "."]):
        outcome = project.isopref(*command)
        assert outcome.code == 0, outcome.err
