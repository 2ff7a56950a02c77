"""Every mistake a user can make at the start: one message, exit code 1, nothing left that blocks the next try."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from isopref.build import resolve
from isopref.ops import flash
from support.project import MakeProject, Project

SCRIPT = Path(sys.executable).with_name("isopref")
QUICK = ("optim.max_steps=1", "data.eval=null")  # what a try needs once the mistake is mended


@dataclass(frozen=True)
class Mistake:
    """What is done wrong, by arguments or in the folder, and what the message has to hold: the place, the way out."""

    says: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    spoil: Callable[[Project], None] = field(default=lambda project: None)


def replace_line(number: int, text: str) -> Callable[[Project], None]:
    """Puts `text` for a line of the training data."""

    def spoil(project: Project) -> None:
        path = project.folder / "train.jsonl"
        lines = path.read_text().splitlines()
        lines[number - 1] = text
        path.write_text("\n".join(lines) + "\n")

    return spoil


def no_file(project: Project) -> None:
    (project.folder / "train.jsonl").unlink()


def empty_file(project: Project) -> None:
    (project.folder / "train.jsonl").write_text("")


def pair(**changes: str | None) -> str:
    record = {"prompt": "a?", "chosen": "yes", "rejected": "no", **changes}
    return json.dumps({key: value for key, value in record.items() if value is not None})


MISTAKES = {
    "missing data file": Mistake(("train.jsonl: no such file", "/train.jsonl)", "Check the path"), spoil=no_file),
    "missing held-out file": Mistake(("nowhere.jsonl: no such file", "Check the path"), ("data.eval=nowhere.jsonl",)),
    "empty data file": Mistake(("train.jsonl: the file is empty", "choose another file"), spoil=empty_file),
    "broken JSON": Mistake(
        ("train.jsonl:7: not valid JSON", "Fix the line, or remove it"), spoil=replace_line(7, '{"prompt": "a?", ')
    ),
    "missing field": Mistake(
        ("train.jsonl:3: 'rejected' is missing", "data.on_bad: drop"), spoil=replace_line(3, pair(rejected=None))
    ),
    "empty completion": Mistake(
        ("train.jsonl:3: 'chosen' is empty", "data.on_bad: drop"), spoil=replace_line(3, pair(chosen=" "))
    ),
    "chosen equals rejected": Mistake(
        ("train.jsonl:23: 'chosen' equals 'rejected'", "Remove it, or set data.on_bad: drop"),
        spoil=replace_line(23, pair(chosen="no")),
    ),
    "no pair short enough": Mistake(("train.jsonl: none of 23 records is usable", "too_long"), ("data.max_length=5",)),
    "unknown field": Mistake(
        ("override 'optim.epoch=2': optim.epoch: no such field", "Did you mean optim.epochs?"),
        ("optim.epoch=2",),
    ),
    "wrong type": Mistake(
        ("override 'optim.batch_size=many': optim.batch_size: must be a whole number, at least 1", 'found "many"'),
        ("optim.batch_size=many",),
    ),
    "no such model": Mistake(
        ("model.path: there is no folder /nowhere/model", "Check the path, or give a hub name"),
        ("model.path=/nowhere/model",),
    ),
    "no such hub model": Mistake(
        ("model.path: there is no folder ", "nobody/nothing is not in the local cache", "give a local folder"),
        ("model.path=nobody/nothing",),
    ),
    "microbatch too small": Mistake(
        (
            "layout.microbatch_tokens",
            "is 30, but train.jsonl:8 takes ",
            " in layout.rows: shared",
            "Raise it to at least ",
        ),
        ("layout.microbatch_tokens=30",),
    ),
    "scoring too small": Mistake(
        ("layout.score_tokens is 30, but train.jsonl:8 takes ", "Raise it to at least "), ("layout.score_tokens=30",)
    ),
    "shards that do not fit": Mistake(
        ("layout.hsdp_shard is 2, which does not divide the number of processes, 1", "set layout.parallel: auto"),
        ("layout.parallel=hsdp", "layout.hsdp_shard=2"),
    ),
    "settings at odds": Mistake(
        ("layout.hsdp_shard", "has no effect with layout.parallel: auto", "remove hsdp_shard"), ("layout.hsdp_shard=2",)
    ),
    "no GPU": Mistake(
        ("run.device: cuda, but torch sees no CUDA device here", "Set run.device: auto or cpu"), ("run.device=cuda",)
    ),
}


@pytest.mark.parametrize("mistake", [pytest.param(value, id=key) for key, value in MISTAKES.items()])
def test_one_message_and_another_try(project: Project, monkeypatch: pytest.MonkeyPatch, mistake: Mistake) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    good = (project.folder / "train.jsonl").read_text()
    mistake.spoil(project)
    message = project.refused("run", *QUICK, *mistake.arguments)
    for part in mistake.says:
        assert part in message
    run = project.folder / "run"
    assert {path.name for path in run.glob("*")} <= {"engine.log"}
    assert not [path for path in (project.folder / "cache").rglob("*") if path.suffix not in ("", ".lock", ".arrow")]

    # With the mistake mended, the same command works in the same folder.
    (project.folder / "train.jsonl").write_text(good)
    project.train("run", *QUICK)
    assert (run / "model" / "model.safetensors").exists()
    assert (run / "config.yaml").exists()


def test_all_mistakes_in_a_config_at_once(project: Project) -> None:
    path = project.folder / "my.yaml"
    path.write_text(path.read_text().replace("lr: 0.001", "lr: fast").replace("epochs:", "epoch:"))
    outcome = project.isopref("train", "my.yaml")
    assert outcome.code == 1
    lines = outcome.err.splitlines()
    assert lines[0] == "error: my.yaml: 2 problems:"
    assert {line.split(": ")[1] for line in lines[1:]} == {"optim.epoch", "optim.lr"}
    assert all(line.startswith("  my.yaml:") for line in lines[1:])
    assert not (project.folder / "runs").exists()


def test_bad_records_are_dropped_and_counted_when_asked(project: Project) -> None:
    replace_line(3, pair(rejected=None))(project)
    replace_line(9, pair(chosen="no"))(project)
    outcome = project.isopref("train", "my.yaml", "run.folder=run", "data.on_bad=drop", *QUICK)
    assert outcome.code == 0, outcome.err
    assert "data  train.jsonl: 21 pairs (jsonl, text), 1 dropped (missing), 1 dropped (tie)\n" in outcome.out


def test_text_that_is_templated_already_is_warned_of(project: Project) -> None:
    replace_line(3, pair(prompt="<|im_start|>user\\na?<|im_end|>"))(project)
    warning = "warning: train.jsonl: 1 of 23 records contain the tokenizer's special tokens, such as '<|im_start|>'"
    for command in (("data", "my.yaml"), ("train", "my.yaml", "run.folder=run", *QUICK)):
        outcome = project.isopref(*command)
        assert outcome.code == 0, outcome.err
        assert outcome.out.count(warning) == 1


def test_a_model_that_is_not_whole(project: Project) -> None:
    broken = project.folder / "broken"
    shutil.copytree(project.model, broken)
    (broken / "model.safetensors").unlink()
    message = project.refused("run", *QUICK, f"model.path={broken}")
    assert f"model.path: cannot load {broken}: " in message
    assert "model.safetensors" in message
    assert not (project.folder / "run" / "config.yaml").exists()


def spoiled(project: Project, tensor: str) -> Path:
    """A copy of the project's model with one NaN."""
    broken = project.folder / "broken"
    shutil.copytree(project.model, broken)
    weights = load_file(broken / "model.safetensors")
    weights[tensor][-1, -1] = float("nan")
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    return broken


