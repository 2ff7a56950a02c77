"""Numbers that are not finite never reach the weights, and weights that are not finite never reach the disk.

A loss that is not finite makes its own gradient NaN, the reduction over ranks hands that to all of them, and so the
norm of the gradient tells every rank the same: the step is skipped. Nothing is sent for it, and the host learns of it
only when a step logs. An update itself may still overflow, as with a huge learning rate: the
weights are checked where they are saved (checkpoints.py). P: pairs of a microbatch.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from olmo_core.train.callbacks import Callback
from torch import Tensor
from torch.optim import Optimizer

from isopref.engine.display import Display
from isopref.engine.loader import PairLoader
from isopref.engine.step import Step
from isopref.ranks import num_ranks, own_rank

log = logging.getLogger(__name__)

MOST_IN_A_ROW = 5  # skipped steps, after which a run stops
NO_PAIR = torch.iinfo(torch.int64).max


def poisoned(loss: Tensor, loss_P: Tensor) -> Tensor:
    """The same loss, bit for bit; where it or that of a pair is not finite, its gradient is NaN."""
    return loss * (1 + 0 * loss.detach() + (0 * loss_P.detach()).sum())


class Skipped(NamedTuple):
    """Steps that were skipped since the last report."""

    first: int  # the step
    steps: int
    in_a_row: int  # up to now
    pair: int | None  # of the first step: one whose loss is not finite, if there is one


class Guard:
    """Lets an optimizer step where the gradient is finite, and remembers where it was not. All on the device."""

    def __init__(self, device: torch.device):
        self._state = torch.zeros(3, dtype=torch.int64, device=device)  # first step, count, in a row
        self._pair = torch.full((), NO_PAIR, dtype=torch.int64, device=device)

    def look(self, index_P: Tensor, loss_P: Tensor) -> None:
        """Remember the first pair whose loss is not finite."""
        if len(index_P):
            bad = torch.where(torch.isfinite(loss_P), NO_PAIR, index_P).amin()
            self._pair = torch.where(self._pair == NO_PAIR, bad, self._pair)

    def step(self, optim: Optimizer, norm: Tensor, *, number: int) -> None:
        """Take the optimizer's step `number` if the norm of the gradient is finite."""
        bad = ~torch.isfinite(norm)
        first, count, in_a_row = self._state.unbind()
        self._state = torch.stack([torch.where(bad & (count == 0), number, first), count + bad, (in_a_row + 1) * bad])
        if getattr(optim, "_step_supports_amp_scaling", False):
            # How torch's fused optimizers skip a step: its gradient scaler sets the same two.
            optim.grad_scale, optim.found_inf = None, bad.float()  # type: ignore[attr-defined]
            optim.step()
            del optim.grad_scale, optim.found_inf  # type: ignore[attr-defined]
        elif not bad:  # waits for the device
            optim.step()

    def report(self) -> Skipped | None:
        """What was skipped since the last report, if anything. All ranks call this together. Waits for the device."""
        first, count, in_a_row = (int(value) for value in self._state.tolist())
        if not count:
            return None
        if num_ranks() > 1:
            dist.all_reduce(self._pair, dist.ReduceOp.MIN)
        pair = int(self._pair)
        self._state[1] = 0
        self._pair.fill_(NO_PAIR)
        return Skipped(first, count, in_a_row, None if pair == NO_PAIR else pair)


@dataclass
class GuardCallback(Callback):
    """Says which steps were skipped and why, and stops the run when there is no end to them.

    A train module adds one to a trainer that has none.

    :param display: where it is said. None: in the log, as is usual in a script.
    :param origin: what a pair of the table is called.
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
        self._warn(f"step {found.first} was skipped{more}: {self._cause(found)}")
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
            return f"the loss of {self.origin(found.pair)} is not finite. The weights are as before."
        pair = self._blame() if found.first == self.step else None
        if pair is not None:
            return f"the gradient of {self.origin(pair)} is not finite. The weights are as before."
        return "its gradient is not finite, though the loss of every pair is. The weights are as before."

    def _blame(self) -> int | None:
        """The pair of this step whose gradient alone is not finite. All ranks search together."""
        module, loader = self.trainer.train_module, self.trainer.data_loader
        if self._step is None or self._step.index is None or not isinstance(loader, PairLoader):
            return None
        for pair in self._step.index.tolist():
            if not module.is_finite(loader.step(np.array([pair]))):  # type: ignore[attr-defined]
                return int(pair)
        return None
