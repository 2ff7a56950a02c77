"""A model larger than a device: sharded from the host's memory, never whole, with the same result."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from isopref.build import resolve
from isopref.models import hf
from isopref.models.policy import Policy
from isopref.testing import oracle
from isopref.testing.models import tiny_folder
from support.project import MakeProject, Project, Weights

FSDP = ("layout.parallel=fsdp", "run.samples=2")


@pytest.fixture
def too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model is; and none may be moved as a whole."""

    def refuse(*_args: Any, **_options: Any) -> None:
        raise AssertionError("the model was moved as a whole")

    monkeypatch.setattr(resolve, "from_host", lambda *_args, **_options: True)
    monkeypatch.setattr(Policy, "to", refuse)


@pytest.fixture(scope="module")
def usual(make_project: MakeProject) -> Path:
    return make_project().train("usual", *FSDP)


@pytest.mark.usefixtures("usual", "too_large")  # in this order
def test_same_weights(project: Project, usual: Path, load_weights: Callable[[Path], Weights]) -> None:
    done = project.isopref("train", "my.yaml", *FSDP, "run.folder=run")
    assert done.code == 0, done.err
    assert "is sharded from host memory" in done.out
    assert "note: skipping sample answers: the full model does not fit on one device" in done.out
    assert (usual / "samples.jsonl").exists()
    assert not (project.folder / "run" / "samples.jsonl").exists()
    found, expected = (load_weights(folder / "model") for folder in (project.folder / "run", usual))
    assert oracle.relative_error(found, expected) == 0


def test_weights_of_16_bits_are_widened_on_the_way(
    tmp_path: Path,
    make_project: MakeProject,
    load_weights: Callable[[Path], Weights],
    read_metrics: Callable[[Path], list[dict[str, float]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Loaded as float32, widened where they are placed, widened once they are sharded: one result, one reference."""
    half = tiny_folder(tmp_path / "half", dtype=torch.bfloat16)
    project = make_project("llama", model={"dtype": "float32", "compute_dtype": "bfloat16"})
    changes = (f"model.path={half}", "layout.parallel=fsdp", "optim.max_steps=3")
    with monkeypatch.context() as patch:
        patch.setattr(hf, "load_narrow", lambda *_args, **_options: None)
        project.train("loaded", *changes)
    project.train("placed", *changes)
    monkeypatch.setattr(resolve, "from_host", lambda *_args, **_options: True)
    done = project.isopref("train", "my.yaml", *changes, "run.folder=sharded")
    assert done.code == 0, done.err
    assert "cache 23 of 23 training pairs have their reference" in done.out  # under the same key
    runs = [project.folder / name for name in ("loaded", "placed", "sharded")]
    expected, *found = (load_weights(run / "model") for run in runs)
    assert {tensor.dtype for tensor in expected.values()} == {torch.float32}
    assert [oracle.relative_error(one, expected) for one in found] == [0, 0]
    assert len({(run / "model" / "config.json").read_text() for run in runs}) == 1
    losses = [[line["train/loss"] for line in read_metrics(run)] for run in runs]
    assert losses[0] == losses[1] == losses[2]


@pytest.mark.usefixtures("too_large")
@pytest.mark.parametrize(
    "changes",
    [
        ("model.adapter={rank: 2}", "model.dtype=float32"),
        ("model.dtype=float32", "model.compute_dtype=bfloat16"),
        ("model.reference=run-model", "objective.reference_moves=[2, 0.5]"),
    ],
    ids=" ".join,
)
def test_whatever_is_trained(project: Project, changes: tuple[str, ...]) -> None:
    changes = tuple(one.replace("run-model", str(project.model)) for one in changes)
    project.train("run", *FSDP, *changes, "optim.max_steps=2")


@pytest.mark.usefixtures("too_large")
def test_rows_are_proven_all_the_same(make_project: MakeProject) -> None:
    """MPT's attention cannot be hooked."""
    unhookable = make_project("mpt", model={"dtype": "float32"})
    message = unhookable.refused("run", *FSDP)
    assert message.startswith("MptForCausalLM cannot be trained with layout.rows: shared")
