"""Adapters from beginning to end: trained, stopped and resumed, exported, loaded as others would, merged."""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from isopref.testing.models import tiny_folder
from isopref.testing.oracle import relative_error
from support.project import MakeProject, Project

LORA = "model.adapter={rank: 4}"
SAVE = ("run.save_every=3", "data.eval=null")
IDS = torch.tensor([[5, 9, 23, 4, 77, 8, 61]])
ReadMetrics = Callable[[Path], list[dict[str, float]]]


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(input_ids=IDS).logits
    return found


def base(project: Project) -> Any:
    return AutoModelForCausalLM.from_pretrained(project.model, dtype=torch.float64)


def adapter(run: Path) -> dict[str, Tensor]:
    return load_file(run / "model" / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose matrices are large enough to be quantised."""
    return tiny_folder(tmp_path_factory.mktemp("wide"), hidden_size=64, intermediate_size=128, head_dim=16)


@pytest.fixture(scope="module")
def lora(make_project: MakeProject) -> tuple[Project, Path]:
    """A finished run of LoRA."""
    project = make_project()
    return project, project.train("lora", LORA, *SAVE)


def test_what_is_exported_is_what_peft_loads(lora: tuple[Project, Path]) -> None:
    """By PeftModel and by transformers alone; the update is alpha / rank * B A, with alpha twice the rank."""
    project, run = lora
    assert sorted(path.name for path in (run / "model").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "chat_template.jinja",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    by_hand = base(project)
    weights, state = by_hand.state_dict(), adapter(run)
    for name in [name for name in state if "lora_A" in name]:
        layer = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        update = 2.0 * state[name.replace("lora_A", "lora_B")] @ state[name]
        weights[f"{layer}.weight"] += update.T  # GPT-2's layers have their weights transposed
    expected = logits(by_hand)
    assert (expected - logits(base(project))).abs().max() > 0.1  # it was trained
    loaded = [
        PeftModel.from_pretrained(base(project), run / "model"),
        AutoModelForCausalLM.from_pretrained(run / "model", dtype=torch.float64),
    ]
    for model in loaded:
        torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-12)


def test_merge_writes_the_same_function(lora: tuple[Project, Path]) -> None:
    project, run = lora
    outcome = project.isopref("merge", "lora", "merged")
    assert outcome.code == 0, outcome.err
    merged: Any = AutoModelForCausalLM.from_pretrained(project.folder / "merged", dtype="auto")
    expected = logits(PeftModel.from_pretrained(base(project), run / "model"))
    torch.testing.assert_close(logits(merged), expected, rtol=0, atol=1e-12)
    assert project.isopref("merge", "lora/model", "merged").err == (
        "error: merged already exists and will not be overwritten. Choose another folder.\n"
    )
    assert "no adapter found" in project.isopref("merge", "merged", "again").err
    assert project.isopref("merge", "lora", "my.yaml/again").err.startswith("error: my.yaml/again: cannot be written (")


def test_a_checkpoint_holds_what_is_trained_only(lora: tuple[Project, Path]) -> None:
    """Weights and two moments of the adapter, in float64; the base model would be far more."""
    project, run = lora
    trained = sum(tensor.nbytes for tensor in adapter(run).values())
    model = (project.model / "model.safetensors").stat().st_size
    size = sum(file.stat().st_size for file in (run / "checkpoints" / "step10").rglob("*.distcp"))
    assert 3 * trained < size < 3 * trained + model / 2


def test_the_reference_of_full_training_is_found(project: Project) -> None:
    """The adapter is off in the reference, so it is the same model."""
    project.train("full")
    outcome = project.isopref("train", "my.yaml", "run.folder=lora", LORA)
    assert "cache 23 of 23 training pairs have their reference" in outcome.out
    assert "cache 8 of 8 held-out pairs have their reference" in outcome.out
    references = [(project.folder / run / "reference.json").read_text() for run in ("full", "lora")]
    assert references[0] == references[1]


def test_a_learning_rate_for_full_training_is_noted(project: Project) -> None:
    settings = ("optim.lr=1e-6", "optim.max_steps=1", "data.eval=null")
    for adapter_settings, noted in ([LORA], True), ([], False):
        outcome = project.isopref("train", "my.yaml", f"run.folder=noted-{noted}", *settings, *adapter_settings)
        assert outcome.code == 0, outcome.err
        assert ("note: optim.lr: 1e-06 barely trains an adapter" in outcome.out) == noted


def test_an_adapter_to_go_on_with_is_the_reference(
    lora: tuple[Project, Path], make_project: MakeProject, read_metrics: ReadMetrics
) -> None:
    _, first = lora
    project = make_project()
    outcome = project.isopref("cache", "my.yaml", f"model.adapter.path={first}/model")
    assert outcome.code == 0, outcome.err
    outcome = project.isopref("train", "my.yaml", "run.folder=more", f"model.adapter.path={first}/model")
    assert outcome.code == 0, outcome.err
    assert "cache 23 of 23 training pairs have their reference" in outcome.out
    metrics = read_metrics(project.folder / "more")
    assert metrics[0]["train/loss"] == pytest.approx(0.6931471805599453, abs=1e-8)  # the policy is the reference
    assert metrics[-1]["train/loss"] < 0.6
    before, after = adapter(first), adapter(project.folder / "more")
    assert before.keys() == after.keys()
    assert all(not torch.equal(before[name], after[name]) for name in before)
    assert all((before[name] - after[name]).abs().max() < 0.05 for name in before)


@pytest.mark.parametrize("kind", ["adamw", "adamw_8bit", "adamw_8bit_sr", "adamw_skip", "muon", "nf4", "experts"])
def test_a_resumed_run_ends_in_the_same_bits(make_project: MakeProject, tmp_path: Path, wide: Path, kind: str) -> None:
    """Each optimizer, a base in four bits, and experts. Matrices of 4,096 numbers and more have 8-bit state."""
    project = make_project(model={"dtype": "bfloat16" if kind.endswith("_sr") else "float32"})
    arguments = [
        f"model.path={tiny_folder(tmp_path / 'experts', 'qwen3_moe') if kind == 'experts' else wide}",
        f"model.adapter={{rank: {8 if kind == 'experts' else 64}, quantize: {'nf4' if kind == 'nf4' else 'null'}}}",
        f"optim.kind={'adamw' if kind in ('nf4', 'experts') else kind}",
        *("run.save_every=3", "run.keep=9", "data.eval=null"),
    ]
    with torch.compiler.set_stance("force_eager"):  # torchao compiles its step, which takes long
        whole = project.train("whole", *arguments)
        run = project.folder / "run"
        shutil.copytree(whole, run)
        shutil.rmtree(run / "model")
        for step in (6, 9, 10):
            shutil.rmtree(run / "checkpoints" / f"step{step}")
        outcome = project.isopref("train", "my.yaml", "run.folder=run", *arguments, "--resume")
    assert outcome.code == 0, outcome.err
    assert "resume after step 3\n" in outcome.out
    found, expected = adapter(run), adapter(whole)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_run_goes_on_sharded(lora: tuple[Project, Path]) -> None:
    """From a checkpoint of one process under FSDP, cut otherwise: the same weights to rounding."""
    project, whole = lora
    run = project.folder / "sharded"
    shutil.copytree(whole, run)
    shutil.rmtree(run / "model")
    shutil.rmtree(run / "checkpoints" / "step10")
    layout = ["layout.parallel=fsdp", "layout.rows=packed", "layout.microbatch_tokens=200"]
    outcome = project.isopref("train", "my.yaml", "run.folder=sharded", LORA, *SAVE, *layout, "--resume")
    assert outcome.code == 0, outcome.err
    assert "resume after step 9\n" in outcome.out
    assert relative_error(adapter(run), adapter(whole)) <= 1e-8


@pytest.mark.parametrize("objective", [["objective.loss=simpo"], []], ids=["no reference", "its own reference"])
def test_a_resume_on_another_base_is_refused(make_project: MakeProject, tmp_path: Path, objective: list[str]) -> None:
    """A checkpoint has the adapter alone, so the model under it must be what it was."""
    project = make_project(model={"dtype": "float32"})
    arguments = [f"model.path={tmp_path}/base", LORA, *SAVE, *objective]
    tiny_folder(tmp_path / "base")
    run = project.train("run", *arguments)
    shutil.rmtree(run / "model")
    shutil.rmtree(tmp_path / "base")
    tiny_folder(tmp_path / "base", seed=1)
    what = "the model under the adapter" if objective else "the reference"
    assert project.refused("run", *arguments, "--resume").startswith(f"--resume: {what}")


def test_a_base_in_four_bits(make_project: MakeProject, wide: Path, read_metrics: ReadMetrics) -> None:
    """It is a reference of its own; what is trained is exported, and merges into the base as it was."""
    project = make_project(model={"dtype": "float32"})
    path = f"model.path={wide}"
    full = project.train("full", path, "data.eval=null")
    run = project.train("qlora", path, "model.adapter={rank: 4, quantize: nf4}", "data.eval=null")
    keys = [json.loads((one / "reference.json").read_text())["key"] for one in (full, run)]
    assert keys[0] != keys[1]
    metrics = read_metrics(run)
    assert metrics[0]["train/loss"] == pytest.approx(0.693147, abs=1e-5)
    assert metrics[-1]["train/loss"] < metrics[0]["train/loss"]
    assert project.isopref("merge", "qlora", "merged").code == 0


def test_how_much_of_a_base_is_in_four_bits_is_said(make_project: MakeProject, tmp_path: Path) -> None:
    """Attention alone: 4 matrices of 64 x 64 in each of two layers. Experts are no linear layers."""
    heads: dict[str, Any] = {"hidden_size": 64, "num_key_value_heads": 4, "head_dim": 16}
    base = tiny_folder(tmp_path / "experts", "qwen3_moe", **heads)
    project = make_project(model={"dtype": "float32"})
    quick = (f"model.path={base}", "data.eval=null", "optim.max_steps=1", "run.export=false", "run.folder=run")
    outcome = project.isopref("train", "my.yaml", "model.adapter={rank: 4, quantize: nf4}", *quick)
    assert outcome.code == 0, outcome.err
    assert re.search(r"^nf4   32,768 of [0-9,]+ weights are in 4 bits \(2[0-9]\.[0-9]+%\)$", outcome.out, re.MULTILINE)


def test_an_adapter_of_experts_is_read_again(make_project: MakeProject, tmp_path: Path) -> None:
    """By the answers at the end of its run, to go on with, and to merge; evaluated, all are the same model."""
    project = make_project(model={"dtype": "float32"})
    base = f"model.path={tiny_folder(tmp_path / 'experts', 'qwen3_moe')}"
    run = project.train("run", base, LORA, "run.samples=1", "optim.max_steps=2")
    assert sum("mlp.experts" in name for name in adapter(run)) == 8  # two matrices of two products in two layers
    project.train("more", base, "model.adapter={path: run/model}", "optim.max_steps=1", "optim.lr=0")
    assert project.isopref("merge", "run", "merged").code == 0
    found = []
    for model in ("run/model", "more/model", "merged"):
        outcome = project.isopref("eval", "my.yaml", base, "--model", model, "--json", "found.json")
        assert outcome.code == 0, outcome.err
        found.append(json.loads((project.folder / "found.json").read_text())["loss"]["value"])
    assert found[0] < 0.69
    assert found[1:] == pytest.approx(found[:1] * 2, abs=1e-5)


def test_an_adapter_is_evaluated_by_its_folder(lora: tuple[Project, Path]) -> None:
    project, _ = lora
    assert project.isopref("merge", "lora", "whole").code == 0
    for model in ("lora/model", "whole"):
        outcome = project.isopref("eval", "my.yaml", "--model", model, "--json", f"{Path(model).name}.json")
        assert outcome.code == 0, outcome.err
    found = [json.loads((project.folder / f"{name}.json").read_text()) for name in ("model", "whole")]
    assert found[0]["loss"]["value"] == pytest.approx(found[1]["loss"]["value"], abs=1e-9)
    assert found[0]["accuracy"]["value"] > 0.5


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("{targets: [nothing]}", "model.adapter: GPT2LMHeadModel cannot have this adapter: Target modules {'nothing'}"),
        (
            "{targets: [lm_head]}",
            "model.adapter.targets: the output head cannot be a target. Name other layers, or use auto.",
        ),
        (
            "{targets: [wte]}",
            "model.adapter.targets: the embedding cannot be a target. Name other layers, or use auto.",
        ),
        (
            f"{{rank: {10**30}}}",
            f"model.adapter.rank: {10**30} is more than 32, the highest rank that a matrix of GPT2LMHeadModel can "
            "have. Set it to 32 or less.",
        ),
        (
            "{path: nowhere}",
            "model.adapter.path: nowhere is not an adapter's folder: it has no adapter_config.json. Give one that has.",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_the_first_step(project: Project, override: str, message: str) -> None:
    assert project.refused("run", f"model.adapter={override}").startswith(message)
    assert not (project.folder / "run" / "config.yaml").exists()


def test_a_run_in_place_of_its_adapter_is_told_of_it(lora: tuple[Project, Path]) -> None:
    project, _ = lora
    message = project.refused("again", "model.adapter={path: lora}")
    assert message.endswith("lora is not an adapter's folder: it has no adapter_config.json. Did you mean lora/model?")


def test_an_adapter_of_another_model_is_refused(lora: tuple[Project, Path], make_project: MakeProject) -> None:
    _, run = lora
    other = make_project("llama", model={"dtype": "float32"})
    message = other.refused("run", f"model.adapter.path={run}/model")
    assert "model.adapter" in message
    assert "LlamaForCausalLM" in message


def test_peft_is_asked_for_by_name(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)  # as if it were not installed
    assert "pip install 'isopref[adapters]'" in project.refused("run", LORA)


def test_offload_is_refused_on_the_cpu(project: Project) -> None:
    assert project.refused("run", "layout.offload=true").startswith("layout.offload: true has no effect on the CPU")


def test_a_model_in_four_bits_is_evaluated_in_four_bits(make_project: MakeProject, wide: Path) -> None:
    """Its untouched base, however it is spelt, is its own reference: every margin is zero."""
    project = make_project()
    settings = (f"model.path={wide}", "model.dtype=float32", "model.adapter={rank: 4, quantize: nf4}")
    for spelt in (str(wide), f"{wide.parent}/../{wide.parent.name}/{wide.name}"):
        outcome = project.isopref("eval", "my.yaml", *settings, "--model", spelt, "--json", "found.json")
        assert outcome.code == 0, outcome.err
        found = json.loads((project.folder / "found.json").read_text())
        assert found["reward_margin"]["value"] == 0
        assert found["loss"]["value"] == pytest.approx(math.log(2))


def test_an_adapter_that_needs_whole_weights_is_refused_in_four_bits(make_project: MakeProject, wide: Path) -> None:
    project = make_project()
    path = (f"model.path={wide}", "model.dtype=float32", "data.eval=null")
    run = project.train("dora", *path, "model.adapter={kind: dora, rank: 4}")
    message = project.refused("again", *path, f"model.adapter={{path: {run / 'model'}, quantize: nf4}}")
    assert "is a DoRA adapter, which needs unquantised weights. Remove model.adapter.quantize." in message