@pytest.mark.parametrize("tensor", ["transformer.wte.weight", "transformer.h.1.mlp.c_fc.weight"])
@pytest.mark.parametrize("setting", ["model.path", "model.reference", "--model"])
def test_weights_that_are_not_finite(project: Project, tensor: str, setting: str) -> None:
    """Found before any step, also in the embedding of a token that no pair has."""
    broken = spoiled(project, tensor)
    if setting == "--model":
        outcome = project.isopref("eval", "my.yaml", "--model", str(broken))
        assert outcome.code == 1
        message = outcome.err.removeprefix("error: ")
    else:
        message = project.refused("run", *QUICK, f"{setting}={broken}")
    assert message.startswith(f"{setting}: {broken}: the weights contain NaN or Inf, in {tensor}. The files are")
    assert not (project.folder / "run" / "config.yaml").exists()


def test_weights_that_are_not_finite_in_a_native_model(make_project: MakeProject) -> None:
    project = make_project("llama", model={"dtype": "float32"})
    broken = spoiled(project, "model.layers.1.mlp.up_proj.weight")
    message = project.refused("run", *QUICK, f"model.path={broken}", "model.native=true")
    assert message.startswith(f"model.path: {broken}: the weights contain NaN or Inf, in model.layers.1.mlp.up_proj")


