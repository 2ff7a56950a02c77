"""The example script runs as it is, each example config for two steps on a tiny model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from transformers import AutoModelForCausalLM

from isopref.testing.models import tiny_folder

if TYPE_CHECKING:
    from tests.e2e.conftest import Project

EXAMPLES = Path(__file__).parents[2] / "examples"
CONFIGS = sorted(
    path.name for path in EXAMPLES.glob("*.yaml") if path.name != "pytorchjob.yaml"
)  # a cluster's, not ours


def test_every_example_is_there() -> None:
    assert CONFIGS == ["full.yaml", "lora.yaml", "mixing.yaml", "qlora.yaml", "simpo.yaml"]


@pytest.mark.parametrize("name", CONFIGS)
def test_config(project: Project, name: str) -> None:
    """As the file says, but for the model, the number of steps and what is shown at the end; on the demo's pairs."""
    (project.folder / "examples").symlink_to(EXAMPLES)
    tiny_folder(project.folder / "tiny", max_position_embeddings=1024)  # the longest pairs have 500 bytes
    changes = ["model.path=tiny", "optim.max_steps=2", "optim.batch_pairs=8", "run.sample_tokens=2"]
    outcome = project.isopref("train", f"examples/{name}", *changes, "run.folder=run", "run.device=cpu")
    assert outcome.code == 0, outcome.err
    assert "step 2/2 " in outcome.out
    exported = {path.name for path in (project.folder / "run" / "model").iterdir()}
    assert ("adapter_model.safetensors" in exported) == (name in ("lora.yaml", "qlora.yaml"))


@pytest.mark.parametrize("processes", [1, 2])
def test_olmo_core_trainer(tmp_path: Path, processes: int) -> None:
    model = tiny_folder(tmp_path / "model")
    script = [str(EXAMPLES / "olmo_core_trainer.py"), str(model), str(tmp_path / "out")]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"] if processes == 2 else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, *launcher, *script], capture_output=True, text=True, timeout=240, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    # 20 pairs in batches of 6, twice: four steps an epoch, the last of two pairs
    assert (tmp_path / "out" / "step8" / ".metadata.json").exists()
    for step in range(1, 9):
        # of 8; but OLMo-core counts them in another thread, amid a step, where it may find another number
        said = re.search(rf"\[step={step}/\d+,.*\n((?:    .*\n)+)", done.stdout)
        assert said, step
        assert {"train/loss", "train/accuracy", "train/margin"} <= {
            line.split("=")[0].strip() for line in said[1].splitlines()
        }
    before, after = (AutoModelForCausalLM.from_pretrained(one) for one in (model, tmp_path / "out" / "model"))
    assert type(after) is type(before)
    assert after.config._attn_implementation == before.config._attn_implementation
    assert not all(map(torch.equal, before.parameters(), after.parameters()))
