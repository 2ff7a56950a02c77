"""`isopref.train`: the command's run in a script's own process, which is afterwards as it was."""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing
import os
import random
import re
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import yaml
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

import isopref
from isopref.errors import ConfigError, RunError, UserError
from support.project import Project, Weights

GROUP = "layout.parallel=ddp"  # a process group, though there is one process


@pytest.fixture
def inside(project: Project) -> Iterator[Project]:
    """A project whose folder and cache are this process's."""
    with contextlib.chdir(project.folder), mock.patch.dict(os.environ, project.env, clear=True):
        yield project


def process_state() -> dict[str, Any]:
    """What a run may not leave changed."""
    named = ("", "isopref", "olmo_core", "torch.distributed.tensor")
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    return {
        "environment": dict(os.environ),
        "logging": [(list(logging.getLogger(name).handlers), logging.getLogger(name).level) for name in named],
        "warnings": warnings.showwarning,
        "bars": transformers_logging.is_progress_bar_enabled(),
        "random": (random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()),
        "signals": [signal.getsignal(one) for one in signals],
        "collection": gc.isenabled(),
        "group": dist.is_initialized(),
        "threads": sorted(one.name for one in threading.enumerate()),
        "folder": Path.cwd(),
    }


def test_two_runs_in_one_process_are_those_of_the_command(
    inside: Project, load_weights: Callable[[Path], Weights]
) -> None:
    by_command = inside.train("command", GROUP)
    before = process_state()
    first = isopref.train("my.yaml", ["run.folder=first", GROUP])
    assert process_state() == before
    settings = yaml.safe_load(Path("my.yaml").read_text())
    second = isopref.train(settings, ["optim.lr=2e-3", GROUP])
    assert process_state() == before
    assert settings == yaml.safe_load(Path("my.yaml").read_text())

    assert (first.folder, first.status, first.last_step) == (Path("first"), "finished", 10)
    assert second.folder.parent == Path("runs")
    assert first.model_folder == Path("first/model")
    AutoModelForCausalLM.from_pretrained(first.model_folder)
    ours, theirs = load_weights(first.model_folder), load_weights(by_command / "model")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert second.model_folder is not None
    assert not torch.equal(
        *(load_weights(run)["transformer.wte.weight"] for run in (first.model_folder, second.model_folder))
    )
    assert len(first.metrics["train/loss"].values) == 10
    assert first.figure("accuracy") is not None


def test_an_error_is_an_exception_and_the_next_run_goes_on(inside: Project, capfd: pytest.CaptureFixture[str]) -> None:
    before = process_state()
    with pytest.raises(UserError, match=r"override 'optim\.lr=fast': optim\.lr: must be"):
        isopref.train("my.yaml", ["optim.lr=fast"])
    with pytest.raises(RunError, match="gradients of 5 steps in a row were not finite"):
        isopref.train("my.yaml", ["run.folder=run", "optim.lr=1e300", "optim.max_grad_norm=null", GROUP])
    assert process_state() == before
    stopped = isopref.train("my.yaml", ["run.folder=other", "run.export=false"])
    assert (stopped.status, stopped.model_folder) == ("finished", None)
    assert "error" not in capfd.readouterr().err


def test_a_run_that_is_there_is_refused_or_gone_on_with(inside: Project) -> None:
    done = isopref.train("my.yaml", ["run.folder=run"])
    with pytest.raises(RunError, match="contains a finished run"):
        isopref.train("my.yaml", ["run.folder=run"])
    assert isopref.train("my.yaml", ["run.folder=run"], resume="auto").metrics == done.metrics


def test_an_interrupt_saves_and_returns(inside: Project) -> None:
    before = process_state()

    def interrupt() -> None:
        while not Path("run/metrics.jsonl").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    run = isopref.train("my.yaml", ["run.folder=run", "optim.epochs=4000"])
    thread.join()
    assert run.status == f"stopped at step {run.last_step}"
    assert (run.folder / "checkpoints" / f"step{run.last_step}").exists()
    assert run.model_folder is None
    assert process_state() == before


def test_a_mapping_holds_what_a_file_may(inside: Project) -> None:
    settings = {"model": {"path": "m"}, "data": {"train": Path("a.jsonl")}}
    with pytest.raises(
        ConfigError, match=r"config: PosixPath\('a\.jsonl'\) is not a valid config value\..*str\(path\)"
    ):
        isopref.train(settings)
    with pytest.raises(ConfigError, match=r"^config: optim\.lr: must be .*found \"fast\""):
        isopref.train({"model": {"path": "m"}, "data": {"train": "a.jsonl"}, "optim": {"lr": "fast"}})


def test_arguments_that_would_mean_something_else(inside: Project) -> None:
    with pytest.raises(ConfigError, match=r"overrides: expected strings such as 'optim\.lr=1e-6', found 1e-06"):
        isopref.train("my.yaml", [1e-6])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match=r"overrides: expected a list.*Write \['optim\.lr=1e-6'\]"):
        isopref.train("my.yaml", "optim.lr=1e-6")
    with pytest.raises(ConfigError, match="resume: must be one of no, must, auto; found True"):
        isopref.train("my.yaml", resume=True)  # type: ignore[arg-type]


def test_a_process_that_is_not_its_own_is_refused(inside: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[BaseException] = []

    def call() -> None:
        try:
            isopref.train("my.yaml")
        except RunError as error:
            found.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert "Call it in the main thread" in str(found[0])
    with monkeypatch.context() as patch:
        patch.setenv("WORLD_SIZE", "2")
        with pytest.raises(RunError, match=r"2 were started \(WORLD_SIZE\).*--nproc"):
            isopref.train("my.yaml")
    with monkeypatch.context() as patch:
        patch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
        with pytest.raises(RunError, match="under `if __name__ == '__main__':`"):
            isopref.train("my.yaml")
    dist.init_process_group("gloo", init_method=f"file://{inside.folder}/store", rank=0, world_size=1)
    try:
        with pytest.raises(RunError, match="a process group already exists"):
            isopref.train("my.yaml")
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("page", ["README.md", "docs/getting-started.md"])
def test_the_snippet_of_the_docs(inside: Project, page: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The first Python of a page, executed as it is, beside a config of the name it uses."""
    text = (Path(__file__).parents[2] / page).read_text()
    (snippet, *_) = re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    assert "isopref.train(" in snippet
    names: dict[str, Any] = {}
    exec(compile(snippet, page, "exec"), names)
    assert names["run"].status == "finished"
    assert names["run"].config["optim"]["lr"] == 2e-6
    if "print(" in snippet:
        assert "finished {'value': " in capsys.readouterr().out
