"""Metrics for Trackio, logged by the first rank: the same ones that metrics.jsonl has."""

import io
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any

from olmo_core.train.callbacks import Callback


@dataclass
class TrackioCallback(Callback):
    """Logs to a Trackio run that is open already."""

    package: Any = None
    run: Any = None

    def log_metrics(self, step: int, metrics: dict[str, float]) -> None:
        self.run.log(dict(metrics), step=step)  # a copy: it changes what it is given

    def close(self) -> None:
        with redirect_stdout(io.StringIO()):  # it prints to the terminal, over the progress bar
            self.package.finish()  # not that of the run: it would be finished once more at exit
