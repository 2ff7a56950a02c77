"""Runs whose device has too little memory: the result is the same, or the run says which pair is too long."""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from isopref.cli import main as cli
from isopref.engine import train_module
from isopref.engine.callbacks.checkpointer import KeepingCheckpointerCallback
from isopref.errors import StartAgainError
from isopref.models.policy import Policy
from isopref.ops.memory import ran_out
from isopref.score import score as ours
from isopref.testing import oracle
from support.forked import isopref_on_ranks, second_rank_lacks_memory
from support.project import Command, MakeProject, Project, Weights

SETTINGS = ("run.folder=run", "data.eval=null", "run.save_every=3")

# A process that from some microbatch on has room for so many tokens, and then the command.
FAULTY = """
import itertools, torch
from isopref.engine import train_module
from isopref.score import score

count = itertools.count()

def limited(model, microbatch, needs):
    if model.training and next(count) >= FIRST and microbatch.passes[0].input_ids.numel() > 150:
        raise torch.OutOfMemoryError("planted")
    return score(model, microbatch, needs)

train_module.score = limited
from isopref.cli.main import main
main()
"""


LACKS = {
    "torch": torch.OutOfMemoryError("planted"),
    "cublas": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    "host": RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you"
    ),
}


def limit(monkeypatch: pytest.MonkeyPatch, tokens: int, error: Exception = LACKS["torch"]) -> None:
    """A device that has room for microbatches of so many tokens."""

    def limited(model: Any, microbatch: Any, needs: Any) -> Any:
        if microbatch.passes[0].input_ids.numel() > tokens:
            raise error
        return ours(model, microbatch, needs)

    monkeypatch.setattr(train_module, "score", limited)


@pytest.mark.parametrize(("loss", "lack"), [("sigmoid", "torch"), ("sigmoid", "cublas"), ("aot", "host")])
def test_microbatches_shrink_and_the_weights_are_the_same(
    project: Project,
    make_project: MakeProject,
    monkeypatch: pytest.MonkeyPatch,
    load_weights: Callable[[Path], Weights],
    loss: str,
    lack: str,
) -> None:
    """Also in aot's first pass, and where it is a library that lacks memory."""
    settings = (*SETTINGS, f"objective.loss={loss}")
    whole = make_project().train("run", *settings)
    limit(monkeypatch, 150, LACKS[lack])
    outcome = project.isopref("train", "my.yaml", *settings)
    assert outcome.code == 0, outcome.err
    # 4096, 2048, 1024, 512, 256, 128: five times half, all in the dry run or the first step.
    said = [line for line in outcome.out.splitlines() if line.startswith("warning")]
    assert len(said) == 5
    assert "Retrying it with microbatches of 128 tokens" in said[-1]
    run = project.folder / "run"
    assert oracle.relative_error(load_weights(run / "model"), load_weights(whole / "model")) <= 1e-8
    assert json.loads((run / "microbatch.json").read_text())["fits"] == {
        "kind": "shared",
        "tokens": 128,
        "examples": None,
    }


def test_a_later_start_knows_what_fits_unless_another_layout_is_asked_for(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, 150)
    project.train("run", *SETTINGS)
    (project.folder / "run" / "model").rename(project.folder / "model")
    outcome = project.isopref("train", "my.yaml", *SETTINGS, "--resume")
    assert outcome.code == 0, outcome.err
    assert (
        "layout: microbatches of 128 tokens, because larger ones ran out of memory before (run/microbatch.json)\n"
        in outcome.out
    )
    assert "warning" not in outcome.out
    (project.folder / "run" / "model").rename(project.folder / "model again")
    outcome = project.isopref("train", "my.yaml", *SETTINGS, "layout.microbatch_tokens=140", "--resume")
    assert outcome.code == 0, outcome.err
    assert "because larger ones ran out" not in outcome.out


