"""isopref and TRL side by side: the same pairs in the same global batches, both through their whole trainers.

    python benchmarks/vs_trl.py --out results.json                     # every cell of the table
    python benchmarks/vs_trl.py --cells 1b-chat --systems isopref trl  # some of it
    python benchmarks/vs_trl.py --repeat 3                             # medians of three, systems in turn

Every measurement is a process of its own. Speed is pairs per second over the timed steps, including optimizer,
clipping, logging and data loading; references are computed beforehand. TRL gets its best plain settings: no padding
beyond its own, fused AdamW, precomputed references, no gradient checkpointing, the largest microbatch that runs fast
(--trl-pairs tries another). On a GPU it runs the same batches twice, without and with cuDNN attention, and the faster
run counts: cuDNN builds an execution plan for every new sequence length, and the GPU waits meanwhile. Both systems use
expandable segments (PYTORCH_ALLOC_CONF): with varying lengths, torch's allocator otherwise fragments the card's memory
(`alloc_retries`).
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import workload
from olmo_core.train.callbacks import Callback
from ready import Cell, ready_trainer
from transformers import PreTrainedModel, TrainerCallback

from isopref.models.adapter import quantize_nf4
from isopref.models.flops import UsefulFlops
from isopref.testing.models import byte_tokenizer

MATRIX_FLOPS = 790e12  # bfloat16 product of 8192 x 8192 matrices, as measured on an H200


CELLS = {
    "1b-chat": Cell("1b", "chat", 64, microbatch_tokens=24576, trl_pairs=8, warmup=2, steps=5),
    "1b-hh": Cell("1b", "hh", 256, microbatch_tokens=16384, trl_pairs=16, warmup=1, steps=4),
    "8b-chat": Cell("8b", "chat", 64, microbatch_tokens=12288, trl_pairs=2, warmup=1, steps=3),
    "8b-lora": Cell(
        "8b", "chat", 64, microbatch_tokens=16384, trl_pairs=2, warmup=1, steps=3, adapter={"rank": 16, "alpha": 32}
    ),
    "8b-qlora": Cell(  # isopref alone
        "8b", "chat", 64, microbatch_tokens=16384, trl_pairs=0, warmup=1, steps=3,
        adapter={"rank": 16, "alpha": 32, "quantize": "nf4"},
    ),
    "cpu-hh": Cell("135m", "hh", 8, microbatch_tokens=2048, trl_pairs=4, dtype="float32", warmup=1, steps=2),
    "smoke": Cell("tiny", "hh", 8, microbatch_tokens=4096, trl_pairs=2, dtype="float32", warmup=1, steps=2),
    "smoke-lora": Cell(
        "tiny", "hh", 8, microbatch_tokens=4096, trl_pairs=2, dtype="float32", warmup=1, steps=2, adapter={"rank": 4}
    ),
    "smoke-qlora": Cell(
        "tiny", "hh", 8, microbatch_tokens=4096, trl_pairs=0, dtype="float32", warmup=1, steps=2,
        adapter={"rank": 4, "quantize": "nf4"},
    ),
}  # fmt: skip
# isopref-small: microbatches of 8,192 tokens; isopref-mixed: float32 master weights, bfloat16 compute; isopref-auto:
# microbatches and recomputing layers as `auto` chooses them on this device.
SYSTEMS = ("isopref", "isopref-small", "isopref-mixed", "isopref-auto", "trl", "trl-liger")
AUTO = {"microbatch_tokens": "auto", "checkpointing": "auto"}


class Clock:
    """Times the steps after the warm-up. It waits for the device only before the first and after the last of them."""

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self.ticks = 0
        self.ends: list[float] = []
        self.marks: list[float] = []  # when the host was done with each timed step: its share of the time, roughly
        self.memory: dict[str, float] = {"peak_memory_gib": 0.0}

    @property
    def is_done(self) -> bool:
        return len(self.ends) == 2

    def tick(self) -> None:
        """A step is done; the first call comes before the first step."""
        if self.ticks in (self.cell.warmup, self.cell.warmup + self.cell.steps):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.ends.append(time.perf_counter())
        if self.ticks >= self.cell.warmup:
            self.marks.append(time.perf_counter())
        self.ticks += 1
        if self.is_done and torch.cuda.is_available():
            self.memory["peak_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
            self.memory["alloc_retries"] = torch.cuda.memory_stats()["num_alloc_retries"]

    def result(self) -> dict[str, Any]:
        begin, end = self.ends
        seconds = (end - begin) / self.cell.steps
        steps = [round(after - before, 3) for before, after in pairwise(self.marks)]
        return {"pairs_per_s": self.cell.batch_size / seconds, "step_s": seconds, "steps_s": steps, **self.memory}


class EngineClock(Callback):
    def __init__(self, clock: Clock):
        self.clock = clock

    def pre_train(self) -> None:
        self.clock.tick()

    def post_step(self) -> None:
        self.clock.tick()


class PeerClock(TrainerCallback):
    """Times a peer's steps under each setting of cuDNN attention in turn; every setting has a warm-up of its own."""

    def __init__(self, cell: Cell, cudnn_settings: Sequence[bool]) -> None:
        self.clocks = {cudnn: Clock(cell) for cudnn in cudnn_settings}
        self._waiting = list(cudnn_settings)
        self._clock = self._next()

    def _next(self) -> Clock:
        cudnn = self._waiting.pop(0)
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        return self.clocks[cudnn]

    def on_train_begin(self, *_args: Any, **_kwargs: Any) -> None:
        self._clock.tick()

    def on_step_end(self, *_args: Any, **_kwargs: Any) -> None:
        self._clock.tick()
        if self._clock.is_done and self._waiting:
            self._clock = self._next()
            self._clock.tick()

    def result(self) -> dict[str, Any]:
        """The figures of the faster setting, and the speed of each."""
        found = {cudnn: clock.result() for cudnn, clock in self.clocks.items()}
        best = max(found, key=lambda cudnn: found[cudnn]["pairs_per_s"])
        speeds = {("cudnn" if cudnn else "no_cudnn"): one["pairs_per_s"] for cudnn, one in found.items()}
        return {**found[best], "pairs_per_s_by_attention": speeds}


