"""A model that also sees images, trained on text: its vision tower takes no part, and comes out as it went in."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import FileSystemReader
from transformers import AutoModelForCausalLM

from isopref.testing.oracle import relative_error
from support.forked import isopref_on_ranks
from support.project import Command, MakeProject, Project, Weights

Start = Callable[..., "Command"]
LoadWeights = Callable[[Path], "Weights"]

SAVE = ("run.save_every=3", "run.keep=20")
LORA = ("model.adapter={rank: 4}", "optim.lr=1e-2")
PARTS = ("model.vision_tower.", "model.multi_modal_projector.")
TWO_RANKS = {
    "ddp": ("layout.parallel=ddp",),
    "fsdp": ("layout.parallel=fsdp", "layout.grad_sync=last"),
}


def rewind(run: Path) -> None:
    """As if the run had been stopped after step 6 of 10."""
    shutil.rmtree(run / "model")
    for step in (9, 10):
        shutil.rmtree(run / "checkpoints" / f"step{step}")


def trained(weights: Weights) -> Weights:
    return {name: weight for name, weight in weights.items() if not name.startswith(PARTS)}


@pytest.fixture(scope="module")
def make(make_project: MakeProject) -> Callable[[], Project]:
    return lambda: make_project("gemma3_vision", model={"dtype": "float32"})


@pytest.fixture(scope="module")
def whole(make: Callable[[], Project]) -> tuple[Project, Path]:
    """A run of all weights that nothing stopped."""
    project = make()
    return project, project.train("whole", *SAVE, "run.keep_best=true", "run.eval_every=5")


@pytest.fixture(scope="module")
def lora(make: Callable[[], Project]) -> tuple[Project, Path]:
    project = make()
    return project, project.train("lora", *SAVE, *LORA)


def test_the_vision_tower_comes_out_as_it_went_in(whole: tuple[Project, Path], load_weights: LoadWeights) -> None:
    project, run = whole
    before = load_weights(project.model)
    for folder in ("model", "model_best"):
        after = load_weights(run / folder)
        assert after.keys() == before.keys()
        same = {name for name in before if torch.equal(before[name], after[name])}
        assert same == before.keys() - trained(before).keys() != set()
    saved = FileSystemReader(run / "checkpoints" / "step10" / "model_and_optim").read_metadata().state_dict_metadata
    assert any("language_model" in name for name in saved)
    assert not any("vision_tower" in name for name in saved)


def test_the_run_says_what_is_not_trained(make: Callable[[], Project], load_weights: LoadWeights) -> None:
    project = make()
    weights = load_weights(project.model)
    count = sum(weight.numel() for name, weight in weights.items() if name.startswith(PARTS))
    parts = "model.vision_tower, model.multi_modal_projector"
    said = f"\nfrozen (not used when training on text): {parts} ({count:,} weights)\n"
    for run, more in (("run", ()), ("lora", LORA)):
        outcome = project.isopref("train", "my.yaml", f"run.folder={run}", "optim.max_steps=1", *more)
        assert outcome.code == 0, outcome.err
        assert outcome.out.count(said) == 1
    outcome = project.isopref("eval", "my.yaml", "--model", "run/model")
    assert outcome.code == 0, outcome.err
    assert "not trained" not in outcome.out


@pytest.mark.parametrize("adapted", [False, True], ids=["whole", "lora"])
def test_stopped_and_resumed_it_ends_in_the_same_bits(
    request: pytest.FixtureRequest, make: Callable[[], Project], adapted: bool
) -> None:
    _, expected = request.getfixturevalue("lora" if adapted else "whole")
    project, more = make(), LORA if adapted else ()
    run = project.train("run", *SAVE, *more)
    rewind(run)
    project.train("run", *SAVE, *more, "--resume")
    file = "adapter_model.safetensors" if adapted else "model.safetensors"
    found, wanted = (load_file(one / "model" / file) for one in (run, expected))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("parallel", TWO_RANKS)
def test_two_ranks_go_on_where_one_stopped(
    whole: tuple[Project, Path], make: Callable[[], Project], load_weights: LoadWeights, parallel: str
) -> None:
    project = make()
    run = project.train("run", *SAVE)
    rewind(run)
    settings = ("run.folder=run", *SAVE, *TWO_RANKS[parallel], "layout.microbatch_tokens=60")
    outcome = isopref_on_ranks(project, "train", "my.yaml", *settings, "--resume")
    assert outcome.code == 0, outcome.err
    assert "resume after step 6\n" in outcome.out
    before, found, expected = (load_weights(one) for one in (project.model, run / "model", whole[1] / "model"))
    assert relative_error(trained(found), trained(expected)) <= 1e-5 < relative_error(trained(found), trained(before))
    assert all(torch.equal(found[name], before[name]) for name in before.keys() - trained(before).keys())


def test_an_adapter_leaves_it_alone_and_others_load_it(lora: tuple[Project, Path]) -> None:
    project, run = lora
    state = load_file(run / "model" / "adapter_model.safetensors")
    assert len(state) == 2 * 2 * 7  # two layers with seven linear maps, two factors for each
    assert all(".language_model.layers." in name for name in state)
    base: Any = AutoModelForCausalLM.from_pretrained(project.model)
    ids = torch.tensor([[5, 9, 23, 4, 77, 8, 61]])
    with torch.no_grad():
        start = base(input_ids=ids).logits
        alone = AutoModelForCausalLM.from_pretrained(run / "model")(input_ids=ids).logits
        by_peft = PeftModel.from_pretrained(base, run / "model")(input_ids=ids).logits
    torch.testing.assert_close(alone, by_peft)
    assert (alone - start).abs().max() > 0.01
    outcome = project.isopref("train", "my.yaml", "run.folder=further", f"model.adapter={{path: {run / 'model'}}}")
    assert outcome.code == 0, outcome.err


def test_named_targets_outside_the_text_are_none(make: Callable[[], Project]) -> None:
    project = make()
    run = project.train("run", "model.adapter={rank: 4, targets: [q_proj, fc1]}", "optim.max_steps=1")
    state = load_file(run / "model" / "adapter_model.safetensors")
    assert len(state) == 2 * 2
    assert all(".language_model.layers." in name and ".q_proj." in name for name in state)
    message = project.refused("none", "model.adapter={rank: 4, targets: [fc1]}")
    assert "cannot have this adapter" in message
    assert message.endswith("model.adapter.targets, such as [q_proj, v_proj], or set another model.adapter.kind.")


def test_an_adapter_of_the_vision_tower_is_refused(lora: tuple[Project, Path], tmp_path: Path) -> None:
    """One that others made."""
    project, _ = lora
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(project.model), LoraConfig(target_modules="all-linear"))
    model.save_pretrained(str(tmp_path))
    message = project.refused("other", f"model.adapter={{path: {tmp_path}}}")
    assert "that have no gradient, such as model.vision_tower." in message
    assert message.endswith(f"first: isopref merge {tmp_path} FOLDER.")


def test_a_reference_that_moves(make: Callable[[], Project], load_weights: LoadWeights) -> None:
    project = make()
    moves = (*SAVE, "objective.reference_moves=[2, 0.6]")
    run = project.train("run", *moves)
    expected = load_weights(run / "model")
    rewind(run)
    project.train("run", *moves, "--resume")
    found = load_weights(run / "model")
    assert all(torch.equal(found[name], expected[name]) for name in expected)
