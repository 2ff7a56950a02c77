"""Clocks for the steps of isopref's trainer, and for a peer's steps under several attention settings."""

import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from olmo_core.train import Duration
from olmo_core.train.callbacks import Callback
from ready import Cell
from torch._dynamo.utils import counters
from transformers import TrainerCallback


class Clock:
    """Times the steps after the warm-up. It waits for the device only before the first and after the last of them.

    A step that compiles counts as warm-up. The warm-up then lasts one step longer, as long as the cell has spare steps.
    """

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self.warmup = cell.warmup
        self.ticks = 0
        self.ends: list[float] = []
        self.marks: list[float] = []  # when the host was done with each timed step: its share of the time, roughly
        self.memory: dict[str, float] = {"peak_memory_gib": 0.0}
        self._graphs = _compiled()
        self._late_graphs = 0

    @property
    def is_done(self) -> bool:
        return len(self.ends) == 2

    def tick(self) -> None:
        """Record that a step is done. Call it once before the first step, too."""
        self._watch_compiling()
        if self.ticks in (self.warmup, self.warmup + self.cell.steps):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.ends.append(time.perf_counter())
        print(f"{time.strftime('%X')} {self.ticks} steps done", file=sys.stderr, flush=True)
        if self.ticks >= self.warmup:
            self.marks.append(time.perf_counter())
        self.ticks += 1
        if self.is_done and torch.cuda.is_available():
            self.memory["peak_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
            self.memory["alloc_retries"] = torch.cuda.memory_stats()["num_alloc_retries"]

    def _watch_compiling(self) -> None:
        """After a step that compiled, start timing again one step later, if there are spare steps."""
        before, self._graphs = self._graphs, _compiled()
        new = self._graphs - before
        later = min(self.ticks + 1, self.cell.warmup + self.cell.spare)
        if new and later > self.warmup:
            self.warmup = later
            self.ends, self.marks = [], []
        elif self.ticks > self.warmup:
            self._late_graphs += new

    def result(self) -> dict[str, Any]:
        begin, end = self.ends
        seconds = (end - begin) / self.cell.steps
        steps = [round(after - before, 3) for before, after in pairwise(self.marks)]
        figures = {self.cell.speed: self.cell.terms_per_step / seconds, "step_s": seconds, "steps_s": steps}
        return {**figures, **self.memory, "warmup_steps": self.warmup, "compiled_while_timed": self._late_graphs}


def _compiled() -> int:
    """Graphs that torch has compiled in this process since it last forgot them."""
    return int(counters["stats"]["unique_graphs"])


class EngineClock(Callback):
    """Ticks at every step, and stops a trainer that has steps to spare."""

    def __init__(self, clock: Clock):
        self.clock = clock

    def pre_train(self) -> None:
        self.clock.tick()

    def post_step(self) -> None:
        self.clock.tick()
        if self.clock.is_done and self.clock.cell.spare:
            self.trainer.hard_stop = Duration.steps(self.step)


class PeerClock(TrainerCallback):
    """Times a peer's steps under each setting of cuDNN attention in turn; every setting has its own warm-up."""

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
