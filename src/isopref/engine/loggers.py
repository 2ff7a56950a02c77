"""Metrics for TensorBoard and Weights & Biases. On the first rank only; what is logged is what metrics.jsonl has."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from olmo_core.train.callbacks import Callback


@dataclass
class TensorBoardCallback(Callback):
    """Writes event files. A resumed run takes back the steps that it does again."""

    folder: Path = Path("tensorboard")
    _writer: Any = None

    def pre_train(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self.folder), purge_step=self.step + 1)

    def log_metrics(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


@dataclass
class WandbCallback(Callback):
    """Logs to a run of Weights & Biases that is open already.

    The engine's own needs an API key in the environment, also offline and after `wandb login`, and asks the service at
    every check whether the run was cancelled there (OLMo-core 3.0.0).
    """

    run: Any = None
    _exit_code: int = 0

    def log_metrics(self, step: int, metrics: dict[str, float]) -> None:
        self.run.log(metrics, step=step)

    def on_error(self, exc: BaseException) -> None:
        self._exit_code = 1

    def close(self) -> None:
        self.run.finish(exit_code=self._exit_code)
