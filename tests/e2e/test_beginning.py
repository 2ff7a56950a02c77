"""A run that goes on has the models and the reference values that it began with, whatever became of the cache."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import transformers

from isopref.reference.store import Store
from support.project import Project, Weights

SAVE = ("run.save_every=3", "run.keep=9")
LoadWeights = Callable[[Path], "Weights"]
LACKS = "warning: run/reference lacks the reference of {} pairs. Values from the cache, or scored again, may differ by "


def cut(run: Path) -> None:
    """Leave of a finished run what there was after its third step."""
    for what in ("model", "checkpoints/step6", "checkpoints/step9", "checkpoints/step10"):
        shutil.rmtree(run / what)
    (run / "evaluation.json").unlink()


def went_on(project: Project, *arguments: str) -> str:
    """Resume; returns what was printed."""
    outcome = project.isopref("train", "my.yaml", "run.folder=run", *SAVE, *arguments, "--resume")
    assert outcome.code == 0, outcome.err
    assert "resume after step 3\n" in outcome.out
    return outcome.out


def result(run: Path, load_weights: LoadWeights) -> tuple[dict[str, bytes], Any]:
    """Weights and held-out figures, to the bit."""
    weights = {name: tensor.numpy().tobytes() for name, tensor in load_weights(run / "model").items()}
    return weights, json.loads((run / "evaluation.json").read_text())


def the_store(project: Project) -> Store:
    (folder,) = (project.folder / "cache" / "reference").iterdir()
    return Store(folder)


def add_values_of_another_run(store: Store) -> None:
    """All pairs once more, off by rounding, in a shard that comes before all others."""
    first, known = store.shards()[0], store.read()[0]
    for number in count(1):
        other = known.copy()
        other["logp"] += number * 1e-12
        store.write(other)
        if store.shards()[0] != first:
            return


def test_values_that_another_run_stores_meanwhile(project: Project, load_weights: LoadWeights) -> None:
    """Two runs that start at once score the same pairs; each one's values stay its own."""
    run = project.train("run", *SAVE)
    before = result(run, load_weights)
    cut(run)
    store = the_store(project)
    add_values_of_another_run(store)
    out = went_on(project)
    assert "cache 23 of 23 training pairs have their reference (run/reference)\n" in out
    assert "cache 8 of 8 held-out pairs have their reference (run/reference)\n" in out
    assert result(run, load_weights) == before


def test_a_cache_that_is_gone_meanwhile(project: Project, load_weights: LoadWeights) -> None:
    run = project.train("run", *SAVE)
    before = result(run, load_weights)
    cut(run)
    shutil.rmtree(project.folder / "cache" / "reference")
    out = went_on(project)
    assert "; scoring" not in out
    assert "warning" not in out
    assert the_store(project).shards() == []
    assert result(run, load_weights) == before


@pytest.mark.parametrize("how", ["damaged", "gone"])
def test_without_them_the_cache_has_to_do_and_that_is_said(
    project: Project, load_weights: LoadWeights, how: str
) -> None:
    run = project.train("run", *SAVE)
    before = result(run, load_weights)
    cut(run)
    shards = {path.parents[1].name: path for path in (run / "reference").rglob("*.shard")}
    assert set(shards) == {"training", "held-out"}
    if how == "gone":  # or a run of an earlier version
        shutil.rmtree(run / "reference")
    else:
        content = shards["training"].read_bytes()
        shards["training"].write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    out = went_on(project)
    assert LACKS.format("23 of 23 training") in out
    assert (LACKS.format("8 of 8 held-out") in out) == (how == "gone")
    named = f"warning: {shards['training'].relative_to(project.folder)}: damaged: its content does not match its name"
    assert (named in out) == (how == "damaged")
    assert result(run, load_weights) == before  # nobody else wrote to the cache
    # It has them again.
    cut(run)
    assert "warning" not in went_on(project)
    assert result(run, load_weights) == before


def test_other_held_out_pairs(project: Project) -> None:
    """They may change when a run goes on; what is new is not from its beginning."""
    cut(project.train("run", *SAVE))
    more = (project.folder / "eval.jsonl").read_text() + '{"prompt": "a?", "chosen": "yes b", "rejected": "no"}\n'
    (project.folder / "more.jsonl").write_text(more)
    out = went_on(project, "data.eval=more.jsonl")
    assert LACKS.format("1 of 9 held-out") in out
    assert "cache 8 of 9 held-out pairs have their reference (store " in out
    cut(project.folder / "run")
    out = went_on(project, "data.eval=more.jsonl")
    assert "cache 9 of 9 held-out pairs have their reference (run/reference)\n" in out


# --- other code ------------------------------------------------------------------------------------


@pytest.mark.parametrize("other_model", [False, True])
def test_another_version_of_transformers(project: Project, monkeypatch: pytest.MonkeyPatch, other_model: bool) -> None:
    """The model is not to blame, and no hour is spent on scoring before that is said."""
    told = (*SAVE, "optim.max_steps=4", *([f"model.reference={project.model}"] if other_model else []))
    run = project.train("run", *told)
    shutil.rmtree(run / "model")
    shards = sorted((project.folder / "cache").rglob("*.shard"))
    first = transformers.__version__
    with monkeypatch.context() as patch:
        patch.setattr("isopref.reference.key.transformers.__version__", "99.1")
        message = project.refused("run", *told, "--resume")
    assert message == (
        f"--resume: the reference {project.model} was computed with transformers {first} when the run in run began; "
        f"the installed version is 99.1, whose results may differ. Try: pip install transformers=={first}, or start a "
        "new run in a different run.folder."
    )
    assert sorted((project.folder / "cache").rglob("*.shard")) == shards
    project.train("run", *told, "--resume")


def test_another_version_of_the_score_path(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    run = project.train("run", *SAVE, "optim.max_steps=4")
    shutil.rmtree(run / "model")
    monkeypatch.setattr("isopref.reference.key.SCORE_VERSION", 99)
    message = project.refused("run", *SAVE, "optim.max_steps=4", "--resume")
    assert "was scored by a different version of isopref when the run in run began" in message
    assert "Install that version (see run/starts.jsonl), or start a new run" in message


def test_a_run_of_an_earlier_version(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file has the key alone: it goes on, or both that may be wrong are named."""
    told = (*SAVE, "optim.max_steps=4")
    run = project.train("run", *told)
    shutil.rmtree(run / "model")
    path = run / "reference.json"
    path.write_text(json.dumps({"key": json.loads(path.read_text())["key"]}) + "\n")
    with monkeypatch.context() as patch:
        patch.setattr("isopref.reference.key.transformers.__version__", "99.1")
        message = project.refused("run", *told, "--resume")
    assert (
        "is a different model than when the run in run began, or transformers has a different version (see run/st"
        in message
    )
    project.train("run", *told, "--resume")
    assert json.loads(path.read_text())["made_of"]["transformers"] == transformers.__version__


def test_weights_are_named(project: Project) -> None:
    told = (*SAVE, "optim.max_steps=4", "model.path=start")
    shutil.copytree(project.model, project.folder / "start")
    run = project.train("run", *told)
    shutil.rmtree(project.folder / "start")
    (run / "model").rename(project.folder / "start")
    message = project.refused("run", *told, "--resume")
    assert (
        "is a different model than when the run in run began: its weights differ. Restore the original one" in message
    )