def _quantised(cell: Cell) -> bool:
    return cell.adapter is not None and "quantize" in cell.adapter


def in_four_bits(shape: str, *, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    made = workload.model(shape, dtype=dtype, device=device)
    quantize_nf4(made, device, head=made.get_output_embeddings())
    return made


def run_isopref(cell: Cell, *, mixed: bool, overrides: dict[str, Any]) -> dict[str, Any]:
    make = in_four_bits if _quantised(cell) else workload.model
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


def run_trl(cell: Cell, *, liger: bool) -> dict[str, Any]:
    if _quantised(cell):
        raise SystemExit("in four bits only isopref is measured: TRL's come from bitsandbytes")
    if cell.batch_size % cell.trl_pairs:
        raise SystemExit(f"--trl-pairs {cell.trl_pairs} does not divide the {cell.batch_size} pairs of a step")
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer
    from trl.trainer import dpo_trainer

    # TRL names its file of references by a digest of all weights, slow for a large model and not what is timed.
    dpo_trainer.hash_module = lambda _model: uuid4().hex

    class Tokenised(DPOTrainer):  # type: ignore[misc]
        """Takes the pairs as they are, in the order they have."""

        def _prepare_dataset(self, dataset: Any, *_args: Any, **_kwargs: Any) -> Any:
            return dataset

        def _get_train_sampler(self, *_args: Any, **_kwargs: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    made = workload.model(cell.shape, dtype=getattr(torch, cell.dtype), device=device)
    count = (cell.warmup + cell.steps) * cell.batch_size
    cudnn_settings = (False, True) if torch.cuda.is_available() else (False,)
    every = workload.in_order(workload.pairs(cell.data, count, vocabulary=made.config.vocab_size)) * len(cudnn_settings)
    columns = {f"{name}_ids": [getattr(pair, name).tolist() for pair in every] for name in every[0]._fields}
    half = cell.dtype == "bfloat16"
    with tempfile.TemporaryDirectory() as folder:
        args = DPOConfig(
            output_dir=folder,
            per_device_train_batch_size=cell.trl_pairs,
            gradient_accumulation_steps=cell.batch_size // cell.trl_pairs,
            max_steps=len(cudnn_settings) * (cell.warmup + cell.steps),
            learning_rate=1e-6,
            optim="adamw_torch_fused" if torch.cuda.is_available() else "adamw_torch",
            max_length=None,
            precompute_ref_log_probs=True,
            gradient_checkpointing=False,
            bf16=half,
            use_liger_kernel=liger,
            use_cpu=device.type == "cpu",
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataset_num_proc=None,
        )
        clock = PeerClock(cell, cudnn_settings)
        trainer = Tokenised(
            model=made,
            args=args,
            train_dataset=Dataset.from_dict(columns),
            processing_class=byte_tokenizer(),
            callbacks=[clock],
            peft_config=_peft_config(cell),
        )
        trainer.train()
    return {**clock.result(), "trl_pairs": cell.trl_pairs}


def _peft_config(cell: Cell) -> Any:
    """The cell's adapter as a peer is given it: on all linear layers, as isopref's."""
    if cell.adapter is None:
        return None
    from peft import LoraConfig

    rank = cell.adapter["rank"]
    alpha = cell.adapter.get("alpha", 2 * rank)
    return LoraConfig(r=rank, lora_alpha=alpha, target_modules="all-linear", task_type="CAUSAL_LM")


def measure(name: str, system: str, overrides: dict[str, Any], trl_pairs: int | None) -> dict[str, Any]:
    """One cell of one system, in this process."""
    cell = replace(CELLS[name], trl_pairs=trl_pairs or CELLS[name].trl_pairs)
    small = replace(cell, microbatch_tokens=8192)
    runs: dict[str, Callable[[], dict[str, Any]]] = {
        "isopref": lambda: run_isopref(cell, mixed=False, overrides=overrides),
        "isopref-small": lambda: run_isopref(small, mixed=False, overrides=overrides),
        "isopref-mixed": lambda: run_isopref(cell, mixed=True, overrides=overrides),
        "isopref-auto": lambda: run_isopref(cell, mixed=False, overrides={**AUTO, **overrides}),
        "trl": lambda: run_trl(cell, liger=False),
        "trl-liger": lambda: run_trl(cell, liger=True),
    }
    return {"cell": name, "system": system, **runs[system]()}


def in_a_process(name: str, system: str, layout: list[str], trl_pairs: int | None) -> dict[str, Any]:
    """The same in a process of its own, so that no system meets another's memory."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, __file__, "--cells", name, "--systems", system, "--here", "--out", file.name]
        command += ["--layout", *layout] if layout else []
        command += ["--trl-pairs", str(trl_pairs)] if trl_pairs else []
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
        by_speed = sorted((one for one in some if "error" not in one), key=lambda one: float(one["pairs_per_s"]))
        found.append(failed[0] if failed else by_speed[(len(by_speed) - 1) // 2])
    return found


def table(results: list[dict[str, Any]]) -> str:
    """Figures by cell, and how many times faster isopref is."""
    head = ("cell", "system", "pairs/s", "GiB", "fill", "TFLOP/s", "of 790", "isopref is")
    lines = ["{:10} {:14} {:>8} {:>6} {:>6} {:>8} {:>7}  {}".format(*head)]
    ours = {one["cell"]: one for one in results if one["system"] == "isopref" and "error" not in one}
    for one in results:
        if "error" in one:
            lines.append(f"{one['cell']:10} {one['system']:14} failed: {one['error']}")
            continue
        own = ours.get(one["cell"])
        ratio = f"{own['pairs_per_s'] / one['pairs_per_s']:.2f} x as fast" if own is not None and own is not one else ""
        fill, rate = one.get("row_fill"), one.get("useful_tflops")
        lines.append(
            f"{one['cell']:10} {one['system']:14} {one['pairs_per_s']:8.2f} {one['peak_memory_gib']:6.1f} "
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
    parser.add_argument("--trl-pairs", type=int, help="pairs of a peer's microbatch")
    parser.add_argument("--repeat", type=int, default=1, help="measure so many times; the table has medians")
    args = parser.parse_args()
    overrides = {key: json.loads(value) for key, value in (one.split("=", 1) for one in args.layout)}
    results = []
    for name in args.cells:
        for system in args.repeat * args.systems:
            if args.here:
                one = measure(name, system, overrides, args.trl_pairs)
            else:
                one = in_a_process(name, system, args.layout, args.trl_pairs)
            results.append(one)
            print(json.dumps(one), flush=True)
    about = workload.versions()
    args.out.write_text(json.dumps({"about": about, "results": results}, indent=2) + "\n")
    if not args.here:
        print(table(medians(results)), about, sep="\n")


if __name__ == "__main__":
    main()
