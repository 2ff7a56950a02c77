"""The first pass of a step whose loss couples the pairs of the global batch, such as aot.

It has no gradient and gives the log-probabilities of all pairs on all ranks; from these follow the loss of the batch
and its slope, the derivative by each log-probability. The second pass is the usual one and back-propagates
sum(slope * logp), which has the gradient of the loss. So a step takes one forward pass more, and stays exact however it
is cut.

N: pairs of the global batch, P: pairs of a microbatch.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from isopref.engine.step import Linear, Step, Work
from isopref.losses import PairLoss, Whole
from isopref.types import PairLogps

Score = Callable[[Work], tuple[PairLogps, PairLogps]]  # work on the device -> policy and reference


class Coupling:
    """Makes steps linear in their log-probabilities, and remembers what a loss keeps from batch to batch."""

    def __init__(self, objective: PairLoss, device: torch.device):
        self.objective = objective
        self.past = torch.zeros(2, dtype=torch.float64, device=device)
        self._next = self.past

    def linear(self, step: Step, score: Score) -> Step:
        """The same step with the slope of its loss in every microbatch. All ranks call this together."""
        policy, ref, share = self._gather(step, score)
        whole = Whole(share, self.past)
        leaves = policy.chosen.requires_grad_(), policy.rejected.requires_grad_()
        loss_N = self.objective(policy, ref, whole=whole)
        slope_2N = torch.stack(torch.autograd.grad((share * loss_N).sum(), leaves))
        with torch.no_grad():
            self._next = whole.with_this(policy, ref)
            at_reference_N = self.objective(ref, ref, whole=whole)
        work = (
            replace(one, linear=Linear(slope_2N[:, at], loss_N.detach()[at], at_reference_N[at]))
            for one in step.work
            for at in (one.place.to(self.past.device),)
        )
        return replace(step, work=tuple(work))

    def keep(self) -> None:
        """The last step that was made linear is trained: what it adds to the past counts from now on, if finite."""
        self.past = torch.where(self._next.isfinite().all(), self._next, self.past)

    def state_dict(self) -> dict[str, Tensor]:
        return {"past": self.past.cpu()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.past = state["past"].to(self.past.device)

    @torch.no_grad()
    def _gather(self, step: Step, score: Score) -> tuple[PairLogps, PairLogps, Tensor]:
        """Log-probabilities of policy and reference and the shares of all pairs, in the order of the global batch."""
        table_7N = torch.zeros(7, step.num_pairs, dtype=torch.float64, device=self.past.device)
        for one in step.work:
            work = one.to(self.past.device)
            policy, ref = score(work)
            columns = (policy.chosen, policy.rejected, ref.chosen, ref.rejected, policy.num_chosen, policy.num_rejected)
            table_7N[:, work.place] = torch.stack([column.double() for column in (*columns, work.loss_share)])
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(table_7N)  # every pair is on one rank, and zero on the others
        chosen, rejected, ref_chosen, ref_rejected, num_chosen, num_rejected, share = table_7N
        counts = num_chosen, num_rejected
        return PairLogps(chosen, rejected, *counts), PairLogps(ref_chosen, ref_rejected, *counts), share
