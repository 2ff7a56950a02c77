"""On a CUDA device that is too small, for a step or for the model."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from isopref.engine.environment import environment
from isopref.models.parallel import parallelize
from isopref.models.policy import Policy
from isopref.models.probe import check_layout
from isopref.testing import oracle
from isopref.testing.models import tiny_model
from support.cuda import Command, Done

pytestmark = pytest.mark.gpu


def test_a_real_lack_of_memory_changes_no_weight(isopref_train: Command, capsys: pytest.CaptureFixture[str]) -> None:
    def run(name: str, tokens: int) -> Done:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        changes = (f"layout.microbatch_tokens={tokens}", "layout.checkpointing=none", "layout.compile=false")
        return isopref_train(*changes, "optim.batch_size=120", "optim.lr=1e-3", name=name, num_hidden_layers=8)

    whole = run("whole", 20000)
    most = torch.cuda.max_memory_reserved()
    run("small", 2000)
    least = torch.cuda.max_memory_reserved()
    assert least < 0.6 * most
    total = torch.cuda.get_device_properties(0).total_memory
    capsys.readouterr()
    torch.cuda.set_per_process_memory_fraction((0.6 * least + 0.4 * most) / total)
    try:
        short = run("short", 20000)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert "ran out of memory with microbatches of 20000 tokens" in capsys.readouterr().out
    assert json.loads((short.folder / "microbatch.json").read_text())["fits"]["tokens"] < 20000
    expected, found = (load_file(one.folder / "model" / "model.safetensors") for one in (whole, short))
    assert oracle.relative_error(found, expected) < 1e-4


START_AGAIN = """
import os, torch
from isopref.cli.launch import start_again

free, _ = torch.cuda.mem_get_info()
if "FREE" not in os.environ:
    held = torch.empty(16 << 30, dtype=torch.uint8, device="cuda")
    start_again({**os.environ, "FREE": str(free)})
print("lost", int(os.environ["FREE"]) - free)
"""


def test_a_process_that_starts_again_holds_nothing_of_before() -> None:
    done = subprocess.run([sys.executable, "-c", START_AGAIN], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) < 4 << 30  # other tests may hold some


@pytest.mark.parametrize("narrow", [False, True], ids=["wide", "narrow"])
def test_an_offloaded_model_is_never_whole_on_the_device(narrow: bool) -> None:
    dtype = torch.bfloat16 if narrow else torch.float32
    shape = {"num_hidden_layers": 12, "hidden_size": 512, "intermediate_size": 2048}
    policy = Policy(tiny_model("llama", dtype=dtype, **shape), narrow=narrow)
    whole = 4 * sum(parameter.numel() for parameter in policy.parameters())
    with environment(device="cuda", seed=0, process_group=True) as env:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model = parallelize(policy, "fsdp", device=env.device, world_size=1, offload=True)
        check_layout(model, "shared")
        most = torch.cuda.max_memory_allocated() - before
    assert {(weight.dtype, weight.device.type) for weight in policy.parameters()} == {(torch.float32, "cpu")}
    assert most < 0.5 * whole
