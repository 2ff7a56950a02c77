"""How much the layout matters in float8 and in bfloat16: gradients of one batch, compared with the first layout's.

    python benchmarks/bench.py --only float8-layouts
    python benchmarks/bench.py --only 8b-chat-float8 8b-lora-float8     # speed
    python benchmarks/profile_step.py --cell 8b-chat --float8           # where the time of a step goes

In bfloat16 the differences are rounding; they are the yardstick for those in float8.
"""

from contextlib import nullcontext
from typing import Any
from unittest import mock

import numpy as np
import torch
import workload
from torch import Tensor

from isopref.batch.packing import Budget, RowKind, plan_step
from isopref.batch.step import build_step
from isopref.data.table import ExampleTable
from isopref.engine.train_module import DPOTrainModule
from isopref.models.float8 import compute_in_float8
from isopref.models.parallel import compile_layers
from isopref.models.policy import Policy
from isopref.score import TableLogps
from isopref.testing.exactness import StubTrainer, full_gradient
from isopref.testing.expected import pair_objective

LAYOUTS: tuple[tuple[RowKind, int], ...] = (("shared", 24576), ("shared", 4096), ("packed", 24576), ("padded", 24576))


def measure(precision: str, *, tiny: bool = False) -> dict[str, Any]:
    """Relative differences by layout; four layers of the 1B shape."""
    shape = {**workload.SHAPES["tiny" if tiny else "1b"], "num_hidden_layers": 2 if tiny else 4}
    float8 = precision == "float8"
    return {"layouts": layouts(shape, float8=float8, emulate=tiny, pairs=2 if tiny else 48)}


def layouts(shape: dict[str, Any], *, float8: bool, emulate: bool, pairs: int) -> dict[str, Any]:
    """Relative differences of gradients and log-probabilities between layouts of one batch."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with mock.patch.dict(workload.SHAPES, {"layouts": shape}):
        model = workload.model("layouts", dtype=torch.bfloat16, device=device)
    table = ExampleTable.from_tokens(workload.examples("chat", pairs, answers=2, vocabulary=model.config.vocab_size))
    if float8:
        compute_in_float8(model, emulate=emulate)
    policy = Policy(model)
    if device.type == "cuda":
        compile_layers(policy)
    reference = TableLogps(torch.full((len(table.lengths.answer),), -5000.0))
    module = DPOTrainModule(
        policy,
        torch.optim.SGD(policy.parameters(), lr=0.0),
        objective=pair_objective("sigmoid"),
        reference=reference,
        weighting="token",
        check_first_step=False,
    )
    found: dict[str, tuple[dict[str, Tensor], float]] = {}
    for rows, tokens in LAYOUTS:
        module._attach_trainer(trainer := StubTrainer())  # type: ignore[arg-type]
        index = np.arange(len(table))
        plan = plan_step(table.lengths, Budget(rows, tokens), num_ranks=1)
        eager = torch.compiler.set_stance("force_eager") if rows == "padded" else nullcontext()
        with eager:
            module.train_batch({"step": build_step(table, index, plan, rows, "token", rank=0)})
        gradient = {name: one.float().clone() for name, one in full_gradient(policy).items()}
        found[f"{rows} {tokens}"] = (gradient, trainer.metrics["train/logps_chosen"])
        module.zero_grads()
    first, logp = next(iter(found.values()))
    size = _norm(first)
    return {
        name: {"gradient": _norm(_minus(one, first)) / size, "logp": abs(value / logp - 1)}
        for name, (one, value) in list(found.items())[1:]
    }


def _norm(gradient: dict[str, Tensor]) -> float:
    return float(torch.stack([one.double().square().sum() for one in gradient.values()]).sum().sqrt())


def _minus(a: dict[str, Tensor], b: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: a[name] - b[name] for name in a}
