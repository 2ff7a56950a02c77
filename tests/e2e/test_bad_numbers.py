"""A run meets numbers that are not finite: the pair is named, the weights are left alone, and there is an end to it."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import pytest
import torch
from safetensors.torch import load_file, save_file

from isopref.engine import train_module
from isopref.engine.display import Display
from isopref.engine.optim import Kind
from isopref.engine.train_module import DPOTrainModule
from isopref.engine.watch import FEW, WINDOW, WatchCallback
from isopref.score import score as ours
from isopref.testing import oracle
from isopref.testing.models import byte_tokenizer, tiny_folder

if TYPE_CHECKING:
    from tests.e2e.conftest import MakeProject, Project, Weights

MARK = "~"  # in one prompt, of line 7
(TOKEN,) = byte_tokenizer().encode(MARK)
SETTINGS = ("data.eval=null", "optim.epochs=1")
LoadWeights = Callable[[Path], "Weights"]


def mark(project: Project) -> None:
    records = [json.loads(line) for line in (project.folder / "train.jsonl").read_text().splitlines()]
    records[6]["prompt"] += MARK
    project.write_pairs("train.jsonl", records)


def test_a_pair_that_gives_nan_is_named_and_skipped(
    make_project: MakeProject, tmp_path: Path, load_weights: LoadWeights
) -> None:
    """The embedding of one token is NaN. There is no reference, which would be refused for the same reason."""
    project = make_project("llama")
    mark(project)
    folder = tiny_folder(tmp_path / "broken", "llama")
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][TOKEN] = math.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    settings = (f"model.path={folder}", "model.dtype=float32", "objective.loss=simpo", *SETTINGS)
    outcome = project.isopref("train", "my.yaml", "run.folder=run", *settings)
    assert outcome.code == 0, outcome.err
    warnings = [line for line in outcome.out.splitlines() if line.startswith("warning")]
    assert len(warnings) == 1
    assert warnings[0].startswith("warning: step ")
    assert warnings[0].endswith(" was skipped: the loss of train.jsonl:7 is not finite. The weights are as before.")
    trained = load_weights(project.folder / "run" / "model")
    fine = torch.ones(len(weights["model.embed_tokens.weight"]), dtype=torch.bool)
    fine[TOKEN] = False
    assert trained["model.embed_tokens.weight"][fine].isfinite().all()
    assert trained["lm_head.weight"].isfinite().all()
    assert not torch.equal(trained["lm_head.weight"], weights["lm_head.weight"])
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
    assert " was skipped: the gradient of train.jsonl:7 is not finite. The weights are as before.\n" in outcome.out


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
    assert said.startswith(f"warning: step {WINDOW + 1}: train/loss jumped to 1.2, from 0.5 over the 16 logged steps")


def test_chosen_answers_that_fall_off_are_warned_of_once_a_nat(capsys: pytest.CaptureFixture[str]) -> None:
    calm = [2.0] * FEW
    assert watched([0.5] * 2 * FEW, [*calm, *[2.9] * FEW], capsys) == []
    said = watched([0.5] * 5 * FEW, [*calm, *[3.2] * 2 * FEW, *[4.2] * 2 * FEW], capsys)
    # The mean of the last eight passes 3 with the seventh of them, and 4 with the seventh of the next.
    assert [line.split(":")[1] for line in said] == [f" step {FEW + 7}", f" step {3 * FEW + 7}"]
    assert "train/nll rose from 2.00 to 3.05 nats a token" in said[0]
