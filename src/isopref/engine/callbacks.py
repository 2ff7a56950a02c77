"""OLMo-core callbacks: progress on the terminal, the metrics file, speed, evaluation during training."""

import json
import math
import resource
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from olmo_core.train.callbacks import Callback, SpeedMonitorCallback

from isopref.engine.display import Advance, Display, brief
from isopref.engine.step import Step
from isopref.places import write_whole
from isopref.types import IntArray


@dataclass
class ProgressCallback(Callback):
    """A bar on a terminal, one line per log step elsewhere."""

    display: Display = field(default_factory=Display)
    _stack: ExitStack = field(default_factory=ExitStack)
    _advance: Advance | None = None
    _shown: int = 0
    _note: str = ""

    def pre_train(self) -> None:
        self._shown = self.step
        self._advance = self._stack.enter_context(
            self.display.bar("train", self.trainer.max_steps, lines=False, below=True)
        )
        self._advance(self.step, "")

    def post_step(self) -> None:
        if self._advance is not None:
            self._advance(self.step - self._shown, self._note)
            self._shown = self.step

    def log_metrics(self, step: int, metrics: dict[str, float]) -> None:
        if "train/loss" not in metrics:  # a checkpoint's share of the step
            return
        self._note = brief(metrics)
        if self._advance is not None:
            self._advance(0, self._note)
        if not self.display.console.is_terminal and self._note:
            self.display.say(f"step {step}/{self.trainer.max_steps}  {self._note}")

    def post_train(self) -> None:
        self._stack.close()

    def on_error(self, exc: BaseException) -> None:
        self._stack.close()


@dataclass
class MetricsFileCallback(Callback):
    """Writes every logged step as one line of a JSONL file; a resumed run first drops the steps it will do again.

    What is not finite is null. A line that cannot be read, as a full disk may leave, is dropped with a warning: the
    weights do not come from it.
    """

    path: Path = Path("metrics.jsonl")
    display: Display = field(default_factory=Display)
    _line: dict[str, float | None] = field(default_factory=dict)
    _line_start: int = 0

    def pre_train(self) -> None:
        lines = self.path.read_bytes().splitlines(keepends=True) if self.path.exists() else []
        done = []
        for number, line in enumerate(lines, start=1):
            step = _step_of(line)
            if step is not None and step <= self.step:
                done.append(line)
            elif step is None and line.endswith(b"\n"):  # else the last one, cut short
                self.display.say(f"warning: {self.path}:{number} is damaged and dropped; training does not need it")
        write_whole(self.path, b"".join(done))
        if done:
            self._line, self._line_start = json.loads(done[-1]), sum(map(len, done[:-1]))

    def log_metrics(self, step: int, metrics: dict[str, float]) -> None:
        metrics = {name: value for name, value in metrics.items() if not name.startswith("checkpoint/")}
        if not metrics:
            return
        with self.path.open("r+b") as file:
            # The engine passes a step's metrics on in parts when it saves or loads a checkpoint there.
            if self._line.get("step") != step:
                self._line, self._line_start = {"step": step}, file.seek(0, 2)
            self._line.update({name: value if math.isfinite(value) else None for name, value in metrics.items()})
            file.seek(self._line_start)
            file.truncate()
            file.write(json.dumps(self._line).encode() + b"\n")


def _step_of(line: bytes) -> int | None:
    """The step of a line of the metrics file; None where it is not whole."""
    try:
        step = json.loads(line)["step"] if line.endswith(b"\n") else None
    except (ValueError, KeyError, TypeError):
        return None
    return step if isinstance(step, int) else None


@dataclass
class PairSpeedCallback(SpeedMonitorCallback):
    """What the hardware does between two logs, in place of the engine's monitor, which counts padded input ids.

    :param flops: useful operations of a global batch, from the lengths of its pairs.
    :param peak_flops: operations a second that all ranks could do together. 0: not known, and no MFU is logged.
    """

    priority: ClassVar[int] = 3  # before a checkpoint, at which the engine passes on what it has

    flops: Callable[[IntArray], float] | None = None
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
            self._pairs += step.num_pairs
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


@dataclass
class EvaluateCallback(Callback):
    """Calls `evaluate` with the step, every so many steps and after the last, and logs what it returns.

    It may not touch weights or random state.
    """

    priority: ClassVar[int] = 2  # as the speed's

    every: int | None = None
    evaluate: Callable[[int], dict[str, float]] = lambda _step: {}
    best_step: int | None = None  # of the lowest eval/loss so far
    _best: float = math.inf

    def post_step(self) -> None:
        if self.step == self.trainer.max_steps or (self.every is not None and self.step % self.every == 0):
            found = self.evaluate(self.step)
            for name, value in found.items():
                self.trainer.record_metric(name, value)
            if found["eval/loss"] < self._best:
                self._best, self.best_step = found["eval/loss"], self.step

    def forget_best(self) -> None:
        """Let the next evaluation be the best so far."""
        self._best, self.best_step = math.inf, None

    def state_dict(self) -> dict[str, Any]:
        return {"best": self._best, "best_step": self.best_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._best, self.best_step = state_dict["best"], state_dict["best_step"]
