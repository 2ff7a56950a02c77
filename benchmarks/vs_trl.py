"""isopref and TRL side by side: the same examples in the same global batches, both through their complete trainers.

    python benchmarks/vs_trl.py --out results.json                     # every cell of the table
    python benchmarks/vs_trl.py --cells 1b-chat --systems isopref trl  # some of it
    python benchmarks/vs_trl.py --repeat 3                             # medians of three, systems in turn

Every measurement is a process of its own. Speed is pairs (comparisons of lists, labelled answers) per second over the
timed steps, including optimizer, clipping, logging and data loading; references are computed beforehand. TRL gets lists
as the pairs they expand to, and its best plain settings: no padding beyond its own, fused AdamW, precomputed
references, no gradient checkpointing, the largest microbatch that runs fast (--trl-batch tries another). On a GPU it
runs the same batches twice, without and with cuDNN attention, and the faster run counts: cuDNN builds an execution plan
for every new sequence length, and the GPU waits meanwhile. Both systems use expandable segments (PYTORCH_ALLOC_CONF):
with varying lengths, torch's allocator otherwise fragments the card's memory (`alloc_retries`).
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import workload
from clocks import Clock, EngineClock
from ready import Cell, ready_trainer
from transformers import PreTrainedModel
from trl_peer import run_trl

from isopref.models.adapter import quantize_nf4
from isopref.models.flops import UsefulFlops

MATRIX_FLOPS = 790e12  # bfloat16 product of 8192 x 8192 matrices, as measured on an H200
SMOKE = Cell("tiny", "hh", 8, microbatch_tokens=4096, trl_batch=2, dtype="float32", warmup=1, steps=2)  # on a CPU

CELLS = {
    "1b-chat": Cell("1b", "chat", 64, microbatch_tokens=24576, trl_batch=8, warmup=2, steps=5),
    "1b-hh": Cell("1b", "hh", 256, microbatch_tokens=16384, trl_batch=16, warmup=1, steps=4),
    "3b-hh": Cell("3b", "hh", 128, microbatch_tokens=16384, trl_batch=4, warmup=1, steps=4),
    "8b-chat": Cell("8b", "chat", 64, microbatch_tokens=12288, trl_batch=2, warmup=1, steps=3),
    "8b-lora": Cell(
        "8b", "chat", 64, microbatch_tokens=16384, trl_batch=2, warmup=1, steps=3, adapter={"rank": 16, "alpha": 32}
    ),
    "8b-qlora": Cell(  # isopref alone
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
        "1b", "agents", 16, microbatch_tokens=24576, trl_batch=4, warmup=2, steps=3
    ),
    "cpu-hh": Cell("135m", "hh", 8, microbatch_tokens=2048, trl_batch=4, dtype="float32", warmup=1, steps=2),
    "smoke": SMOKE,
    "smoke-agents": replace(SMOKE, data="agents", batch_size=2, microbatch_tokens=8192),
    "smoke-lists": replace(SMOKE, batch_size=4, answers=4),
    "smoke-kto": replace(SMOKE, loss="kto"),
    "smoke-kto-single": replace(SMOKE, loss="kto", answers=1),
    "smoke-reward": replace(SMOKE, loss="bradley_terry"),
    "smoke-lora": replace(SMOKE, adapter={"rank": 4}),
    "smoke-qlora": replace(SMOKE, adapter={"rank": 4, "quantize": "nf4"}),
}  # fmt: skip
# isopref-small: microbatches of 8,192 tokens; isopref-mixed: float32 master weights, bfloat16 compute; isopref-auto:
# microbatches and recomputing layers as `auto` chooses them on this device.
SYSTEMS = ("isopref", "isopref-small", "isopref-mixed", "isopref-auto", "trl", "trl-liger")
ATTENTION = {"both": (False, True), "no_cudnn": (False,), "cudnn": (True,)}  # TRL's
AUTO = {"microbatch_tokens": "auto", "checkpointing": "auto"}


def in_four_bits(shape: str, *, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    made = workload.model(shape, dtype=dtype, device=device)
    quantize_nf4(made, device, head=made.get_output_embeddings())
    return made


def run_isopref(cell: Cell, *, mixed: bool, overrides: dict[str, Any]) -> dict[str, Any]:
    make = workload.reward_model if cell.is_reward else in_four_bits if cell.quantised else workload.model
    with ready_trainer(cell, mixed=mixed, layout=overrides, make=make) as ready:
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


def measure(
    name: str, system: str, overrides: dict[str, Any], trl_batch: int | None, attention: str = "both"
) -> dict[str, Any]:
    """One cell of one system, in this process."""
    cell = replace(CELLS[name], trl_batch=trl_batch or CELLS[name].trl_batch)
    small = replace(cell, microbatch_tokens=8192)
    runs: dict[str, Callable[[], dict[str, Any]]] = {
        "isopref": lambda: run_isopref(cell, mixed=False, overrides=overrides),
        "isopref-small": lambda: run_isopref(small, mixed=False, overrides=overrides),
        "isopref-mixed": lambda: run_isopref(cell, mixed=True, overrides=overrides),
        "isopref-auto": lambda: run_isopref(cell, mixed=False, overrides={**AUTO, **overrides}),
        "trl": lambda: run_trl(cell, liger=False, attention=ATTENTION[attention]),
        "trl-liger": lambda: run_trl(cell, liger=True, attention=ATTENTION[attention]),
    }
    return {"cell": name, "system": system, **runs[system]()}


def in_a_process(name: str, system: str, layout: list[str], trl_batch: int | None, attention: str) -> dict[str, Any]:
    """The same in a process of its own, so that no system meets another's memory."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, __file__, "--cells", name, "--systems", system, "--here", "--out", file.name]
        command += ["--attention", attention]
        command += ["--layout", *layout] if layout else []
        command += ["--trl-batch", str(trl_batch)] if trl_batch else []
        started = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, env=workload.environment(), check=False)
        if done.returncode:
            print(done.stderr[-3000:], file=sys.stderr)
            return {"cell": name, "system": system, "error": done.stderr.strip().splitlines()[-1:]}
        result: dict[str, Any] = json.loads(Path(file.name).read_text())["results"][0]
        return {**result, "process_s": time.perf_counter() - started}


