"""A trace of a few steps of the first rank, by torch's profiler."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from olmo_core.train.callbacks import Callback
from torch.profiler import ProfilerActivity, profile, schedule

from isopref.engine.display import Display

LEAD = 2  # steps before the traced ones: the first may compile, the second starts the profiler
TRACE, OPERATORS = "trace.json", "operators.txt"
MOST_OPERATORS = 40


@dataclass
class ProfileCallback(Callback):
    """Traces `steps` steps, then writes a Chrome trace and a table of the slowest operators to `folder`."""

    folder: Path = Path("profile")
    steps: int = 3
    display: Display | None = None
    _profiler: Any = None

    def pre_train(self) -> None:
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        parts = schedule(wait=LEAD - 1, warmup=1, active=self.steps, repeat=1)
        self._profiler = profile(activities=kinds, schedule=parts, on_trace_ready=self._write, acc_events=True)
        self._profiler.start()

    def post_step(self) -> None:
        if self._profiler is not None:
            self._profiler.step()

    def close(self) -> None:
        """Stop; a run that ended early writes what it has."""
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None

    def _write(self, profiler: Any) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(self.folder / TRACE))
        spent = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        table = profiler.key_averages().table(sort_by=spent, row_limit=MOST_OPERATORS)
        (self.folder / OPERATORS).write_text(table, encoding="utf-8")
        if self.display is not None:
            self.display.say(f"profile {self.folder / TRACE} (open it at ui.perfetto.dev), {self.folder / OPERATORS}")
