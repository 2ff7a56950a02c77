"""On a CUDA device that is too small: steps that run out of memory are cut smaller, and the weights are the same."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file

from isopref.testing import oracle

if TYPE_CHECKING:
    from tests.gpu.conftest import Command, Done

pytestmark = pytest.mark.gpu


def test_a_real_lack_of_memory_changes_no_weight(isopref_train: Command, capsys: pytest.CaptureFixture[str]) -> None:
    def run(name: str, tokens: int) -> Done:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        changes = (f"layout.microbatch_tokens={tokens}", "layout.checkpointing=none", "layout.compile=false")
        return isopref_train(*changes, "optim.batch_pairs=120", "optim.lr=1e-3", name=name, num_hidden_layers=8)

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