def medians(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each cell and system, the run of median speed (of two, the slower one); or a run that failed, if any did."""
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for one in results:
        runs.setdefault((one["cell"], one["system"]), []).append(one)
    found = []
    for some in runs.values():
        failed = [one for one in some if "error" in one]
        by_speed = sorted((one for one in some if "error" not in one), key=_speed)
        found.append(failed[0] if failed else by_speed[(len(by_speed) - 1) // 2])
    return found


def _speed(result: dict[str, Any]) -> float:
    return float(result[CELLS[result["cell"]].speed])


def table(results: list[dict[str, Any]]) -> str:
    """Figures by cell, and how many times faster isopref is."""
    head = ("cell", "system", "a second", "GiB", "fill", "TFLOP/s", "of 790", "isopref is")
    lines = ["{:10} {:14} {:>8} {:>6} {:>6} {:>8} {:>7}  {}".format(*head)]
    ours = {one["cell"]: one for one in results if one["system"] == "isopref" and "error" not in one}
    for one in results:
        if "error" in one:
            lines.append(f"{one['cell']:10} {one['system']:14} failed: {one['error']}")
            continue
        own = ours.get(one["cell"])
        ratio = f"{_speed(own) / _speed(one):.2f} x as fast" if own is not None and own is not one else ""
        fill, rate = one.get("row_fill"), one.get("useful_tflops")
        lines.append(
            f"{one['cell']:10} {one['system']:14} {_speed(one):8.2f} {one['peak_memory_gib']:6.1f} "
            f"{'' if fill is None else f'{fill:.1%}':>6} {'' if rate is None else f'{rate:.0f}':>8} "
            f"{'' if rate is None else f'{1e12 * rate / MATRIX_FLOPS:.1%}':>7}  {ratio}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=["1b-chat", "1b-hh", "8b-chat"])
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--out", type=Path, default=Path("vs_trl.json"))
    parser.add_argument("--here", action="store_true", help="measure in this process")
    parser.add_argument("--layout", nargs="*", default=[], metavar="FIELD=VALUE", help="isopref's layout")
    parser.add_argument("--trl-batch", type=int, help="pairs, or labelled answers, of a TRL microbatch")
    parser.add_argument("--attention", choices=ATTENTION, default="both", help="TRL's attention: the faster of both")
    parser.add_argument("--repeat", type=int, default=1, help="measure so many times; the table has medians")
    args = parser.parse_args()
    overrides = {key: json.loads(value) for key, value in (one.split("=", 1) for one in args.layout)}
    results = []
    for name in args.cells:
        for system in args.repeat * args.systems:
            if args.here:
                one = measure(name, system, overrides, args.trl_batch, args.attention)
            else:
                one = in_a_process(name, system, args.layout, args.trl_batch, args.attention)
            results.append(one)
            print(json.dumps(one), flush=True)
    about = workload.versions()
    args.out.write_text(json.dumps({"about": about, "results": results}, indent=2) + "\n")
    if not args.here:
        print(table(medians(results)), about, sep="\n")


if __name__ == "__main__":
    main()
