"""A run meets numbers that are not finite: the pair is named, the weights are left alone, and there is an end to it."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch.distributed.tensor import DTensor

from isopref.engine import train_module
from isopref.engine.callbacks import guard
from isopref.engine.callbacks.checkpointer import KeepingCheckpointerCallback
from isopref.engine.callbacks.watch import FEW, WINDOW, WatchCallback
from isopref.engine.display import Display
from isopref.engine.optim import Kind
from isopref.engine.train_module import DPOTrainModule
from isopref.models.parallel import unwrap
from isopref.runs.read import read_run
from isopref.score import score as ours
from isopref.testing import oracle
from isopref.testing.models import byte_tokenizer
from support.project import MakeProject, Project, Weights

MARK = "~"  # in one prompt, of line 7
(TOKEN,) = byte_tokenizer().encode(MARK)
SETTINGS = ("data.eval=null", "optim.epochs=1")
LoadWeights = Callable[[Path], "Weights"]


def mark(project: Project) -> None:
    records = [json.loads(line) for line in (project.folder / "train.jsonl").read_text().splitlines()]
    records[6]["prompt"] += MARK
    project.write_pairs("train.jsonl", records)


def test_a_pair_that_gives_nan_is_named_and_skipped(
    project: Project, monkeypatch: pytest.MonkeyPatch, load_weights: LoadWeights
) -> None:
    """The model gives one pair, which has a token of its own, a log-probability of NaN."""
    mark(project)
    before = load_weights(project.model)

    def score(model: Any, microbatch: Any, needs: Any) -> Any:
        found = ours(model, microbatch, needs)
        broken = bool((microbatch.passes[0].input_ids == TOKEN).any())
        return found._replace(logp=found.logp * math.nan) if broken else found

    monkeypatch.setattr(train_module, "score", score)
    outcome = project.isopref("train", "my.yaml", "run.folder=run", *SETTINGS, "layout.microbatch_tokens=60")
    assert outcome.code == 0, outcome.err
    warnings = [line for line in outcome.out.splitlines() if line.startswith("warning")]
    assert len(warnings) == 1
    assert warnings[0].startswith("warning: step ")
    assert warnings[0].endswith(" was skipped: the loss of train.jsonl:7 is not finite. The weights are unchanged.")
    trained = load_weights(project.folder / "run" / "model")
    assert all(weight.isfinite().all() for weight in trained.values())
    assert not any(torch.equal(trained[name], before[name]) for name in before)
    # Strict JSON: what is not finite is null.
    lines = (project.folder / "run" / "metrics.jsonl").read_text().splitlines()
    lost = [json.loads(line, parse_constant=pytest.fail)["train/loss"] is None for line in lines]
    assert lost.count(True) == 1


def break_gradient(monkeypatch: pytest.MonkeyPatch, breaks: Callable[[Any], bool]) -> None:
    """The gradient of a microbatch becomes infinite where `breaks` says so; its loss is as it was."""

    def score(model: Any, microbatch: Any, needs: Any) -> Any:
        found = ours(model, microbatch, needs)
        if breaks(microbatch) and found.logp.requires_grad:
            found.logp.register_hook(lambda gradient: gradient + math.inf)
        return found

    monkeypatch.setattr(train_module, "score", score)


def test_a_pair_with_a_bad_gradient_is_named(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    mark(project)
    break_gradient(monkeypatch, lambda microbatch: bool((microbatch.passes[0].input_ids == TOKEN).any()))
    outcome = project.isopref("train", "my.yaml", "run.folder=run", *SETTINGS)
    assert outcome.code == 0, outcome.err
    assert outcome.out.count("warning: step ") == 1
    assert " was skipped: the gradient of train.jsonl:7 is not finite. The weights are unchanged.\n" in outcome.out


@pytest.mark.parametrize("kind", get_args(Kind))
def test_a_checkpoint_before_the_first_update_changes_nothing(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch, load_weights: LoadWeights, kind: str
) -> None:
    """The first step is skipped. A checkpoint there, or a new start from it, is no step of the optimizer."""
    project = make_project("llama_wide", model={"dtype": "bfloat16" if kind.endswith("_sr") else "float32"})
    settings = (*SETTINGS, f"optim.kind={kind}", "optim.lr=1e-2", "run.keep=9")
    broken = [True]
    break_gradient(monkeypatch, lambda _: broken[0])
    step = DPOTrainModule.optim_step

    def mend(self: Any) -> None:
        step(self)
        broken[0] = False

    monkeypatch.setattr(DPOTrainModule, "optim_step", mend)
    expected = load_weights(project.train("never", *settings) / "model")
    broken[0] = True
    run = project.train("often", *settings, "run.save_every=1")
    assert oracle.relative_error(load_weights(run / "model"), expected) == 0
    (run / "model").rename(project.folder / "before")
    for path in (run / "checkpoints").glob("step[2-9]"):
        shutil.rmtree(path)
    outcome = project.isopref("train", "my.yaml", *settings, "run.folder=often", "--resume")
    assert "resume after step 1\n" in outcome.out
    assert oracle.relative_error(load_weights(run / "model"), expected) == 0


def test_too_many_in_a_row_end_the_run_with_a_checkpoint(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the third step on nothing is finite, though no pair is to blame. Undone, the run goes on."""
    broken = [False]
    break_gradient(monkeypatch, lambda _: broken[0])
    step = train_module.DPOTrainModule.optim_step

    def optim_step(self: train_module.DPOTrainModule) -> None:
        step(self)
        broken[0] = self.trainer.global_step >= 2
        after.append({name: value.detach().clone() for name, value in self.model.named_parameters()})

    after: list[Weights] = []
    monkeypatch.setattr(train_module.DPOTrainModule, "optim_step", optim_step)
    message = project.refused("run", "data.eval=null")
    assert message.startswith("stopped after step 7 of 10: the gradients of 5 steps in a row were not finite.")
    assert all(torch.equal(after[1][name], after[6][name]) for name in after[1])
    assert not all(torch.equal(after[0][name], after[1][name]) for name in after[1])
    assert [path.name for path in (project.folder / "run" / "checkpoints").iterdir()] == ["step7"]
    monkeypatch.undo()
    outcome = project.isopref("train", "my.yaml", "run.folder=run", "data.eval=null", "--resume", "optim.lr=0.001")
    assert outcome.code == 0, outcome.err
    assert "resume after step 7\n" in outcome.out


