"""Metrics for MLflow, logged by the first rank: the same ones that metrics.jsonl has."""

import time
from dataclasses import dataclass, field
from typing import Any

from olmo_core.train.callbacks import Callback

from isopref.engine.display import Display


@dataclass
class MlflowCallback(Callback):
    """Logs to an MLflow run that is already open.

    MLflow sends metrics from its own thread: retrying an unresponsive server takes minutes, and no step should wait for
    that. Metrics that could not be sent are reported when the run ends.
    """

    package: Any = None
    client: Any = None
    run_id: str = ""
    display: Display = field(default_factory=Display)
    _sent: list[Any] = field(default_factory=list)
    _status: str = "FINISHED"

    def log_metrics(self, step: int, metrics: dict[str, float]) -> None:
        now = int(1000 * time.time())
        batch = [self.package.entities.Metric(name, value, now, step) for name, value in metrics.items()]
        self._sent.append(self.client.log_batch(self.run_id, metrics=batch, synchronous=False))

    def on_error(self, exc: BaseException) -> None:
        self._status = "FAILED"

    def close(self) -> None:
        try:
            for sent in self._sent:
                sent.wait()
            self.client.set_terminated(self.run_id, self._status)
        except Exception as error:  # whatever the server or the connection raises
            self.display.say(f"warning: mlflow: not all metrics were sent ({error}). metrics.jsonl has them.")
