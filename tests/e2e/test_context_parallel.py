"""Runs whose ranks split rows: the same model as one process leaves, also when other degrees continue the run."""

import json
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from isopref.errors import StartAgainError
from isopref.testing import oracle
from support.forked import isopref_on_ranks, second_rank_lacks_memory
from support.project import MakeProject, Weights

Load = Callable[[Path], Weights]
SETTINGS = ("run.folder=run", "run.save_every=2", "optim.epochs=4")  # 20 steps
SPLIT = "layout.context_parallel=2"
BOUND = 1e-8  # of float64 throughout

pytestmark = pytest.mark.xdist_group("ranks")


@pytest.fixture(scope="module")
def alone(make_project: MakeProject, load_weights: Load) -> Weights:
    return load_weights(make_project().train("run", *SETTINGS[1:]) / "model")


@pytest.mark.parametrize(
    ("num_ranks", "layout"),
    [
        (2, ["layout.parallel=fsdp", "layout.microbatch_tokens=110", "layout.checkpointing=full"]),
        (2, ["layout.parallel=ddp", "layout.rows=packed"]),
        (4, ["layout.parallel=hsdp", "layout.hsdp_shard=2", "layout.microbatch_tokens=110"]),
    ],
    ids=["fsdp", "ddp", "hsdp"],
)
def test_rows_split_over_ranks(
    make_project: MakeProject, load_weights: Load, alone: Weights, num_ranks: int, layout: list[str]
) -> None:
    project = make_project()
    outcome = isopref_on_ranks(project, "train", "my.yaml", *SETTINGS, SPLIT, *layout, num_ranks=num_ranks)
    assert outcome.code == 0, outcome.err
    assert outcome.err == ""
    assert oracle.relative_error(load_weights(project.folder / "run" / "model"), alone) <= BOUND


def test_from_one_process_to_two_and_back(make_project: MakeProject, load_weights: Load, alone: Weights) -> None:
    project = make_project()
    run = project.train("run", *SETTINGS[1:], "run.keep=10", "run.export=false")
    for step in range(6, 21, 2):  # as if it had been stopped after step 4
        shutil.rmtree(run / "checkpoints" / f"step{step}")
    seal = run / "checkpoints" / "step8" / "seal.json"
    arguments = ("train", "my.yaml", *SETTINGS, SPLIT, "layout.parallel=fsdp", "--resume")
    outcome = isopref_on_ranks(project, *arguments, stop=(seal, signal.SIGTERM))
    assert "resume after step 4\n" in outcome.out
    assert "Stopped by SIGTERM after step " in outcome.out
    project.train("run", *SETTINGS[1:], "--resume")
    assert oracle.relative_error(load_weights(run / "model"), alone) <= BOUND


def test_labelled_answers_with_a_first_pass(make_project: MakeProject, load_weights: Load) -> None:
    """KTO also scores mismatched pairs, before every step and with the reference."""
    kto = ("objective.loss=kto", "optim.epochs=1", "data.eval=null")
    expected = load_weights(make_project().train("run", *kto) / "model")
    project = make_project()
    outcome = isopref_on_ranks(project, "train", "my.yaml", "run.folder=run", *kto, SPLIT, "layout.parallel=fsdp")
    assert outcome.code == 0, outcome.err
    assert oracle.relative_error(load_weights(project.folder / "run" / "model"), expected) <= BOUND


def numbers(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """All numbers in a JSON value, by their paths."""
    if isinstance(value, dict | list):
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            yield from numbers(one, f"{name}/{key}")
    elif isinstance(value, float | int):
        yield name, float(value)


def test_an_evaluation_has_the_same_figures(make_project: MakeProject) -> None:
    project = make_project()
    model = project.train("run", "optim.epochs=1") / "model"  # compared with itself, rounding would decide
    found: list[Any] = []
    for settings in ((), (SPLIT, "layout.parallel=ddp")):
        file = project.folder / f"figures{len(found)}.json"
        asked = ("eval", "my.yaml", *settings, "--model", str(model), "--json", str(file))
        outcome = isopref_on_ranks(project, *asked, num_ranks=2) if settings else project.isopref(*asked)
        assert outcome.code == 0, outcome.err
        found.append(json.loads(file.read_text()))
    alone, split = (dict(numbers(one)) for one in found)
    assert len(alone) > 20
    assert split == pytest.approx(alone, abs=1e-9, nan_ok=True)


def test_ranks_that_run_out_of_memory_start_again(make_project: MakeProject) -> None:
    """Under DDP, too: a rank that fails in the middle of a row leaves the others waiting for its tokens."""
    project = make_project()
    settings = ("run.folder=run", "data.eval=null", "layout.parallel=ddp", "layout.microbatch_tokens=300", SPLIT)
    command = ("train", "my.yaml", *settings)
    outcome = isopref_on_ranks(project, *command, prepare=second_rank_lacks_memory)
    assert outcome.code == StartAgainError.exit_code, outcome.err
    assert "The next start resumes from the last checkpoint with microbatches of 150 tokens." in outcome.err
    project.extra_env[StartAgainError.variable] = "1"  # as the launcher sets it
    outcome = isopref_on_ranks(project, *command, prepare=second_rank_lacks_memory)
    assert outcome.code == 0, outcome.err


def test_what_cannot_work_is_refused(make_project: MakeProject) -> None:
    message = make_project().refused("run", SPLIT)
    assert "layout.context_parallel: 2 does not divide the number of processes, 1. Change --nproc" in message
    outcome = isopref_on_ranks(make_project("mamba", model={"dtype": "float32"}), "train", "my.yaml", SPLIT)
    assert outcome.code == 1
    assert "layout.context_parallel: 2, but MambaForCausalLM has layers whose sequences cannot be split" in outcome.err


def test_mixed_precision_and_a_model_whose_heads_the_ranks_do_not_divide(make_project: MakeProject) -> None:
    project = make_project("llama", model={"dtype": "float32"})
    outcome = isopref_on_ranks(project, "train", "my.yaml", "layout.context_parallel=3", num_ranks=3)
    assert outcome.code == 1
    assert "layout.context_parallel: 3 does not divide the heads of the model, 4. Use one of 1, 2, 4." in outcome.err
    settings = ("model.compute_dtype=bfloat16", "optim.epochs=1")
    outcome = isopref_on_ranks(project, "train", "my.yaml", SPLIT, *settings)
    assert outcome.code == 0, outcome.err
