"""Metrics for Trackio, logged by the first rank: the same ones that metrics.jsonl has."""

import io
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any

from olmo_core.train.callbacks import Callback


@dataclass
class TrackioCallback(Callback):
    """Logs to a Trackio run that is already open."""

    package: Any = None
    run: Any = None

    def log_metrics(self, step: int, metrics: dict[str, float]) -> None:
        self.run.log(dict(metrics), step=step)  # a copy: Trackio modifies its argument

    def close(self) -> None:
        with redirect_stdout(io.StringIO()):  # it prints to the terminal, over the progress bar
            self.package.finish()  # not the run's own finish, which would run again at exit
