"""Float8 beside bfloat16 in one process: speed, where the time goes, and what another layout changes.

    python benchmarks/float8.py --out float8.json
    python benchmarks/float8.py --smoke               # on a CPU, with float8 emulated

Speed: the complete trainer on the cells of vs_trl.py, bfloat16 and float8 in turn, and the kernels of the last step.
Layouts: the gradient of one batch in several layouts, each compared with the first. In bfloat16 the differences are
rounding, and float8 is judged by them.
"""

import argparse
import gc
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import workload
from clocks import Clock, EngineClock
from profile_step import StepProfile, kernels_of, seconds_by_kind
from ready import Cell, ready_trainer
from torch import Tensor
from vs_trl import CELLS

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


def speed(cell: Cell, *, float8: bool) -> dict[str, Any]:
    """Pairs per second, memory, and seconds of the last step by kind of kernel."""
    started = time.perf_counter()
    cuda = torch.cuda.is_available()
    with ready_trainer(cell, float8=float8) as ready:
        clock, spy = Clock(replace(cell, steps=cell.steps - 1)), StepProfile(cell.warmup + cell.steps)
        ready.trainer.add_callback("clock", EngineClock(clock))
        if cuda:
            torch.cuda.reset_peak_memory_stats()
            ready.trainer.add_callback("profile", spy)
        ready.trainer.fit()
        figures = clock.result()
        first = ready.metrics()[0]
        figures |= {"first_loss": first["train/loss"], "first_margin": first["train/margin"]}
    if cuda:
        kernels = kernels_of(spy.profile)
        figures["kernel_s"] = {kind: round(seconds, 4) for kind, seconds in seconds_by_kind(kernels).most_common()}
        longest = sorted(kernels, key=lambda one: -one.self_device_time_total)[:14]
        figures["longest_ms"] = {one.key[:90]: round(one.self_device_time_total / 1e3, 1) for one in longest}
    return {**figures, "whole_s": time.perf_counter() - started}


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


@contextmanager
def cleared() -> Iterator[None]:
    """Compiled code and memory of one measurement are not met by the next."""
    yield
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="*", choices=CELLS, default=["8b-chat", "8b-lora"])
    parser.add_argument("--steps", type=int, default=3, help="timed steps; one more is profiled")
    parser.add_argument("--out", type=Path, default=Path("float8.json"))
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    cells = ["smoke", "smoke-lora"] if args.smoke else args.cells
    shape = {**workload.SHAPES["tiny" if args.smoke else "1b"], "num_hidden_layers": 4}
    patched: Any = nullcontext()
    if args.smoke:
        patched = mock.patch("isopref.build.hardware.compute_in_float8", partial(compute_in_float8, emulate=True))
    results: dict[str, Any] = {"about": workload.versions(), "layouts": {}, "speed": []}

    def write(what: Any) -> None:
        print(json.dumps(what), flush=True)
        args.out.write_text(json.dumps(results, indent=2) + "\n")

    with patched:
        for float8 in (False, True):
            name = "float8" if float8 else "bfloat16"
            with cleared():
                found = layouts(shape, float8=float8, emulate=args.smoke, pairs=8 if args.smoke else 48)
            results["layouts"][name] = found
            write({name: found})
        for cell in cells:
            for float8 in (False, True):
                with cleared():
                    one = speed(replace(CELLS[cell], dtype="bfloat16", warmup=1, steps=args.steps + 1), float8=float8)
                results["speed"].append({"cell": cell, "system": "float8" if float8 else "bfloat16", **one})
                write(results["speed"][-1])


if __name__ == "__main__":
    main()
