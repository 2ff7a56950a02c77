"""What `isopref plan` predicts beside what `vs_trl.py` measured.

python benchmarks/plan_check.py [results.json]     # without a file: measured.json, the figures of RESULTS.md
"""

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import workload
from transformers import LlamaConfig, LlamaForCausalLM
from vs_trl import CELLS

from isopref.batch.packing import Budget
from isopref.build import resolve
from isopref.build.model import new_adapter
from isopref.cards import CARDS, GIB
from isopref.config.values import AdapterConfig
from isopref.data.schedule import batch, epoch_order
from isopref.examples import Lengths
from isopref.models.adapter import add_adapter
from isopref.models.shape import shape_of
from isopref.plan.layout import ONE_GPU
from isopref.plan.network import Network
from isopref.plan.scale import forecast

MEASURED = Path(__file__).with_name("measured.json")
SMALL_TOKENS = 8192


@dataclass(frozen=True)
class Comparison:
    """One measurement and its prediction."""

    cell: str
    system: str
    measured_pairs_per_s: float
    predicted_pairs_per_s: float
    measured_gib: float
    predicted_gib: float

    @property
    def speed_error(self) -> float:
        return self.predicted_pairs_per_s / self.measured_pairs_per_s - 1

    @property
    def memory_error(self) -> float:
        return self.predicted_gib / self.measured_gib - 1


def compare(result: dict[str, Any]) -> Comparison:
    """Predict one of vs_trl.py's results, over the steps that it timed; memory over all its steps."""
    cell, mixed = CELLS[result["cell"]], result["system"] == "isopref-mixed"
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(LlamaConfig(**workload.SHAPES[cell.shape]))
        if cell.adapter is not None:
            add_adapter(model, new_adapter(AdapterConfig(**cell.adapter)), dtype=torch.bfloat16, seed=0)
        shape = shape_of(model)
    layout = replace(ONE_GPU, parallel="fsdp", weight_bytes=4, state_bytes=8) if mixed else ONE_GPU
    lengths = Lengths.of_pairs(workload.lengths(cell.data, (cell.warmup + cell.steps) * cell.batch_size))
    order = epoch_order(len(lengths), seed=0, epoch=1)
    batches = [lengths.select(batch(order, cell.batch_size, n)) for n in range(cell.warmup + cell.steps)]
    tokens = SMALL_TOKENS if result["system"] == "isopref-small" else cell.microbatch_tokens
    card = CARDS["H200"]
    whole, timed = (
        forecast(
            shape,
            layout,
            card,
            Network.of(card),
            some,
            Budget("shared", tokens),
            answers=len(lengths.answer),
            attention_share=resolve.attention_share(shape.width),
        )
        for some in (batches, batches[cell.warmup :])
    )
    return Comparison(
        result["cell"],
        result["system"],
        result["pairs_per_s"],
        timed.examples_per_s,
        result["peak_memory_gib"],
        whole.memory.total / GIB,
    )


def comparisons(file: Path) -> list[Comparison]:
    """Every result of isopref in a file that vs_trl.py wrote."""
    results = json.loads(file.read_text())["results"]
    return [compare(one) for one in results if one["system"].startswith("isopref") and "error" not in one]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="?", type=Path, default=MEASURED)
    print("| | pairs/s | predicted | | GiB | predicted | |")
    print("|---|---|---|---|---|---|---|")
    for one in comparisons(parser.parse_args().results):
        print(
            f"| {one.cell}, {one.system} | {one.measured_pairs_per_s:.1f} | {one.predicted_pairs_per_s:.1f} | "
            f"{one.speed_error:+.1%} | {one.measured_gib:.1f} | {one.predicted_gib:.1f} | {one.memory_error:+.1%} |"
        )


if __name__ == "__main__":
    main()
