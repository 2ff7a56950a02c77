"""The first of two passes, for losses that depend on the global batch, such as aot, kto or the balance of experts.

It computes no gradients. For losses that couple pairs, it collects the log-probabilities of all comparisons from all
ranks, computes the loss of the batch and its slope, the derivative with respect to each log-probability. The second
pass is the usual one, but back-propagates sum(slope * logp), which has the gradient of the loss. Losses of labels need
only one or two numbers (`Anchors`), and the balance of experts the share of the tokens that each expert gets; no
gradient flows through either. So a step takes one more forward pass, and is exact in every layout.

N: comparisons of the global batch (a pair is one), P: those of a microbatch, L: layers with experts, E: experts.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from isopref.batch.step import Linear, MismatchedWork, Step, Work
from isopref.engine.metrics import over_ranks
from isopref.engine.references import Scored
from isopref.normalize import balance_coefficients
from isopref.objectives.coupled import Whole
from isopref.objectives.labels import midpoint
from isopref.objectives.loss import Loss
from isopref.types import Anchors, LabelLogps, PairLogps

Score = Callable[[Work], Scored]  # of work on the device
Gain = Callable[[MismatchedWork], Tensor]  # of work on the device: log(policy / reference) of each of its pairs
Seen = Sequence[tuple[Work, Scored]]  # every microbatch of this rank


class FirstPass:
    """Adds to a step what its loss needs to know about the global batch, and keeps what it needs from earlier ones."""

    def __init__(self, objective: Loss, device: torch.device, group: dist.ProcessGroup | None = None):
        self.objective = objective
        self.group = group
        # For pairs, see Whole.past. For labels, see `midpoint`.
        shape = (2, 2) if objective.kind == "labels" else (2,)
        self.past = torch.zeros(shape, dtype=torch.float64, device=device)
        self._next = self.past

    def prepare(self, step: Step, score: Score, gain: Gain) -> Step:
        """The same step, with what its loss needs to know added to every microbatch. All ranks call this together."""
        seen = self._score_all(step, score) if self.objective.scores_twice else ()
        work = step.work
        if self.objective.coupled:
            work = self._slopes(work, self._gathered(step, seen))
        if self.objective.anchors:
            anchors = Anchors(kl=self._kl(step, gain), midpoint=self._midpoint(step, seen))
            work = tuple(replace(one, anchors=anchors) for one in work)
        if self.objective.balance_weight:
            share_LE = balance_coefficients(self._tokens_by_expert(seen), step.num_tokens)
            work = tuple(replace(one, balance_share=share_LE) for one in work)
        return replace(step, work=work)

    def keep(self) -> None:
        """Add the last prepared step to the past, unless it is not finite. Called once its gradient is computed."""
        self.past = torch.where(self._next.isfinite().all(), self._next, self.past)

    def state_dict(self) -> dict[str, Tensor]:
        return {"past": self.past.cpu()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.past = self._next = state["past"].to(self.past.device)

    @torch.no_grad()
    def _score_all(self, step: Step, score: Score) -> Seen:
        on_device = (work.to(self.past.device) for work in step.work)
        return [(work, score(work)) for work in on_device]

    def _gathered(self, step: Step, seen: Seen) -> Tensor:
        """Log-probabilities, token counts, gaps and shares of all comparisons, in the global batch's order: 8, N."""
        table_8N = torch.zeros(8, step.num_comparisons, dtype=torch.float64, device=self.past.device)
        for work, scored in seen:
            policy, ref = scored.policy, scored.ref
            assert isinstance(policy, PairLogps)
            assert isinstance(ref, PairLogps)
            gap = torch.zeros_like(policy.chosen) if policy.gap is None else policy.gap
            logps = policy.chosen, policy.rejected, ref.chosen, ref.rejected
            columns = (*logps, policy.num_chosen, policy.num_rejected, gap, work.loss_share)
            table_8N[:, work.place] = torch.stack([column.double() for column in columns])
        return over_ranks(table_8N, self.group)  # every pair is on one rank, and zero on the others

    @torch.no_grad()
    def _kl(self, step: Step, gain: Gain) -> Tensor | None:
        """KTO's estimate of the KL divergence (section 4.1): the mean gain of mismatched pairs, at least 0."""
        if not self.objective.needs_mismatched:
            return None
        total = torch.zeros((), dtype=torch.float64, device=self.past.device)
        for one in step.mismatched:
            work = one.to(self.past.device)
            total += gain(work).double() @ work.share
        return over_ranks(total, self.group).clamp(min=0)

    @torch.no_grad()
    def _midpoint(self, step: Step, seen: Seen) -> Tensor | None:
        if "midpoint" not in self.objective.anchors:
            return None
        assert step.lengths is not None, "of the whole batch"
        batch_22 = torch.zeros_like(self.past)
        for work, scored in seen:
            policy, ref = scored.policy, scored.ref
            assert isinstance(policy, LabelLogps)
            assert isinstance(ref, LabelLogps)
            shares = torch.stack([work.loss_share * policy.good, work.loss_share * ~policy.good])
            batch_22 += torch.stack([shares @ (policy.logp - ref.logp).double(), shares.sum(dim=1)], dim=1)
        # The figures of a batch are means, so it is weighted by its number of answers.
        self._next = self.past + len(step.lengths.answer) * over_ranks(batch_22, self.group)
        return midpoint(self._next)

    def _tokens_by_expert(self, seen: Seen) -> Tensor:
        """The tokens of the global batch that each expert got: L, E."""
        routings = [scored.policy_readout.routing for _, scored in seen]
        return over_ranks(torch.stack([one[0].double() for one in routings if one is not None]).sum(dim=0), self.group)

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