OVERFLOWING = ("model.dtype=float32", "optim.max_steps=3")  # too few steps to be stopped for their gradients


@pytest.mark.parametrize("setting", ["optim.lr=1e308", "optim.weight_decay=1e308"])
def test_weights_that_are_not_finite_end_the_run(project: Project, setting: str) -> None:
    """The first update makes them infinite. Nothing of them is kept."""
    message = project.refused("run", setting, *OVERFLOWING)
    assert re.match(r"step \d+: the weights contain NaN or Inf \(transformer\.", message), message
    assert "no checkpoint was written. There is no earlier checkpoint." in message
    assert "Start again in a new run.folder with a lower optim.lr or optim.weight_decay" in message
    run = project.folder / "run"
    assert not (run / "model").exists()
    assert list(run.glob("checkpoints/step*")) == []
    assert read_run(run).status == "failed"


def test_weights_that_are_not_finite_are_blamed_on_no_pair(project: Project) -> None:
    """All that follows the bad update is skipped. It ends the run at once, and not after several such steps."""
    outcome = project.isopref("train", "my.yaml", "run.folder=run", "optim.lr=1e308", "model.dtype=float32")
    assert outcome.code == 1
    (warning,) = [line for line in outcome.out.splitlines() if line.startswith("warning: ")]
    assert re.fullmatch(r"warning: step 2 was skipped: the weights contain NaN or Inf \(transformer\..*\)\.", warning)
    assert outcome.err.startswith("error: step 2: the weights contain NaN or Inf (transformer.")


def test_an_update_that_torch_refuses_ends_the_run(project: Project) -> None:
    """A rate of 1e300 is no number of float32, which torch's optimizers refuse."""
    message = project.refused("run", "optim.lr=1e300", "data.eval=null", "model.dtype=float32")
    assert message.startswith("step 1: the update overflows the weights' dtype (value cannot be converted to ")
    assert "so no checkpoint was written. There is no earlier checkpoint. Start again in a new" in message
    assert not (project.folder / "run" / "model").exists()


ADAPTER = "model.adapter.rank=2"
NATIVE = "model.native=true"


