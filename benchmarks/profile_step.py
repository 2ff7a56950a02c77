"""Where a step's time goes: GPU kernels by kind, and what the engine adds to the bare computation.

    python benchmarks/profile_step.py --cell 1b-chat [--mixed] [--float8] [--layout microbatch_tokens=8192]

The engine's overhead is the time of a step in the complete trainer divided by that of a loop that does only forward,
backward and optimizer on microbatches already on the device, in the same process and for the same steps.
"""

import argparse
import itertools
import json
import logging
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from clocks import Clock, EngineClock
from olmo_core.train.callbacks import Callback
from ready import Ready, ready_trainer
from torch.profiler import ProfilerActivity, profile
from vs_trl import CELLS

KINDS = {  # by what a kernel's name contains, first match
    "attention": ("flash", "fmha", "varlen"),
    "matrix products": ("gemm", "nvjet", "cutlass", "xmma"),
    "head": ("_reduce", "_gradient"),
    "optimizer": ("adam", "multi_tensor", "foreach"),
    "copies": ("memcpy", "memset"),
    "compiled": ("triton",),
}


def kind_of(name: str) -> str:
    lower = name.lower()
    return next((kind for kind, words in KINDS.items() if any(word in lower for word in words)), "other")


class StepProfile(Callback):
    """Profiles one step of the trainer."""

    def __init__(self, at: int):
        self.at = at
        self.profile: Any = None
        self.seconds = 0.0

    def pre_load_batch(self) -> None:
        if self.step == self.at - 1:
            torch.cuda.synchronize()
            self.profile = profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU])
            self.profile.__enter__()
            self.seconds = time.perf_counter()

    def post_step(self) -> None:
        if self.step == self.at:
            torch.cuda.synchronize()
            self.seconds = time.perf_counter() - self.seconds
            self.profile.__exit__(None, None, None)


def bare_seconds(ready: Ready, first: int, last: int) -> float:
    """Mean seconds of a step with only forward, backward and optimizer, over the steps from `first` to `last` - 1."""
    module: Any = ready.trainer.train_module
    loader: Any = ready.trainer.data_loader
    loader.reshuffle(epoch=1)
    loader.batches_processed = first
    device = ready.run.env.device
    batches = itertools.islice(iter(loader), last - first)
    work = [[one.to(device) for one in batch["step"].work] for batch in batches]
    torch.cuda.synchronize()
    started = time.perf_counter()
    for of_step in work:
        for number, one in enumerate(of_step):
            with module._train_microbatch_context(number, len(of_step)):
                module._train_microbatch(one)
        module.optim_step()
        module.zero_grads()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / (last - first)


def kernels_of(profiled: Any) -> list[Any]:
    """The GPU kernels of a profile, each with its total time."""
    events = [one for one in profiled.key_averages() if one.self_device_time_total > 0]
    return [one for one in events if "#" not in one.key and str(one.device_type).endswith("CUDA")]


def seconds_by_kind(kernels: list[Any]) -> Counter[str]:
    by_kind: Counter[str] = Counter()
    for one in kernels:
        by_kind[kind_of(one.key)] += one.self_device_time_total / 1e6
    return by_kind


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cell", choices=CELLS, default="1b-chat")
    parser.add_argument("--mixed", action="store_true")
    parser.add_argument("--float8", action="store_true")
    parser.add_argument("--layout", nargs="*", default=[], metavar="FIELD=VALUE")
    parser.add_argument("--kernels", type=int, default=6, help="how many of the longest kernels of each kind to list")
    args = parser.parse_args()
    cell = CELLS[args.cell]
    # The bare loop repeats steps, and the engine would warn about repeated metrics.
    logging.getLogger("olmo_core").setLevel(logging.ERROR)
    layout = {key: json.loads(value) for key, value in (one.split("=", 1) for one in args.layout)}
    with ready_trainer(cell, mixed=args.mixed, float8=args.float8, layout=layout) as ready:
        clock, spy = Clock(replace(cell, steps=cell.steps - 1)), StepProfile(cell.warmup + cell.steps)
        ready.trainer.add_callback("clock", EngineClock(clock))
        ready.trainer.add_callback("profile", spy)
        ready.trainer.fit()
        whole = clock.result()["step_s"]  # of the steps before the profiled one
        bare = bare_seconds(ready, cell.warmup, cell.warmup + cell.steps - 1)
    kernels = kernels_of(spy.profile)
    by_kind = seconds_by_kind(kernels)
    busy = sum(by_kind.values())
    print(f"step {whole:.4f} s in the trainer, {bare:.4f} s bare: the engine adds {whole / bare - 1:.1%}")
    print(f"profiled step {spy.seconds:.4f} s, kernels {busy:.4f} s of it")
    for kind, seconds in by_kind.most_common():
        print(f"{kind:16} {seconds:.4f} s  {seconds / busy:.1%}")
        of_kind = [one for one in kernels if kind_of(one.key) == kind]
        for one in sorted(of_kind, key=lambda one: -one.self_device_time_total)[: args.kernels]:
            print(f"  {one.self_device_time_total / 1e3:9.2f} ms  {one.count:5}  {one.key[:100]}")


if __name__ == "__main__":
    main()
