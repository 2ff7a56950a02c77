"""The metrics file of a run: one line of JSON per logged step."""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path

from olmo_core.train.callbacks import Callback

from isopref.engine.display import Display
from isopref.places import write_whole


@dataclass
class MetricsFileCallback(Callback):
    """Writes every logged step as one line of a JSONL file; a resumed run first drops the steps it will repeat.

    Non-finite values become null. An unreadable line, for example after a full disk, is dropped with a warning:
    training does not depend on it.
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
            elif step is None and line.endswith(b"\n"):  # otherwise it is the truncated last line
                self.display.say(f"warning: {self.path}:{number} is damaged; dropping it (training does not need it)")
        write_whole(self.path, b"".join(done))
        if done:
            self._line, self._line_start = json.loads(done[-1]), sum(map(len, done[:-1]))

    def log_metrics(self, step: int, metrics: dict[str, float]) -> None:
        metrics = {name: value for name, value in metrics.items() if not name.startswith("checkpoint/")}
        if not metrics:
            return
        with self.path.open("r+b") as file:
            # If the engine saves or loads a checkpoint at a step, it reports that step's metrics in parts.
            if self._line.get("step") != step:
                self._line, self._line_start = {"step": step}, file.seek(0, 2)
            self._line.update({name: value if math.isfinite(value) else None for name, value in metrics.items()})
            file.seek(self._line_start)
            file.truncate()
            file.write(json.dumps(self._line).encode() + b"\n")


def _step_of(line: bytes) -> int | None:
    """The step of a line in the metrics file; None if the line is incomplete."""
    try:
        step = json.loads(line)["step"] if line.endswith(b"\n") else None
    except (ValueError, KeyError, TypeError):
        return None
    return step if isinstance(step, int) else None
