"""isopref and TRL side by side: the same examples in the same global batches, each through its complete trainer.

    python benchmarks/bench.py --only 1b-chat                       # medians of three; the systems take turns
    python benchmarks/vs_trl.py 1b-chat trl --trl-batch 4           # one system once, in another setting
    python benchmarks/vs_trl.py 1b-chat isopref --layout microbatch_tokens=8192

Speed is pairs (comparisons of lists, labelled answers) per second over the timed steps, including optimizer, clipping,
logging and data loading. References count as precomputed; for DPO they are made up (`ready.uniform_logp`), to save
time. TRL gets lists as the pairs they expand to, and its best plain settings: no padding beyond its own, fused AdamW,
precomputed references, no gradient checkpointing, the largest microbatch that runs fast (half of it if memory runs
out). On a GPU it runs the same batches twice, without and with cuDNN attention, and the faster run counts, because
cuDNN builds an execution plan for every new sequence length while the GPU waits. Both systems use expandable segments
(PYTORCH_ALLOC_CONF): otherwise, varying lengths fragment the card's memory (`alloc_retries`).
"""

import argparse
import gc
import json
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import workload
from clocks import Clock, EngineClock
from ready import Cell, emulated_float8, ready_trainer
from transformers import PreTrainedModel
from trl_peer import run_trl

from isopref.models.adapter import quantize_nf4
from isopref.models.flops import UsefulFlops

CELLS = {
    "1b-chat": Cell("1b", "chat", 64, microbatch_tokens=24576, trl_batch=8, warmup=2, steps=5),
    "1b-hh": Cell("1b", "hh", 256, microbatch_tokens=16384, trl_batch=16, warmup=1, steps=4),
    "3b-hh": Cell("3b", "hh", 128, microbatch_tokens=16384, trl_batch=4, warmup=1, steps=4),
    "8b-chat": Cell("8b", "chat", 64, microbatch_tokens=12288, trl_batch=2, warmup=1, steps=3),
    "8b-lora": Cell(
        "8b", "chat", 64, microbatch_tokens=16384, trl_batch=2, warmup=1, steps=3, adapter={"rank": 16, "alpha": 32}
    ),
    "8b-qlora": Cell(  # only for isopref
        "8b", "chat", 64, microbatch_tokens=16384, trl_batch=1, warmup=1, steps=3,
        adapter={"rank": 16, "alpha": 32, "quantize": "nf4"},
    ),
    "1b-lists": Cell(  # four answers per prompt, six comparisons
        "1b", "chat", 16, microbatch_tokens=24576, trl_batch=8, warmup=2, steps=4, answers=4
    ),
    "1b-kto": Cell(  # both answers of a pair, each with its label
        "1b", "hh", 128, microbatch_tokens=16384, trl_batch=32, warmup=1, steps=4, loss="kto"
    ),
    "1b-kto-single": Cell(  # one answer per prompt, so that nothing is shared
        "1b", "hh", 256, microbatch_tokens=16384, trl_batch=32, warmup=1, steps=4, loss="kto", answers=1
    ),
    "1b-reward-chat": Cell(
        "1b", "chat", 64, microbatch_tokens=24576, trl_batch=8, warmup=2, steps=5, loss="bradley_terry"
    ),
    "1b-reward-hh": Cell(
        "1b", "hh", 256, microbatch_tokens=16384, trl_batch=16, warmup=1, steps=4, loss="bradley_terry"
    ),
    "1b-agents": Cell(  # trajectories of about 3,000 tokens that share the first 90%
        "1b", "agents", 32, microbatch_tokens=49152, trl_batch=4, warmup=2, steps=3
    ),
    "1b-agents-16": Cell(  # as measured before 2026-11-19
        "1b", "agents", 16, microbatch_tokens=24576, trl_batch=4, warmup=2, steps=3
    ),
    "olmoe-chat": Cell("olmoe", "chat", 64, microbatch_tokens=16384, trl_batch=8, warmup=2, steps=4),
    "cpu-hh": Cell("135m", "hh", 8, microbatch_tokens=2048, trl_batch=4, dtype="float32", warmup=1, steps=2),
}  # fmt: skip
# isopref-small: microbatches of 8,192 tokens; isopref-mixed: float32 master weights, bfloat16 compute; isopref-float8:
# linear layers multiply in float8; isopref-auto: `auto` chooses the microbatch size and the recomputing layers.
SYSTEMS = ("isopref", "isopref-small", "isopref-mixed", "isopref-float8", "isopref-auto", "trl", "trl-liger")
AUTO = {"microbatch_tokens": "auto", "checkpointing": "auto"}


