"""Metrics for TensorBoard, written by the first rank: the same ones that metrics.jsonl has."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from olmo_core.train.callbacks import Callback


@dataclass
class TensorBoardCallback(Callback):
    """Writes event files. A resumed run first removes the steps that it will repeat."""

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
