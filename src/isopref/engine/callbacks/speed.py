"""Speed, MFU and peak memory, measured between two logged steps."""

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from olmo_core.train.callbacks import SpeedMonitorCallback

from isopref.batch.step import Step
from isopref.examples import Lengths


@dataclass
class PairSpeedCallback(SpeedMonitorCallback):
    """Hardware metrics between two logged steps. Replaces the engine's monitor, which counts padded input ids.

    :param flops: useful floating-point operations of a global batch, from the lengths of its pairs.
    :param peak_flops: peak operations per second of all ranks together. 0: unknown, and no MFU is logged.
    """

    priority: ClassVar[int] = 3  # before a checkpoint, when the engine logs the metrics that it has so far

    flops: Callable[[Lengths], float] | None = None
    peak_flops: float = 0.0
    _since: float = 0.0
    _load: float = 0.0
    _waited: float = 0.0
    _pairs: int = 0
    _tokens: int = 0
    _flops: float = 0.0

    def pre_train(self) -> None:
        self._since, self._waited, self._pairs, self._tokens, self._flops = time.perf_counter(), 0.0, 0, 0, 0.0

    def pre_load_batch(self) -> None:
        self._load = time.perf_counter()

    def pre_step(self, batch: dict[str, Any]) -> None:
        self._waited += time.perf_counter() - self._load
        if "step" in batch:
            step: Step = batch["step"]
            self._pairs += step.num_examples
            self._tokens += step.num_tokens
            if self.flops is not None and step.lengths is not None:
                self._flops += self.flops(step.lengths)

    def post_step(self) -> None:
        if self.step % self.trainer.metrics_collect_interval:
            return
        seconds = time.perf_counter() - self._since
        self.trainer.record_metric("speed/pairs_per_s", self._pairs / seconds)
        self.trainer.record_metric("speed/tokens_per_s", self._tokens / seconds)
        self.trainer.record_metric("speed/data_wait", self._waited / seconds)
        if self._flops and self.peak_flops:
            self.trainer.record_metric("speed/mfu", self._flops / seconds / self.peak_flops)
        self.trainer.record_metric("speed/peak_memory_gib", _peak_memory(self.trainer.device) / 2**30)
        self.pre_train()


def _peak_memory(device: torch.device) -> int:
    """Most bytes this process has held so far: on its GPU, else in the machine's memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
