"""Metrics for Weights & Biases, logged by the first rank: the same ones that metrics.jsonl has."""

from dataclasses import dataclass
from typing import Any

from olmo_core.train.callbacks import Callback


@dataclass
class WandbCallback(Callback):
    """Logs to a Weights & Biases run that is already open.

    The engine's own callback (OLMo-core 3.0.0) needs an API key in the environment, even offline and after
    `wandb login`, and keeps asking the service whether the run was cancelled there.
    """

    run: Any = None
    _exit_code: int = 0

    def log_metrics(self, step: int, metrics: dict[str, float]) -> None:
        self.run.log(metrics, step=step)

    def on_error(self, exc: BaseException) -> None:
        self._exit_code = 1

    def close(self) -> None:
        self.run.finish(exit_code=self._exit_code)
