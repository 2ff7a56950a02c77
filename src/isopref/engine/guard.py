"""NaN and Inf never reach the weights, and weights with NaN or Inf never reach the disk.

A non-finite loss makes its own gradient NaN, and the reduction over ranks spreads it, so the gradient norm tells every
rank alike to skip the step. This takes no extra communication, and the host finds out only when a step logs. An update
can still overflow, for example with a huge learning rate, so the weights are checked before they are saved
(callbacks/checkpointer.py). P: pairs of a microbatch.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from isopref.ranks import num_ranks

MOST_IN_A_ROW = 5  # skipped steps before a run stops
NO_PAIR = torch.iinfo(torch.int64).max


def poisoned(loss: Tensor, loss_P: Tensor) -> Tensor:
    """The same loss, bit for bit; if it or a pair's loss is not finite, its gradient is NaN."""
    return loss * (1 + 0 * loss.detach() + (0 * loss_P.detach()).sum())


class Skipped(NamedTuple):
    """Steps skipped since the last report."""

    first: int  # the step
    steps: int
    in_a_row: int  # up to now
    pair: int | None  # a pair of the first skipped step whose loss is not finite, if there is one


class Guard:
    """Takes optimizer steps only if the gradient is finite, and records those it skips. All on the device."""

    def __init__(self, device: torch.device):
        self._state = torch.zeros(3, dtype=torch.int64, device=device)  # first step, count, in a row
        self._pair = torch.full((), NO_PAIR, dtype=torch.int64, device=device)

    def look(self, index_P: Tensor, loss_P: Tensor) -> None:
        """Record the first pair with a non-finite loss."""
        if len(index_P):
            bad = torch.where(torch.isfinite(loss_P), NO_PAIR, index_P).amin()
            self._pair = torch.where(self._pair == NO_PAIR, bad, self._pair)

    def step(self, optim: Optimizer, norm: Tensor, *, number: int) -> None:
        """Take the optimizer's step `number` if the norm of the gradient is finite."""
        bad = ~torch.isfinite(norm)
        first, count, in_a_row = self._state.unbind()
        self._state = torch.stack([torch.where(bad & (count == 0), number, first), count + bad, (in_a_row + 1) * bad])
        if getattr(optim, "_step_supports_amp_scaling", False):
            # How torch's fused optimizers skip a step: torch's gradient scaler sets the same two attributes.
            optim.grad_scale, optim.found_inf = None, bad.float()  # type: ignore[attr-defined]
            optim.step()
            del optim.grad_scale, optim.found_inf  # type: ignore[attr-defined]
        elif not bad:  # synchronises with the device
            optim.step()

    def report(self) -> Skipped | None:
        """What was skipped since the last report, if anything. All ranks call this together. Synchronises."""
        first, count, in_a_row = (int(value) for value in self._state.tolist())
        if not count:
            return None
        if num_ranks() > 1:
            dist.all_reduce(self._pair, dist.ReduceOp.MIN)
        pair = int(self._pair)
        self._state[1] = 0
        self._pair.fill_(NO_PAIR)
        return Skipped(first, count, in_a_row, None if pair == NO_PAIR else pair)