def tiny_cell(cell: Cell) -> Cell:
    """The cell with a tiny model and batch, which train on a CPU in a second."""
    adapter = None if cell.adapter is None else {**cell.adapter, "rank": 4}
    return replace(
        cell, shape=workload.TINY.get(cell.shape, "tiny"), batch_size=2, microbatch_tokens=8192, trl_batch=2,
        dtype="float32", warmup=1, steps=1, adapter=adapter,
    )  # fmt: skip


def in_four_bits(shape: str, *, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    made = workload.model(shape, dtype=dtype, device=device)
    quantize_nf4(made, device, head=made.get_output_embeddings())
    return made


def run_isopref(cell: Cell, *, mixed: bool, float8: bool, overrides: dict[str, Any]) -> dict[str, Any]:
    make = workload.reward_model if cell.is_reward else in_four_bits if cell.quantised else workload.model
    with ready_trainer(cell, mixed=mixed, float8=float8, layout=overrides, make=make) as ready:
        clock = Clock(cell)
        ready.trainer.add_callback("clock", EngineClock(clock))
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        ready.trainer.fit()
        figures: dict[str, Any] = clock.result()
        timed = workload.in_order(list(range(len(ready.table))))[cell.warmup * cell.batch_size :]
        rate = UsefulFlops(ready.policy)(ready.table.lengths.select(timed)) / cell.steps / figures["step_s"]
        metrics = ready.metrics()
        fill = 1 - sum(one["train/padding_fraction"] for one in metrics) / len(metrics)
        figures |= {"row_fill": fill, "useful_tflops": rate / 1e12, "data_wait": metrics[-1]["speed/data_wait"]}
        figures["microbatch_tokens"] = ready.run.microbatch_tokens
    return figures


def run_peer(cell: Cell, *, liger: bool) -> dict[str, Any]:
    """TRL, halving its microbatch as long as memory runs out."""
    while True:
        try:
            return run_trl(cell, liger=liger)
        except torch.OutOfMemoryError:
            if cell.trl_batch == 1:
                raise
        cell = replace(cell, trl_batch=cell.trl_batch // 2)
        gc.collect()
        torch.cuda.empty_cache()


def measure(
    cell: str, system: str, *, tiny: bool = False, trl_batch: int | None = None, layout: dict[str, Any] | None = None
) -> dict[str, Any]:
    """One system on one cell: speed, memory, and what explains them."""
    chosen = tiny_cell(CELLS[cell]) if tiny else CELLS[cell]
    chosen = replace(chosen, trl_batch=trl_batch or chosen.trl_batch)
    if system.startswith("trl"):
        return run_peer(chosen, liger=system == "trl-liger")
    overrides = {**({"microbatch_tokens": 8192} if system == "isopref-small" else {}), **(layout or {})}
    if system == "isopref-auto":
        overrides = {**AUTO, **overrides}
    float8 = system == "isopref-float8"
    with emulated_float8() if tiny and float8 else nullcontext():
        return run_isopref(chosen, mixed=system == "isopref-mixed", float8=float8, overrides=overrides)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cell", choices=CELLS)
    parser.add_argument("system", choices=SYSTEMS)
    parser.add_argument("--layout", nargs="*", default=[], metavar="FIELD=VALUE", help="overrides of isopref's layout")
    parser.add_argument("--trl-batch", type=int, help="pairs, or labelled answers, per TRL microbatch")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, to try this on a CPU")
    args = parser.parse_args()
    layout = {key: json.loads(value) for key, value in (one.split("=", 1) for one in args.layout)}
    found = measure(args.cell, args.system, tiny=args.tiny, trl_batch=args.trl_batch, layout=layout)
    print(json.dumps({**found, "about": workload.versions()}))


if __name__ == "__main__":
    main()
