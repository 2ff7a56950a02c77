"""Measures the matrix and writes the page about it: `python -m isopref.testing.exactness_page docs/exactness.md`."""

import os
import sys
from pathlib import Path

from isopref.testing.cells import Cell
from isopref.testing.exactness import Found, measure
from isopref.testing.matrix import BOUNDS, SPREADS, bound, cells, precision, value_bound
from isopref.testing.ranks import Ranks

CHUNK = 40  # cells a rank measures before it answers


def run(ranks: int, parallel: str, group: Ranks | None = None) -> dict[Cell, Found]:
    """Measure the cells of so many ranks and one parallel mode, on the ranks given or in this process.

    Raises RankError, also where a rank crashes.
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
    """The line of the table that a cell counts in: precision, model, ranks and parallel mode."""
    name = f"{cell.architecture} in OLMo-core" if cell.native else cell.architecture
    mode = f"{cell.parallel} x tensor {cell.tensor_parallel}" if cell.tensor_parallel > 1 else cell.parallel
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

The global batch defines the math; the layout never changes it. This page is that promise, measured. It is written by
`make exactness`; do not edit it.

One global batch of eight pairs (three for the short batch) goes through the train module {count} times: packed rows
with and without a shared prompt, padded batches in one forward and in two; cut into single pairs, by tokens, not at
all; a batch of examples with one to eight answers likewise, nested beginnings and prompts in common included; on 1, 2
and 4 ranks under DDP, FSDP2 and HSDP; split evenly, three pairs against the rest, with an idle rank; gradients reduced
at the end or after every microbatch; shards on the device or offloaded; activations kept or recomputed,
those of recomputing layers on the device or in host memory; MLPs computed for a row at once or in tiles; pairs in order
and in reverse; answers with turns of context that are not trained, and with turns of any weight; weighted by token,
completion, example and the gap between scores, with and without weights of their own; every objective in some of these
layouts, also those that couple a batch; reward models in all kinds of rows; the likelihood of chosen answers and the
balance of experts added; LD-DPO's and WPO's weights; all weights trained, or an adapter (LoRA, DoRA, rsLoRA) on a model
that is whole or in four bits; products of linear layers in float8, emulated; models with attention sinks, state-space
layers, linear attention or short convolutions; some models in OLMo-core's own modules too, and with two ranks that
compute every layer together; padded batches from a script's collator. The oracle computes one sequence at a time with
the model's own forward pass, takes each objective from its paper's equation once more, and sums by the definition.

Each figure is the largest error in its group: of the gradient, ||g - oracle|| / ||oracle|| over all parameters; of the
loss, relative; of the metrics, relative to the larger of 1 and the value. Rows *float32 inside* are models in float64
whose norms and rotary embeddings compute in float32, so that a rounding there can flip. Rows *float8 products* compute
their linear layers in float8 and all else in float32, in the oracle too: a rounding there can flip one of a sixteenth
in the next product, and the gradient of a shared prompt is rounded once, where separate sequences round it once each.

The bound of *float32* is a matter of rounding and of this batch. Of 13 other random batches with answers as long, in
43 float32 cells on one rank, 6 exceeded 1e-5 somewhere and 2 reached it, the worst at 1.9e-5. The oracle in float32 is
itself off by 2e-5 nats in an answer of 200. The 6 in float64, with five models: at most 7.5e-8 for gradients and
3.5e-14 for metrics.

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
        if not (  # also for NaN
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
