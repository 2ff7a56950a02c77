"""The whole command on the demo's pairs, as tests on a GPU share it."""

import json
from pathlib import Path
from typing import Any

import pytest

from isopref.build.train import train
from isopref.config.load import load_config
from isopref.demo import write
from isopref.testing.models import tiny_folder
from support.cuda import Command, Done

SHAPE: dict[str, Any] = {"head_dim": 64, "hidden_size": 256, "intermediate_size": 512, "max_position_embeddings": 4096}


@pytest.fixture
def isopref_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """`isopref train` with changes of the config, and of the tiny model's shape."""
    monkeypatch.setenv("ISOPREF_CACHE", str(tmp_path / "cache"))
    write(tmp_path / "data")

    def run(*changes: str, name: str = "run", **shape: Any) -> Done:
        model = tiny_folder(tmp_path / f"{name}-model", **{**SHAPE, **shape})
        config = tmp_path / f"{name}.yaml"
        config.write_text(
            f"model: {{path: {model}}}\n"
            f"data: {{train: {tmp_path}/data/train.jsonl, eval: {tmp_path}/data/eval.jsonl}}\n"
            "optim: {lr: 3e-3, batch_size: 32}\n"
            f"run: {{folder: {tmp_path / name}, device: cuda, samples: 0}}\n"
        )
        train(load_config(config, changes), name=name)
        result = json.loads((tmp_path / name / "evaluation.json").read_text())
        return Done(tmp_path / name, *(result[when]["accuracy"]["value"] for when in ("before", "after")))

    return run
