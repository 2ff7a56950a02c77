"""The first pass of a step whose loss couples what the microbatches hold, such as aot or the balance of experts.

It has no gradient. It gives the log-probabilities of all comparisons on all ranks; from these follow the loss of the
batch and its slope, the derivative by each log-probability. The second pass is the usual one and back-propagates
sum(slope * logp), which has the gradient of the loss. The share of the tokens that each expert gets, which has no
gradient, comes from the first pass too. So a step takes one forward pass more, and stays exact however it is cut.

N: comparisons of the global batch (a pair is one), P: those of a microbatch, L: layers with experts, E: experts.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from isopref.batch.step import Linear, Step, Work
from isopref.engine.metrics import over_ranks
from isopref.engine.references import Scored
from isopref.normalize import balance_coefficients
from isopref.objectives.coupled import Whole
from isopref.objectives.loss import Loss
from isopref.types import PairLogps

Score = Callable[[Work], Scored]  # of work on the device


class FirstPass:
    """Makes steps linear in what their microbatches give, and remembers what a loss keeps from batch to batch."""

    def __init__(self, objective: Loss, device: torch.device, group: dist.ProcessGroup | None = None):
        self.objective = objective
        self.group = group
        self.past = torch.zeros(2, dtype=torch.float64, device=device)
        self._next = self.past

    def linear(self, step: Step, score: Score) -> Step:
        """The same step, with what the batch's loss needs to know in every microbatch. All ranks call this together."""
        table_8N, tokens_LE = self._score_all(step, score)
        work = step.work
        if self.objective.coupled:
            work = self._slopes(work, table_8N)
        if tokens_LE is not None:
            share_LE = balance_coefficients(tokens_LE, step.num_tokens)
            work = tuple(replace(one, balance_share=share_LE) for one in work)
        return replace(step, work=work)

    def keep(self) -> None:
        """The last step that was made linear is trained: what it adds to the past counts from now on, if finite."""
        self.past = torch.where(self._next.isfinite().all(), self._next, self.past)

    def state_dict(self) -> dict[str, Tensor]:
        return {"past": self.past.cpu()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.past = self._next = state["past"].to(self.past.device)

    @torch.no_grad()
    def _score_all(self, step: Step, score: Score) -> tuple[Tensor, Tensor | None]:
        """What is known of all comparisons in the order of the global batch, and the tokens that each expert got."""
        table_8N = torch.zeros(8, step.num_comparisons, dtype=torch.float64, device=self.past.device)
        routings = []
        for one in step.work:
            work = one.to(self.past.device)
            scored = score(work)
            policy, ref, routing = scored.policy, scored.ref, scored.policy_readout.routing
            assert isinstance(policy, PairLogps)
            assert isinstance(ref, PairLogps)
            gap = torch.zeros_like(policy.chosen) if policy.gap is None else policy.gap
            logps = policy.chosen, policy.rejected, ref.chosen, ref.rejected
            columns = (*logps, policy.num_chosen, policy.num_rejected, gap, work.loss_share)
            table_8N[:, work.place] = torch.stack([column.double() for column in columns])
            if routing is not None:
                routings.append(routing[0].double())
        tokens_LE = torch.stack(routings).sum(dim=0) if routings else None
        table_8N = over_ranks(table_8N, self.group)  # every pair is on one rank, and zero on the others
        return table_8N, None if tokens_LE is None else over_ranks(tokens_LE, self.group)

    def _slopes(self, every: tuple[Work, ...], table_8N: Tensor) -> tuple[Work, ...]:
        chosen, rejected, ref_chosen, ref_rejected, num_chosen, num_rejected, gap, share = table_8N
        policy = PairLogps(chosen.requires_grad_(), rejected.requires_grad_(), num_chosen, num_rejected, gap=gap)
        ref = PairLogps(ref_chosen, ref_rejected, num_chosen, num_rejected, gap=gap)
        whole = Whole(share, self.past)
        loss_N = self.objective(policy, ref, whole=whole)
        slope_2N = torch.stack(torch.autograd.grad((share * loss_N).sum(), (policy.chosen, policy.rejected)))
        with torch.no_grad():
            self._next = whole.with_this(policy, ref)
            at_reference_N = self.objective(ref, ref, whole=whole)
        return tuple(
            replace(work, linear=Linear(slope_2N[:, at], loss_N.detach()[at], at_reference_N[at]))
            for work in every
            for at in (work.place.to(self.past.device),)
        )
