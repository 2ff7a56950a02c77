"""Warnings while a run trains, from the metrics it logs: a loss that jumps, chosen answers that fall off."""

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import fmean, pstdev
from typing import Any

from olmo_core.train.callbacks import Callback

from isopref.engine.display import Display

WINDOW = 16  # logged steps that a loss is compared with
SPIKE = 6.0  # standard deviations above their mean, and at least twice the mean, make a jump
FEW = 8  # logged steps over which a likelihood is averaged
FALL = 1.0  # nats that a chosen token may lose before each warning


@dataclass
class WatchCallback(Callback):
    """Warns once for each jump of the loss, and once for each nat per token that the chosen answers lose."""

    display: Display = field(default_factory=Display)
    _losses: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _start: list[float] = field(default_factory=list)  # train/nll of the first logged steps
    _nlls: deque[float] = field(default_factory=lambda: deque(maxlen=FEW))  # of the last ones
    _fallen: int = 0  # multiples of FALL that were warned about

    def log_metrics(self, step: int, metrics: dict[str, float]) -> None:
        loss, nll = (metrics.get(name, math.nan) for name in ("train/loss", "train/nll"))
        if math.isfinite(loss) and math.isfinite(nll):
            self._watch_loss(step, loss)
            self._watch_chosen(step, nll)

    def _watch_loss(self, step: int, loss: float) -> None:
        if len(self._losses) == WINDOW:
            mean = fmean(self._losses)
            if loss > max(mean + SPIKE * pstdev(self._losses), 2 * mean):
                self.display.say(
                    f"warning: step {step}: train/loss jumped to {loss:.3g}, from {mean:.3g} over the previous "
                    f"{WINDOW} logged steps. If it stays there, lower optim.lr or check the pairs in that step."
                )
        self._losses.append(loss)

    def _watch_chosen(self, step: int, nll: float) -> None:
        if len(self._start) < FEW:
            self._start.append(nll)
        self._nlls.append(nll)
        start, now = fmean(self._start), fmean(self._nlls)
        if now - start > FALL * (self._fallen + 1):
            self._fallen = int((now - start) / FALL)
            self.display.say(
                f"warning: step {step}: train/nll rose from {start:.2f} to {now:.2f} nats per token: the chosen "
                "answers are becoming less likely along with the rejected ones. Raise objective.beta, lower optim.lr, "
                "or set objective.nll_weight."
            )

    def state_dict(self) -> dict[str, Any]:
        return {
            "losses": list(self._losses),
            "start": list(self._start),
            "nlls": list(self._nlls),
            "fallen": self._fallen,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._losses.extend(state_dict["losses"])
        self._start, self._fallen = list(state_dict["start"]), state_dict["fallen"]
        self._nlls.extend(state_dict["nlls"])
