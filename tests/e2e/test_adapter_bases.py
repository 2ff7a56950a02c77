"""The model under an adapter, and the template: scored, said and written as they were trained with."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest

from isopref.testing.models import tiny_folder
from support.project import MakeProject, Project

LORA = "model.adapter={rank: 4}"
FOUR_BITS = "model.adapter={rank: 4, quantize: nf4}"
SHAPE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}  # large enough to be quantised


@pytest.fixture(scope="module")
def project(make_project: MakeProject) -> Project:
    """With models one and two, and a finished run of LoRA on one."""
    project = make_project(model={"dtype": "float32"}, optim={"lr": 3e-3})
    for seed, name in enumerate(("one", "two")):
        tiny_folder(project.folder / name, seed=seed, **SHAPE)
    project.train("lora", "model.path=one", LORA, "model.compute_dtype=bfloat16")
    return project


def evaluated(project: Project, *arguments: str) -> dict[str, Any]:
    outcome = project.isopref("eval", "my.yaml", *arguments, "--json", "found.json")
    assert outcome.code == 0, outcome.err
    found: dict[str, Any] = json.loads((project.folder / "found.json").read_text())
    return {name: found[name]["value"] for name in ("reward_margin", "accuracy", "loss")}


def test_a_run_and_eval_score_the_same_model(project: Project) -> None:
    """The update is not rounded into the base's bfloat16."""
    result = json.loads((project.folder / "lora" / "evaluation.json").read_text())["after"]
    found = evaluated(project, "model.path=one", LORA, "model.compute_dtype=bfloat16", "--model", "lora/model")
    assert found == {name: pytest.approx(result[name]["value"], abs=1e-6) for name in found}


def test_an_adapter_is_scored_on_its_own_base(project: Project) -> None:
    shutil.copytree(project.folder / "one", project.folder / "other")  # in four bits it would be as model.path only
    settings = (FOUR_BITS, "--reference", "other", "--model", "lora/model")
    found, expected = (evaluated(project, f"model.path={path}", *settings) for path in ("two", "one"))
    assert found == pytest.approx(expected, abs=1e-6)


def test_an_adapter_on_another_base_is_said(project: Project) -> None:
    adapter = project.folder / "lora" / "model"
    for path, said in (("one", False), ("two", True)):
        settings = (f"run.folder=more-{path}", f"model.path={path}", f"model.adapter.path={adapter}", "data.eval=null")
        outcome = project.isopref("train", "my.yaml", *settings, "optim.max_steps=1")
        assert outcome.code == 0, outcome.err
        warning = f"warning: model.adapter.path: the adapter {adapter} was made for {project.folder / 'one'}, "
        assert (warning in outcome.out) == said


def test_an_adapter_is_no_base(project: Project) -> None:
    message = project.refused("stacked", "model.path=lora/model", LORA)
    assert message.startswith("model.adapter: lora/model is itself an adapter")
    assert "isopref merge lora/model FOLDER" in message


def test_the_exported_template_is_the_one_trained_with(project: Project) -> None:
    template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<|im_end|>{% endfor %}<assistant>"
    (project.folder / "mine.jinja").write_text(template)
    settings = ("model.path=one", "data.eval=null", "optim.max_steps=1", "data.template=mine.jinja")
    run = project.train("templated", *settings)
    assert (run / "model" / "chat_template.jinja").read_text() == template
