"""Measures the matrix and writes the page about it: `python -m isopref.testing.exactness_page docs/exactness.md`."""

import os
import sys
from pathlib import Path

from isopref.testing.cells import Cell
from isopref.testing.exactness import Found, measure
from isopref.testing.matrix import BOUNDS, SPREADS, bound, cells, precision, value_bound
from isopref.testing.ranks import Ranks

CHUNK = 40  # cells that a rank measures before it returns results


def run(ranks: int, parallel: str, group: Ranks | None = None) -> dict[Cell, Found]:
    """Measure the cells for `ranks` ranks and one parallel mode, on the ranks of `group` or in this process.

    Raises RankError, also if a rank crashes.
    """
    wanted = [cell for cell in cells(ranks) if cell.parallel == parallel]
    found: list[Found] = []
    for start in range(0, len(wanted), CHUNK):
        some = wanted[start : start + CHUNK]
        found += _measure_all(some) if group is None else group(_measure_all, some)[0]
    return dict(zip(wanted, found, strict=True))


def _measure_all(wanted: list[Cell]) -> list[Found]:
    return [measure(cell) for cell in wanted]


def group(cell: Cell) -> tuple[str, str, int, str]:
    """The row of the table to which a cell belongs: precision, model, ranks and parallel mode."""
    name = f"{cell.architecture} in OLMo-core" if cell.native else cell.architecture
    mode = f"{cell.parallel} x tensor {cell.tensor_parallel}" if cell.tensor_parallel > 1 else cell.parallel
    mode = f"{mode} x context" if cell.context_parallel > 1 else mode
    return precision(cell), name, cell.ranks, mode


def table(found: dict[Cell, Found]) -> str:
    """Markdown: the largest errors by precision, architecture, ranks and parallel mode."""
    groups: dict[tuple[str, str, int, str], list[Found]] = {}
    for cell, result in found.items():
        groups.setdefault(group(cell), []).append(result)
    lines = [
        "| computes in | model | ranks | parallel | runs | gradient | loss | metrics | bound |",
        "|---|---|---:|---|---:|---:|---:|---:|---:|",
    ]
    for (kind, name, ranks, mode), results in sorted(groups.items(), key=lambda item: _order(item[0])):
        worst = (max(getattr(r, error) for r in results) for error in ("gradient_error", "loss_error", "metric_error"))
        errors = " | ".join(f"{value:.1e}" for value in worst)
        lines.append(f"| {kind} | {name} | {ranks} | {mode} | {len(results)} | {errors} | {BOUNDS[kind]:.0e} |")
    return "\n".join(lines)


def _order(key: tuple[str, str, int, str]) -> tuple[int, str, int, str]:
    return (list(BOUNDS).index(key[0]), *key[1:])


PAGE = """# Exactness

isopref promises that the layout of a global batch never changes its loss, gradient and metrics. This page measures how
closely they agree. `make exactness` generates it; do not edit it.

One global batch of eight pairs (three for the short batch) goes through the train module {count} times. These runs
cover:

- **Rows**: packed with and without a shared prompt, padded in one forward pass and in two, and padded batches from a
  script's collator; microbatches of single pairs, limited by tokens, or the whole batch; pairs in order and reversed.
- **Examples** with one to eight answers, including nested prefixes and common prompts; answers with context turns that
  are not trained, and with turns of any weight.
- **Ranks**: 1, 2 and 4, with DDP, FSDP2 and HSDP; work split evenly, three pairs against the rest, or with an idle
  rank; gradients reduced once per step or after every microbatch; shards on the device or offloaded; the tokens of
  every row split over two or four of the ranks (*x context*).
- **Memory**: activations kept, recomputed, or recomputed with the inputs of layers in host memory; MLPs computed for a
  row at once or in tiles.
- **Objectives**: every objective in some of these layouts, including those that couple a batch; weighting by token,
  completion, example and score gap, with and without weights per pair; the likelihood of chosen answers and the balance
  of experts as extra terms; the weights of LD-DPO and WPO; reward models in all kinds of rows.
- **Models**: all weights trained, or an adapter (LoRA, DoRA, rsLoRA) on a full-precision or 4-bit model; linear layers
  in emulated float8; attention sinks, state-space layers, linear attention and short convolutions; some models also in
  OLMo-core's own modules, and with tensor parallelism over two ranks.

Each run is compared with an oracle, a slow and independent implementation. It computes one sequence at a time with the
model's own forward pass, implements each objective from the equation in its paper, and sums as the definition says.

Each figure is the largest error in its group: for the gradient, ||g - oracle|| / ||oracle|| over all parameters; for
the loss, the relative error; for the metrics, the error relative to the larger of 1 and the value. *float32 inside*
marks float64 models whose norms and rotary embeddings compute in float32, where a value can be rounded differently.
*float8 products* marks models that compute their linear layers in float8 and everything else in float32, in the oracle
too. There, a different rounding can change the input of the next product by a sixteenth, and the gradient of a shared
prompt is rounded once, but once per sequence if sequences are separate.

The bound for *float32* holds for this batch, not for every batch. Of 13 other random batches with answers of the same
length, in 43 float32 cells on one rank, 6 exceeded 1e-5 somewhere and 2 reached it; the worst was 1.9e-5. The float32
oracle itself is off by 2e-5 nats in an answer of 200. In float64, those 6 batches are off by at most 7.5e-8 in the
gradient and 3.5e-14 in the metrics, with five models.

{table}

Measured with torch {torch}, transformers {transformers}, tiny models with random weights, gloo ranks on one CPU.
"""


def main() -> None:
    import torch
    import transformers

    found = run(1, "single")
    for ranks in (2, 4):
        with Ranks(ranks) as group:
            for parallel in SPREADS[ranks]:
                found |= run(ranks, parallel, group)
    page = PAGE.format(
        count=len(found), table=table(found), torch=torch.__version__, transformers=transformers.__version__
    )
    Path(sys.argv[1]).write_text(page, encoding="utf-8")
    over = [
        f"{cell}: {one.gradient_error:.1e}, {one.loss_error:.1e}, {one.metric_error:.1e}"
        for cell, one in found.items()
        if not (  # written so that NaN fails, too
            one.gradient_error <= bound(cell)
            and one.loss_error <= value_bound(cell)
            and one.metric_error <= value_bound(cell)
        )
    ]
    if over:
        sys.exit("over the bound:\n" + "\n".join(over))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
