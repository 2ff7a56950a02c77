"""What times a step: of isopref's trainer, and of a peer's under several attention settings."""

import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from olmo_core.train.callbacks import Callback
from ready import Cell
from transformers import TrainerCallback


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
        print(f"{time.strftime('%X')} {self.ticks} steps done", file=sys.stderr, flush=True)
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
        return {self.cell.speed: self.cell.terms_per_step / seconds, "step_s": seconds, "steps_s": steps, **self.memory}


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
        best = min(found, key=lambda cudnn: found[cudnn]["step_s"])
        cell = self.clocks[best].cell
        speeds = {("cudnn" if cudnn else "no_cudnn"): one[cell.speed] for cudnn, one in found.items()}
        return {**found[best], f"{cell.speed}_by_attention": speeds}
