"""Predictions of `isopref plan` next to measurements by `vs_trl.py` and `longest.py`.

python benchmarks/plan_check.py [results.json ...]     # default: the files behind RESULTS.md
"""

import argparse
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import longest
import torch
import workload
from largest import frozen_bytes
from ready import Cell
from vs_trl import CELLS

from isopref.batch.packing import Budget
from isopref.build import resolve
from isopref.build.model import new_adapter
from isopref.build.planner import first_pass
from isopref.cards import CARDS, GIB
from isopref.config.values import AdapterConfig
from isopref.data.schedule import batch, epoch_order
from isopref.examples import Lengths
from isopref.models.adapter import add_adapter
from isopref.models.shape import ModelShape, shape_of
from isopref.objectives.loss import pair_loss
from isopref.ops.attention import Kernel
from isopref.plan.layout import ONE_GPU, Layout
from isopref.plan.network import Network
from isopref.plan.scale import forecast

FOLDER = Path(__file__).parent
MEASURED = [FOLDER / f"measured{name}.json" for name in ("", "_tasks", "_agents", "_float8", "_models", "_long")]
OURS = ("isopref", "isopref-small", "isopref-mixed", "isopref-torch", "isopref-float8")
SMALL_TOKENS = 8192
MIXED: dict[str, Any] = {"parallel": "fsdp", "weight_bytes": 4, "state_bytes": 8}


@dataclass(frozen=True)
class Comparison:
    """One measurement and its prediction."""

    cell: str
    system: str
    unit: str
    measured_per_s: float | None  # None if only memory was measured
    predicted_per_s: float
    measured_gib: float
    predicted_gib: float

    @property
    def speed_error(self) -> float | None:
        return None if self.measured_per_s is None else self.predicted_per_s / self.measured_per_s - 1

    @property
    def memory_error(self) -> float:
        return self.predicted_gib / self.measured_gib - 1


def shape_of_cell(cell: Cell) -> ModelShape:
    make = workload.reward_model if cell.is_reward else workload.model
    with torch.device("meta"):
        model = make(cell.shape, dtype=torch.bfloat16, device=torch.device("meta"))
        if cell.adapter is not None:
            add_adapter(model, new_adapter(AdapterConfig(**cell.adapter)), dtype=torch.bfloat16, seed=0)
        return shape_of(model)


def layout_of(cell: Cell, shape: ModelShape, system: str, lengths: Lengths) -> Layout:
    """The layout that a system ran in: bfloat16 with flash-attn-4, unless its name says otherwise."""
    layout = replace(ONE_GPU, **(MIXED if system == "isopref-mixed" else {}), float8=system == "isopref-float8")
    forwards = first_pass(pair_loss(cell.loss), lengths, layout.rows)
    kernel: Kernel = "varlen_attn" if system == "isopref-torch" else "flash-attn-4"
    frozen = frozen_bytes(shape, quantised=cell.quantised)
    return replace(layout, kernel=kernel, forwards=forwards, quantised=cell.quantised, frozen_bytes=frozen)


def compare(result: dict[str, Any]) -> Comparison:
    """Predict one result: speed over its timed steps, memory over all steps, the first without optimizer state."""
    cell, system = CELLS[result["cell"]], result["system"]
    shape = shape_of_cell(cell)
    lengths = Lengths.of(cell.examples(1000))
    order = epoch_order(len(lengths), seed=0, epoch=1)
    batches = [lengths.select(batch(order, cell.batch_size, n)) for n in range(cell.warmup + cell.steps)]
    profiled = 1 if result.get("profiled") else 0  # the last step was profiled, not timed
    tokens = SMALL_TOKENS if system == "isopref-small" else cell.microbatch_tokens
    card = CARDS["H200"]
    first, later, timed = (
        forecast(
            shape,
            layout_of(cell, shape, system, lengths),
            card,
            Network.of(card),
            some,
            Budget("shared", tokens),
            answers=len(lengths.answer),
            attention_share=resolve.attention_share(shape.width),
        )
        for some in (batches[:1], batches[1:], batches[cell.warmup : len(batches) - profiled])
    )
    return Comparison(
        result["cell"],
        system,
        cell.unit,
        result[cell.speed],
        cell.terms_per_step / timed.time.total,
        result["peak_memory_gib"],
        max(first.memory.total - first.memory.optimizer, later.memory.total) / GIB,
    )


def compare_long(result: dict[str, Any]) -> Comparison:
    """Predict a result of longest.py: steps of one microbatch, of which the first compiles and is not compared."""
    kind, trial = longest.KINDS[result["kind"]], longest.Trial.of(result["trial"])
    with torch.device("meta"):
        model = longest.model(kind, trial, torch.device("meta"))
        if kind.adapter is not None:
            add_adapter(model, new_adapter(AdapterConfig(**kind.adapter)), dtype=torch.bfloat16, seed=0)
        shape = shape_of(model)
    every = shape.layers
    chosen = " ".join(result["auto"])  # what a run says that `auto` chose
    recompute = every if trial.checkpointing == "full" else int(_found(r"checkpointing: auto is (\d+)", chosen))
    offloaded = (
        every - 1 if trial.offload == "full" else int(_found(r"offload_activations: auto is (\d+)", chosen, "0"))
    )
    layout = replace(ONE_GPU, kernel="flash-attn-4", recompute=recompute, offloaded=offloaded)
    card, lengths = CARDS["H200"], Lengths.of(trial.examples(1000)[:1])
    found = forecast(
        shape,
        layout,
        card,
        Network.of(card),
        [lengths],
        Budget("shared", trial.tokens),
        answers=0,
        attention_share=resolve.attention_share(shape.width),
    )
    timed = len(result["steps_s"]) > 1
    return Comparison(
        f"{trial.tokens:,} tokens, {recompute} layers recompute" + (f", {offloaded} offload" if offloaded else ""),
        result["kind"],
        "pairs",
        1 / result["step_s"] if timed else None,
        found.examples_per_s,
        result["peak_memory_gib"],
        found.memory.total / GIB,
    )


def _found(pattern: str, text: str, default: str | None = None) -> str:
    match = re.search(pattern, text)
    assert match is not None or default is not None, (pattern, text)
    return match[1] if match else str(default)


def comparisons(*files: Path) -> Iterator[Comparison]:
    """Comparisons for all of isopref's results in files written by bench.py that say how they were computed.

    A result that two files quote is compared once.
    """
    done = []
    for one in (one for file in files for one in json.loads(file.read_text())["results"]):
        same = one.get("cell"), one.get("system"), one.get("steps_s")
        if one.get("system") in OURS and same not in done:
            done.append(same)
            yield compare(one)
        elif "auto" in one:
            yield compare_long(one)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="*", type=Path, default=MEASURED)
    print("| | per second | predicted | | GiB | predicted | |")
    print("|---|---|---|---|---|---|---|")
    for one in comparisons(*parser.parse_args().results):
        speed = " | | "
        if one.measured_per_s is not None and one.speed_error is not None:
            digits = 1 if one.measured_per_s > 1 else 4
            measured, predicted = (f"{value:.{digits}f}" for value in (one.measured_per_s, one.predicted_per_s))
            speed = f"{measured} {one.unit} | {predicted} | {one.speed_error:+.1%}"
        print(
            f"| {one.cell}, {one.system} | {speed} | {one.measured_gib:.1f} | {one.predicted_gib:.1f} | "
            f"{one.memory_error:+.1%} |"
        )


if __name__ == "__main__":
    main()
