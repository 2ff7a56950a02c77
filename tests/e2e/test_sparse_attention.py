"""A model whose attention looks at chosen keys: what chooses them has no gradient, and comes out as it went in."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from isopref.testing.models import ARCHITECTURES, SPARSE_ATTENTION
from isopref.testing.oracle import relative_error
from support.forked import isopref_on_ranks
from support.project import MakeProject, Project, Weights

LoadWeights = Callable[[Path], "Weights"]
SAVE = ("layout.rows=padded", "run.save_every=3", "run.keep=20")


@pytest.fixture(scope="module")
def whole(make_project: MakeProject) -> tuple[Project, Path]:
    """A run that nothing stopped."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ARCHITECTURES, "sparse", SPARSE_ATTENTION)
        project = make_project("sparse", model={"dtype": "float32"})
    return project, project.train("run", *SAVE)


def test_what_chooses_keys_is_as_it_was(whole: tuple[Project, Path], load_weights: LoadWeights) -> None:
    project, run = whole
    before, after = load_weights(project.model), load_weights(run / "model")
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert {name for name in before if ".indexer." in name} <= same
    assert {name for name in same if name.endswith("_proj.weight") and ".indexer." not in name} == set()


def test_the_run_says_so(whole: tuple[Project, Path], load_weights: LoadWeights) -> None:
    project, _ = whole
    count = sum(weight.numel() for name, weight in load_weights(project.model).items() if ".indexer." in name)
    outcome = project.isopref("train", "my.yaml", *SAVE, "run.folder=said", "optim.max_steps=1")
    assert outcome.code == 0, outcome.err
    names = ", ".join(f"model.layers.{layer}.self_attn.indexer" for layer in range(2))
    assert f"\nfrozen (they only select keys, which has no gradient): {names} ({count:,} weights)\n" in outcome.out


def test_stopped_and_resumed_it_ends_in_the_same_bits(
    whole: tuple[Project, Path], load_weights: LoadWeights, tmp_path: Path
) -> None:
    project, run = whole
    expected = load_weights(run / "model")
    shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(tmp_path / "run/model")
    for step in (9, 10):
        shutil.rmtree(tmp_path / f"run/checkpoints/step{step}")
    outcome = project.isopref("train", "my.yaml", *SAVE, f"run.folder={tmp_path}/run", "--resume")
    assert outcome.code == 0, outcome.err
    found = load_weights(tmp_path / "run/model")
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("parallel", [pytest.param("ddp", marks=pytest.mark.soak), "fsdp"])
def test_two_ranks_end_in_the_same_weights(
    whole: tuple[Project, Path], load_weights: LoadWeights, parallel: str
) -> None:
    project, run = whole
    settings = (*SAVE, f"run.folder={parallel}", f"layout.parallel={parallel}")
    outcome = isopref_on_ranks(project, "train", "my.yaml", *settings)
    assert outcome.code == 0, outcome.err
    folder = project.folder / parallel
    before, found, expected = (load_weights(one) for one in (project.model, folder / "model", run / "model"))
    assert relative_error(found, expected) <= 1e-5 < relative_error(found, before)
