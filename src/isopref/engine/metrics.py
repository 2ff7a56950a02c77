"""Training metrics: sums on the device, one reduction over ranks on a step that logs, then one division.

Each microbatch adds, for each metric, the values of its pairs times their share of the global batch, so that the sum
over microbatches and ranks is the mean over the batch. `train/loss` uses the objective's weighting; `train/nll` weights
all chosen tokens equally, `train/balance` all tokens, and every other metric all pairs. Sums accumulate between two
logs; the logged value is the mean over those steps.
"""

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from isopref.batch.step import Work
from isopref.batch.terms import TERMS
from isopref.engine.references import Scored
from isopref.objectives.loss import Loss
from isopref.ranks import num_ranks, own_rank

# What is summed and logged. Of the gains, only the difference is logged (`train/margin`).
SUMS = (
    *("loss", "logps_chosen", "logps_rejected", "rewards_chosen", "rewards_rejected", "gains_chosen", "gains_rejected"),
    *("accuracy", "nll", "balance", "kl", "loss_at_reference", "gap_per_token"),
)
# Not logged: what the first step is checked against.
CHECKS = ("loss_at_reference", "gap_per_token")


def is_logged(name: str, objective: Loss) -> bool:
    """Whether a metric is meaningful for an objective: a reward model, for example, has no log-probabilities."""
    if name in ("logps_chosen", "logps_rejected", "nll"):
        return objective.readout == "logp"
    asked = {"balance": objective.balance_weight > 0, "kl": objective.needs_mismatched}
    return name not in CHECKS and asked.get(name, True)


def microbatch_sums(scored: Scored, loss: Tensor, *, objective: Loss, work: Work) -> Tensor:
    """What one microbatch adds to SUMS, float64. `loss` is that of its terms."""
    found = _means(scored, objective, work)
    readouts = scored.policy_readout, scored.ref_readout
    nll = -torch.stack([readout.logp for readout in readouts]).double() @ work.nll_share
    balance = nll.new_zeros(())
    if readouts[0].routing is not None and work.balance_share is not None:
        balance = (readouts[0].routing[1] * work.balance_share).sum()
    # If the policy is the reference, all gains are 0, and so are the anchors.
    at_reference = objective(scored.ref, scored.ref) if work.linear is None else work.linear.loss_at_reference
    added = objective.nll_weight * nll + objective.balance_weight * balance
    weighted = torch.stack([loss, at_reference]).double() @ work.loss_share + added
    found |= {"loss": weighted[0], "loss_at_reference": weighted[1], "nll": nll[0], "balance": balance}
    return torch.stack([found[name] for name in SUMS])


def _means(scored: Scored, objective: Loss, work: Work) -> dict[str, Tensor]:
    """What this microbatch adds to the means over chosen answers, over rejected ones and over pairs."""
    terms = TERMS[objective.kind]
    policy, ref = (
        objective.taken(terms.sides(readout, work.microbatch))
        for readout in (scored.policy_readout, scored.ref_readout)
    )
    gains, rewards = objective.gains(policy, ref), objective.rewards(policy, ref)
    gap = (policy.chosen - ref.chosen).abs() / policy.num_chosen
    gap = 0.5 * (gap + (policy.rejected - ref.rejected).abs() / policy.num_rejected)
    chosen, rejected, every = work.side_share
    kl = None if work.anchors is None else work.anchors.kl
    return {
        "logps_chosen": policy.chosen.double() @ chosen,
        "logps_rejected": policy.rejected.double() @ rejected,
        "rewards_chosen": rewards[0].double() @ chosen,
        "rewards_rejected": rewards[1].double() @ rejected,
        "gains_chosen": gains[0].double() @ chosen,
        "gains_rejected": gains[1].double() @ rejected,
        "accuracy": terms.right(*gains, work.microbatch, objective.threshold(work.anchors)) @ every,
        "gap_per_token": gap.double() @ every,
        "kl": every.sum() * (0.0 if kl is None else kl),  # a figure of the batch: shares add up to 1, so it counts once
    }


def over_ranks(sums: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The total over `group`, the ranks that divide the pairs among them (None: all ranks)."""
    total = sums.clone()
    if num_ranks(group) > 1:
        dist.all_reduce(total, group=group)
    return total


class MetricWindow:
    """Sums since the last log, on the device; each rank's own until they are reduced over `group` (None: all ranks)."""

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None = None):
        self.group = group
        self.sums = torch.zeros(len(SUMS), dtype=torch.float64, device=device)
        self.num_steps = np.zeros(3, np.int64)  # in all, with chosen answers, with rejected ones

    def add(self, step_sums: Tensor, has_sides: tuple[bool, bool] = (True, True)) -> None:
        self.sums += step_sums
        self.num_steps += (1, *has_sides)

    def reduce(self) -> dict[str, Tensor]:
        """The means over the window and all ranks, by name; starts a new window. One collective, no host sync.

        A mean over chosen answers covers only steps that have any, and is left out if none has; likewise for rejected.
        """
        num_steps = {name: int(self.num_steps[_side(name)]) for name in SUMS}
        sums = over_ranks(self.sums, self.group).unbind()
        means = {name: one / num_steps[name] for name, one in zip(SUMS, sums, strict=True) if num_steps[name]}
        sides = means.pop("gains_chosen", None), means.pop("gains_rejected", None)
        if sides[0] is not None and sides[1] is not None:
            means["margin"] = sides[0] - sides[1]
        self.sums, self.num_steps = torch.zeros_like(self.sums), np.zeros_like(self.num_steps)
        return means

    def state_dict(self) -> dict[str, Tensor]:
        """For a checkpoint between two logs: the sums of all ranks."""
        return {"sums": over_ranks(self.sums, self.group).cpu(), "num_steps": torch.tensor(self.num_steps)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        # The run may resume on another number of ranks, so the first one takes all of the sums.
        self.sums = state["sums"].to(self.sums.device) * float(own_rank(self.group) == 0)
        self.num_steps = state["num_steps"].cpu().numpy().copy()


def _side(name: str) -> int:
    """Which steps count in the mean of that name: all, those with chosen answers, those with rejected ones."""
    return 1 if name.endswith("_chosen") else 2 if name.endswith("_rejected") else 0
