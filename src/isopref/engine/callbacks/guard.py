"""Warns about skipped steps (see engine/guard.py) and stops a run that skips too many."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from olmo_core.train.callbacks import Callback

from isopref.batch.step import Step
from isopref.engine.display import Display
from isopref.engine.guard import MOST_IN_A_ROW, Skipped
from isopref.engine.loader import ExampleLoader
from isopref.models.finite import bad_weights, some_of
from isopref.models.parallel import unwrap
from isopref.ranks import own_rank

log = logging.getLogger(__name__)


@dataclass
class GuardCallback(Callback):
    """Reports which steps were skipped and why, and stops the run after too many or if the weights are bad.

    A train module adds one to a trainer that has none.

    :param display: where to print. None: to the log, as usual in a script.
    :param origin: the name of a pair in the table.
    """

    display: Display | None = None
    origin: Callable[[int], str] = "pair {}".format
    gave_up: bool = False
    _step: Step | None = None

    def pre_step(self, batch: dict[str, Any]) -> None:
        self._step = batch.get("step")

    def post_step(self) -> None:
        module: Any = self.trainer.train_module
        found = module.guard.report() if module.logs_now() else None
        if found is None:
            return
        more = "" if found.steps == 1 else f" (and {found.steps - 1} more up to step {self.step})"
        skipped = f"step {found.first} was skipped{more}"
        if bad := bad_weights(unwrap(module.model).model, trained_only=True):  # then no single pair is the cause
            self._warn(f"{skipped}: the weights contain NaN or Inf ({some_of(bad)}).")
            self.gave_up = True
            self.trainer.cancel_run("the weights are not finite", no_sync=True)
            return
        self._warn(f"{skipped}: {self._cause(found)}")
        if found.in_a_row >= MOST_IN_A_ROW:
            self.gave_up = True
            self.trainer.cancel_run(f"{found.in_a_row} steps in a row were skipped", no_sync=True)

    def _warn(self, text: str) -> None:
        if self.display is not None:
            self.display.say(f"warning: {text}")
        elif own_rank() == 0:
            log.warning(text)

    def _cause(self, found: Skipped) -> str:
        if found.pair is not None:
            return f"the loss of {self.origin(found.pair)} is not finite. The weights are unchanged."
        pair = self._blame() if found.first == self.step else None
        if pair is not None:
            return f"the gradient of {self.origin(pair)} is not finite. The weights are unchanged."
        return "its gradient is not finite, although the loss of every pair is. The weights are unchanged."

    def _blame(self) -> int | None:
        """The pair in this step whose own gradient is not finite. All ranks search together."""
        module, loader = self.trainer.train_module, self.trainer.data_loader
        if self._step is None or self._step.index is None or not isinstance(loader, ExampleLoader):
            return None
        for pair in self._step.index.tolist():
            if not module.is_finite(loader.step(np.array([pair]))):  # type: ignore[attr-defined]
                return int(pair)
        return None