@pytest.mark.parametrize(
    ("architecture", "settings", "name"),
    [
        ("gpt2", (), "transformer.h.0.attn.c_attn.weight"),
        ("gpt2", ("layout.parallel=ddp",), "transformer.h.0.attn.c_attn.weight"),
        ("gpt2", ("layout.parallel=fsdp",), "transformer.h.0.attn.c_attn.weight"),
        ("llama", (ADAPTER,), "model.layers.0.self_attn.q_proj.lora_A.default.weight"),
        ("llama", (NATIVE,), "transformer.blocks.0.attention.w_q.weight"),
    ],
)
def test_the_last_finite_checkpoint_is_named(
    make_project: MakeProject,
    monkeypatch: pytest.MonkeyPatch,
    architecture: str,
    settings: tuple[str, ...],
    name: str,
) -> None:
    """One number of one tensor becomes infinite in the fifth step, without a trace in the gradient."""
    project = make_project(architecture, model={"dtype": "float32"})
    step = DPOTrainModule.optim_step

    def optim_step(self: Any) -> None:
        step(self)
        if self.trainer.global_step == 5:
            parameters = dict(unwrap(self.model).named_parameters())
            with torch.no_grad():
                weight = parameters[f"model.{name}"]
                (weight.to_local() if isinstance(weight, DTensor) else weight).view(-1)[0] = math.inf
            self.guard.step = lambda *_, **__: None  # later ones would spread it

    monkeypatch.setattr(DPOTrainModule, "optim_step", optim_step)
    message = project.refused("run", "data.eval=null", "run.save_every=3", *settings)
    assert message.startswith(
        f"step 6: the weights contain NaN or Inf ({name}), so no checkpoint was written. The last finite checkpoint is "
        "run/checkpoints/step3."
    )
    assert [path.name for path in (project.folder / "run" / "checkpoints").iterdir()] == ["step3"]
    assert sorted(path.name for path in (project.folder / "run").glob("*model*")) == []


def test_a_model_that_is_not_finite_is_not_exported(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """A finished checkpoint of a version that did not look: only the export is left to do."""
    settings = ("data.eval=null", "optim.lr=1e308", *OVERFLOWING)
    with monkeypatch.context() as patch:
        patch.setattr(KeepingCheckpointerCallback, "check_weights", lambda _self: None)
        patch.setattr(guard, "bad_weights", lambda *_, **__: [])
        run = project.train("run", *settings, "run.export=false")
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step3"]
    message = project.refused("run", *settings, "--resume")
    assert message.startswith("step 3: the weights contain NaN or Inf (transformer.")
    assert not (run / "model").exists()


def watched(losses: list[float], nlls: list[float], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What is said of a run that logs these."""
    watch = WatchCallback(display=Display())
    for step, (loss, nll) in enumerate(zip(losses, nlls, strict=True), 1):
        watch.log_metrics(step, {"train/loss": loss, "train/nll": nll})
        again = WatchCallback(display=watch.display)
        again.load_state_dict(json.loads(json.dumps(watch.state_dict())))
        watch = again
    return capsys.readouterr().out.splitlines()


def test_a_loss_that_jumps_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    calm = [0.5 + 0.01 * (-1) ** step for step in range(WINDOW)]  # mean 0.5, standard deviation 0.01
    assert watched([*calm, 0.55, 0.9], [2.0] * (WINDOW + 2), capsys) == []
    (said,) = watched([*calm, 1.2, 0.5], [2.0] * (WINDOW + 2), capsys)
    assert said.startswith(
        f"warning: step {WINDOW + 1}: train/loss jumped to 1.2, from 0.5 over the previous 16 logged steps"
    )


def test_chosen_answers_that_fall_off_are_warned_of_once_a_nat(capsys: pytest.CaptureFixture[str]) -> None:
    calm = [2.0] * FEW
    assert watched([0.5] * 2 * FEW, [*calm, *[2.9] * FEW], capsys) == []
    said = watched([0.5] * 5 * FEW, [*calm, *[3.2] * 2 * FEW, *[4.2] * 2 * FEW], capsys)
    # The mean of the last eight passes 3 with the seventh of them, and 4 with the seventh of the next.
    assert [line.split(":")[1] for line in said] == [f" step {FEW + 7}", f" step {3 * FEW + 7}"]
    assert "train/nll rose from 2.00 to 3.05 nats per token" in said[0]
