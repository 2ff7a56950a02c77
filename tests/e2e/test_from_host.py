"""A model larger than a device: sharded from the host's memory, never whole, with the same result."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from isopref.build import auto
from isopref.models.policy import Policy
from isopref.testing import oracle

if TYPE_CHECKING:
    from tests.e2e.conftest import MakeProject, Project, Weights

FSDP = ("layout.parallel=fsdp", "run.samples=2", "run.sample_tokens=4")


@pytest.fixture
def too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model is; and none may be moved as a whole."""

    def refuse(*_args: Any, **_options: Any) -> None:
        raise AssertionError("the model was moved as a whole")

    monkeypatch.setattr(auto, "from_host", lambda *_args, **_options: True)
    monkeypatch.setattr(Policy, "to", refuse)


@pytest.fixture(scope="module")
def usual(make_project: MakeProject) -> Path:
    return make_project().train("usual", *FSDP)


@pytest.mark.usefixtures("usual", "too_large")  # in this order
def test_same_weights(project: Project, usual: Path, load_weights: Callable[[Path], Weights]) -> None:
    done = project.isopref("train", "my.yaml", *FSDP, "run.folder=run")
    assert done.code == 0, done.err
    assert "is sharded from the host's memory" in done.out
    assert "note: no sample answers, as the model as a whole does not fit on one device" in done.out
    assert (usual / "samples.jsonl").exists()
    assert not (project.folder / "run" / "samples.jsonl").exists()
    found, expected = (load_weights(folder / "model") for folder in (project.folder / "run", usual))
    assert oracle.relative_error(found, expected) == 0


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
    """Falcon's attention cannot be hooked."""
    unhookable = make_project("falcon", model={"dtype": "float32"})
    message = unhookable.refused("run", *FSDP)
    assert message.startswith("FalconForCausalLM cannot be trained with layout.rows: shared")
