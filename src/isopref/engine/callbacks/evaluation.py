"""Evaluation on held-out pairs during training."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from olmo_core.train.callbacks import Callback


@dataclass
class EvaluateCallback(Callback):
    """Calls `evaluate` with the step, every `every` steps and after the last one, and logs the metrics it returns.

    `evaluate` must not change weights or random state.
    """

    priority: ClassVar[int] = 2  # before a checkpoint, for the same reason as in speed.py

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
        """Forget earlier evaluations, so that the next one is the best so far."""
        self._best, self.best_step = math.inf, None

    def state_dict(self) -> dict[str, Any]:
        return {"best": self._best, "best_step": self.best_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._best, self.best_step = state_dict["best"], state_dict["best_step"]
