"""What makes a GPU fast, and must not change a number: compiled layers, fitted microbatches, steps built ahead."""

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from isopref.batch.packing import Budget
from isopref.batch.rows import build_microbatch
from isopref.data.table import ExampleTable
from isopref.engine.loader import ExampleLoader
from isopref.engine.microbatch_probe import _measure, _peak, fit_microbatch
from isopref.models.parallel import checkpoint_layers, compile_layers
from isopref.models.policy import Policy
from isopref.models.probe import check_layout
from isopref.testing.models import examples, random_pairs, tiny_model

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
WIDE: dict[str, Any] = {"head_dim": 64, "hidden_size": 256, "intermediate_size": 512, "max_position_embeddings": 4096}


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3"])
def test_compiled_layers_score_alike_and_never_compile_again(architecture: str) -> None:
    """An epoch of rows of all lengths, with gradients and without; the first two steps may compile."""
    torch._dynamo.reset()
    plain, compiled = (Policy(tiny_model(architecture, dtype=torch.bfloat16, **WIDE)).to(CUDA) for _ in range(2))
    compile_layers(compiled)
    check_layout(compiled, "shared")
    table = ExampleTable.from_tokens(random_pairs(160, seed=3, longest=150))
    loader = ExampleLoader(
        table, batch_size=16, budget=Budget("shared", 2500), weighting="token", seed=0, work_dir="", pin_memory=True
    )
    loader.reshuffle(epoch=1)
    compiled.train()
    graphs = 0
    for number, batch in enumerate(loader):
        for work in batch["step"].work:
            microbatch = work.to(CUDA).microbatch
            compiled(microbatch).logp.sum().backward()
            with torch.no_grad():
                torch.testing.assert_close(compiled(microbatch).logp, plain(microbatch).logp, rtol=0.02, atol=0.5)
        if number == 1:
            graphs = counters["stats"]["unique_graphs"]
    assert number == 9
    assert counters["stats"]["unique_graphs"] == graphs > 0


def test_the_measured_line_foretells_a_longer_row() -> None:
    """Two short rows say what three times as many tokens take, to a tenth; recomputing every layer takes less."""
    policy = Policy(tiny_model("llama", dtype=torch.bfloat16, num_hidden_layers=8, **WIDE)).to(CUDA)
    table = ExampleTable.from_tokens(random_pairs(300, seed=1, longest=120))
    fits = {
        name: fit_microbatch(policy, table, "shared", grad_sync="last", layers=layers, tokens=None)
        for name, layers in {"none": (0, 0), "full": (8, 8), "auto": (0, 8)}.items()
    }
    assert fits["auto"].layers == 0  # there is room
    assert fits["full"].layers == 8
    for layers in (0, 8):
        line = _measure(policy, table, "shared", "last", layers)
        assert line is not None
        row = build_microbatch([table.example(i) for i in range(len(table))], "shared")
        tokens = row.passes[0].input_ids.shape[1]
        assert tokens > 20000
        assert _peak(policy, row, "last") == pytest.approx(line.at(tokens), rel=0.1)
    assert all(parameter.grad is None for parameter in policy.parameters())


def test_recomputing_layers_take_less_memory() -> None:
    policy = Policy(tiny_model("llama", dtype=torch.bfloat16, num_hidden_layers=8, **WIDE)).to(CUDA).train()
    row = build_microbatch(examples(random_pairs(100, seed=1, longest=120)), "shared")
    peaks = []
    for count in (0, 4, 8):
        checkpoint_layers(policy, count)
        _peak(policy, row, "last")
        peaks.append(_peak(policy, row, "last"))
    assert peaks[0] > peaks[1] > peaks[2]
