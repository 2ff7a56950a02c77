"""Reward models on two processes: the weights of one process, resumed, adapted and exported."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from support.forked import isopref_on_ranks
from support.project import MakeProject, Project, Weights
from support.rewards import check_scores, own_rewards

LOSS = ("objective.loss=bradley_terry", "objective.center=0.01", "optim.lr=1e-2", "optim.epochs=1")

pytestmark = pytest.mark.xdist_group("ranks")


def weights(folder: Path) -> Weights:
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype="auto")
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def same(one: Weights, other: Weights, bound: float) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.sub(other[name]).abs().max() <= bound, name


@pytest.mark.parametrize("parallel", [pytest.param("ddp", marks=pytest.mark.soak), "fsdp"])
def test_two_processes_train_what_one_does_and_go_on_after_a_stop(project: Project, parallel: str) -> None:
    alone = weights(project.train("alone", *LOSS) / "model")
    arguments = (*LOSS, "run.folder=run", "run.save_every=2", f"layout.parallel={parallel}")
    outcome = isopref_on_ranks(project, "train", "my.yaml", *arguments)
    assert outcome.code == 0, outcome.err
    run = project.folder / "run"
    same(weights(run / "model"), alone, 1e-9)
    check_scores(
        AutoModelForSequenceClassification.from_pretrained(run / "model", dtype="auto").eval(),
        AutoTokenizer.from_pretrained(run / "model").pad_token_id,
        *own_rewards(run / "model"),
    )
    # From the middle, by one process: the layout may change on the way.
    shutil.rmtree(run / "model")
    shutil.rmtree(run / "checkpoints" / "step5")
    outcome = project.isopref("train", "my.yaml", *LOSS, "run.folder=run", "run.save_every=2", "--resume")
    assert outcome.code == 0, outcome.err
    assert "resume after step 4" in outcome.out
    same(weights(run / "model"), alone, 1e-9)


def test_an_adapter_of_two_processes_is_that_of_one(make_project: MakeProject) -> None:
    pytest.importorskip("peft")
    project = make_project("llama", model={"dtype": "float32"})
    adapter = (*LOSS, "model.adapter.rank=4")
    alone = project.train("alone", *adapter) / "model"
    outcome = isopref_on_ranks(project, "train", "my.yaml", *adapter, "run.folder=run", "layout.parallel=fsdp")
    assert outcome.code == 0, outcome.err
    _, expected = own_rewards(alone)
    np.testing.assert_allclose(own_rewards(project.folder / "run" / "model")[1], expected, rtol=1e-4, atol=1e-5)
    outcome = project.isopref("merge", "run", "merged")
    assert outcome.code == 0, outcome.err
    merged = AutoModelForSequenceClassification.from_pretrained(project.folder / "merged", dtype=torch.float32).eval()
    pad = AutoTokenizer.from_pretrained(project.folder / "merged").pad_token_id
    sequences, rewards = own_rewards(project.folder / "run" / "model")
    check_scores(merged, pad, sequences, rewards)
