"""The example scripts run as they are, each example config for two steps on a tiny model."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from isopref.testing.models import tiny_folder
from support.project import Project

EXAMPLES = Path(__file__).parents[2] / "examples"
CONFIGS = sorted(
    path.name for path in EXAMPLES.glob("*.yaml") if path.name != "pytorchjob.yaml"
)  # a cluster's, not ours


def test_every_example_is_there() -> None:
    names = "full kto lists lora mixing qlora reward simpo"
    assert [f"{name}.yaml" for name in names.split()] == CONFIGS


@pytest.mark.parametrize("name", CONFIGS)
def test_config(project: Project, name: str) -> None:
    """As the file says, but for the model, the number of steps and what is shown at the end; on the demo's pairs."""
    (project.folder / "examples").symlink_to(EXAMPLES)
    tiny_folder(project.folder / "tiny", max_position_embeddings=1024)  # the longest pairs have 500 bytes
    changes = ["model.path=tiny", "optim.max_steps=2", "optim.batch_size=4"]
    outcome = project.isopref("train", f"examples/{name}", *changes, "run.folder=run", "run.device=cpu")
    assert outcome.code == 0, outcome.err
    assert "step 2/2 " in outcome.out
    exported = {path.name for path in (project.folder / "run" / "model").iterdir()}
    assert ("adapter_model.safetensors" in exported) == (name in ("lora.yaml", "qlora.yaml"))


def run_script(processes: int, name: str, *arguments: str) -> str:
    """Run an example script on one process or on two. Returns what it logged."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"] if processes == 2 else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, *launcher, str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def metrics(log: str, step: int) -> dict[str, float]:
    """The metrics that a script logged for a step."""
    # The number of steps follows; but OLMo-core counts them in another thread, amid a step, where it may find another.
    said = re.search(rf"\[step={step}/\d+,.*\n((?:    .*\n)+)", log)
    assert said, step
    return {name.strip(): float(value) for name, _, value in (line.partition("=") for line in said[1].splitlines())}


def check_exported(before: Path, after: Path) -> None:
    """The model in `after` is the one in `before`, trained."""
    old, new = (AutoModelForCausalLM.from_pretrained(one) for one in (before, after))
    assert type(new) is type(old)
    assert new.config._attn_implementation == old.config._attn_implementation
    assert not all(map(torch.equal, old.parameters(), new.parameters()))


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_olmo_core_trainer(tmp_path: Path, processes: int) -> None:
    model = tiny_folder(tmp_path / "model")
    log = run_script(processes, "olmo_core_trainer.py", str(model), str(tmp_path / "out"))
    # 20 pairs in batches of 6, twice: four steps an epoch, the last of two pairs
    assert (tmp_path / "out" / "step8" / ".metadata.json").exists()
    for step in range(1, 9):
        assert {"train/loss", "train/accuracy", "train/margin"} <= metrics(log, step).keys()
    check_exported(model, tmp_path / "out" / "model")


def test_olmo_core_packed(tmp_path: Path) -> None:
    """The same figures on one process and on two, whatever a microbatch holds."""
    model, pairs = tiny_folder(tmp_path / "model"), tmp_path / "pairs.jsonl"
    pairs.write_text("".join(json.dumps(pair) + "\n" for pair in preference_pairs(20)))
    logs = []
    for processes, tokens in ((1, 8192), (2, 300)):
        folder = tmp_path / f"out{processes}"
        size = ["--microbatch-tokens", str(tokens)]
        logs.append(run_script(processes, "olmo_core_packed.py", str(model), str(pairs), str(folder), *size))
        check_exported(model, folder / "model")
    for step in range(1, 7):  # 20 pairs in batches of 8, twice: three steps an epoch, the last of four pairs
        one, two = (metrics(log, step) for log in logs)
        assert one["train/pair_count"] == two["train/pair_count"] == (4 if step % 3 == 0 else 8)
        for name in ("train/loss", "train/margin", "train/nll", "optim/grad_norm"):
            assert one[name] == pytest.approx(two[name], rel=1e-3, abs=1e-3), (step, name)


def preference_pairs(count: int) -> list[dict[str, str]]:
    return [
        {"prompt": f"What is {n} plus {n}?", "chosen": f"{2 * n}.", "rejected": "I would rather not say." + n * "!"}
        for n in range(count)
    ]