def test_weights_that_are_not_finite_and_sharded_from_the_host(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolve, "from_host", lambda *_args, **_options: True)
    broken = spoiled(project, "transformer.wte.weight")
    message = project.refused("run", *QUICK, f"model.path={broken}", "layout.parallel=fsdp")
    assert message.startswith(
        "model GPT2LMHeadModel: the weights contain NaN or Inf, in transformer.wte.weight. The files are damaged"
    )


def test_a_folder_that_cannot_be_written(project: Project) -> None:
    message = project.refused("train.jsonl/run", *QUICK)
    assert message.startswith("run.folder: cannot write to train.jsonl/run")
    assert message.endswith("Choose another folder.")


def test_a_folder_that_cannot_be_looked_at(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    def exists(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", exists)
    assert project.refused("home/run", *QUICK) == (
        "run.folder: cannot use home/run (Permission denied). Set run.folder to another folder."
    )


@pytest.mark.parametrize("name", ["a" * 250, "é" * 125])
def test_a_config_with_a_long_name(project: Project, name: str) -> None:
    """The folder of its run has the run id behind it, and file names have at most 255 bytes."""
    (project.folder / "my.yaml").rename(project.folder / f"{name}.yaml")
    outcome = project.isopref("train", f"{name}.yaml", *QUICK)
    assert outcome.code == 0, outcome.err
    (run,) = (project.folder / "runs").iterdir()
    assert run.name.startswith(name[:100])


def test_as_a_process(project: Project) -> None:
    """What the tests above see in this process is what a shell sees."""
    replace_line(7, "{")(project)
    command = [str(SCRIPT), "train", "my.yaml", "run.folder=run"]
    done = subprocess.run(command, cwd=project.folder, env=project.env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.startswith("error: train.jsonl:7: not valid JSON")
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr + done.stdout


def test_a_broken_attention_package_is_named_once(
    make_project: MakeProject, models: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where two models are loaded. The run uses torch's kernel."""
    project = make_project("llama", model={"dtype": "bfloat16"})
    monkeypatch.setattr(flash, "knows", lambda _device: True)
    monkeypatch.setattr(flash, "load", lambda: flash.Package(None, "ImportError: no libcute.so"))
    reference = f"model.reference={models('llama')}"
    outcome = project.isopref("train", "my.yaml", "run.folder=run", *QUICK, reference)
    assert outcome.code == 0, outcome.err
    assert outcome.out.count("the package flash-attn-4") == 1
    assert (
        "warning: the package flash-attn-4 is installed but cannot be imported (ImportError: no libcute.so). "
        "Attention uses torch's own kernel, which is slower. Reinstall it: pip install 'isopref[flash]'; or remove it: "
        "pip uninstall flash-attn-4"
    ) in outcome.out