def test_a_pair_too_long_for_the_device_is_named(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    records = [json.loads(line) for line in (project.folder / "train.jsonl").read_text().splitlines()]
    records[4] |= {"prompt": "a" * 20, "chosen": "b" * 70, "rejected": "c" * 50}
    project.write_pairs("train.jsonl", records)
    limit(monkeypatch, 150)
    message = project.refused("run", "data.eval=null")
    assert message.startswith("train.jsonl:5 does not fit into memory, even alone in its microbatch: ")
    assert "(prompt " in message
    assert "or shorten the pairs: data.max_length drops longer pairs; with data.truncation: " in message
    assert "layout.checkpointing: full" in message


@pytest.mark.parametrize("parallel", ["single", "fsdp"])
def test_there_is_an_end_to_smaller_microbatches(
    project: Project, monkeypatch: pytest.MonkeyPatch, parallel: str
) -> None:
    """In the first pass of a coupled loss, where no pair is to blame, though each is alone in the end."""
    monkeypatch.setattr(cli, "start_again", lambda _environment: None)
    limit(monkeypatch, 10)
    settings = (*SETTINGS, "layout.microbatch_tokens=80", "objective.loss=aot", f"layout.parallel={parallel}")
    starts = [project.isopref("train", "my.yaml", *settings, "--resume", "auto") for _ in range(4)]
    assert [outcome.code for outcome in starts] == ([75, 75, 1, 1] if parallel == "fsdp" else [1, 1, 1, 1])
    smallest = (
        r"error: out of memory with microbatches of \d+ tokens and 1 example, the smallest possible\. Try: recompute"
    )
    assert re.match(smallest, starts[-1].err)


def test_a_run_that_was_asked_to_stop_is_not_started_again() -> None:
    for asked in (None, signal.SIGTERM):
        error = StartAgainError("no memory")
        keeping = KeepingCheckpointerCallback()
        keeping._asked = asked
        keeping.on_error(error)
        assert error.at_once == (asked is None)


def test_sharded_ranks_stop_at_once_and_start_again(project: Project) -> None:
    """Rank 1 has less room than rank 0, which waits for it inside the model.

    That `--nproc` starts them again is tested in test_cli.py.
    """
    settings = (*SETTINGS, "layout.parallel=fsdp", "layout.microbatch_tokens=300", "optim.batch_size=12")
    command = ("train", "my.yaml", *settings)
    outcome = isopref_on_ranks(project, *command, prepare=second_rank_lacks_memory)
    assert outcome.code == StartAgainError.exit_code, outcome.err
    assert outcome.err.count("error on rank 1: out of memory with microbatches of 300 tokens, at a point where") == 1
    assert "The next start resumes from the last checkpoint with microbatches of 150 tokens." in outcome.err
    assert "planted" not in outcome.err
    project.extra_env[StartAgainError.variable] = "1"  # as the launcher sets it
    outcome = isopref_on_ranks(project, *command, prepare=second_rank_lacks_memory)
    assert outcome.code == 0, outcome.err
    assert (
        outcome.out.count(
            "layout: microbatches of 150 tokens, because larger ones ran out of memory before (run/microbatch.json)\n"
        )
        == 1
    )
    assert (project.folder / "run" / "model").is_dir()


def test_one_process_that_is_sharded_starts_again_by_itself(
    project: Project,
    make_project: MakeProject,
    start: Callable[..., Command],
    load_weights: Callable[[Path], Weights],
) -> None:
    """In the fifth step. To whoever started it, it stays the same process."""
    settings = (*SETTINGS, "layout.parallel=fsdp", "layout.microbatch_tokens=300")
    whole = make_project().train("run", *settings)
    (project.folder / "faulty.py").write_text(FAULTY.replace("FIRST", "6"))
    command = start(project, *settings, launcher=[sys.executable, "faulty.py"])
    code, out, err = command.end()
    assert code == 0, err
    assert err.count("warning: out of memory with microbatches of 300 tokens, at a point where the step can") == 1
    assert (
        out.count(
            "layout: microbatches of 150 tokens, because larger ones ran out of memory before (run/microbatch.json)\n"
        )
        == 1
    )
    assert out.count("resume after step 3\n") == 1
    assert command.family() == {}
    assert oracle.relative_error(load_weights(project.folder / "run/model"), load_weights(whole / "model")) <= 1e-8


def test_a_model_that_does_not_fit(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_args: Any, **_options: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.62 GiB. GPU 0 has ...")

    monkeypatch.setattr(Policy, "to", full)
    message = project.refused("run")
    assert message.startswith(
        "CUDA out of memory. Tried to allocate 1.62 GiB. It ran out of memory outside a training step"
    )
    assert message.endswith("isopref plan shows what fits.")


def test_torch_says_so_of_the_host_too() -> None:
    with pytest.raises(RuntimeError) as found:
        torch.empty(10**15)
    assert ran_out(found.value)


def test_another_error_stays_what_it_is(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, 0, RuntimeError("a fault of ours"))
    with pytest.raises(RuntimeError, match=r"^a fault of ours$"):
        project.isopref("train", "my.yaml", *SETTINGS)
