"""Training metrics: sums on the device, one reduction over ranks on a step that logs, then one division.

Each microbatch adds, for each metric, the values of its pairs times their share of the global batch (`train/loss` by
the objective's weighting, `train/nll` each chosen token and `train/balance` each token alike, all others each pair
alike), so that the sum over microbatches and ranks is the mean over the batch. Between two logs the sums of the steps
add up; what is logged is the mean over those steps.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from isopref.batch.step import Work
from isopref.batch.terms import TERMS
from isopref.engine.references import Scored
from isopref.objectives.loss import Loss
from isopref.ranks import num_ranks, own_rank

NAMES = (
    "loss",
    "logps_chosen",
    "logps_rejected",
    "rewards_chosen",
    "rewards_rejected",
    "margin",
    "accuracy",
    "nll",
    "balance",
)
# Not logged: what the first step is checked against.
CHECKS = ("loss_at_reference", "gap_per_token")


def logged_names(objective: Loss) -> list[str]:
    """The metrics that mean something for an objective: a reward model has no log-probabilities."""
    without = set() if objective.balance_weight else {"balance"}
    if objective.readout == "reward":
        without |= {"logps_chosen", "logps_rejected", "nll"}
    return [name for name in NAMES if name not in without]


def microbatch_sums(scored: Scored, loss: Tensor, *, objective: Loss, work: Work) -> Tensor:
    """What one microbatch adds to NAMES and CHECKS, float64. `loss` is that of its terms."""
    found = _means(scored, objective, work)
    readouts = scored.policy_readout, scored.ref_readout
    nll = -torch.stack([readout.logp for readout in readouts]).double() @ work.nll_share
    balance = nll.new_zeros(())
    if readouts[0].routing is not None and work.balance_share is not None:
        balance = (readouts[0].routing[1] * work.balance_share).sum()
    at_reference = objective(scored.ref, scored.ref) if work.linear is None else work.linear.loss_at_reference
    added = objective.nll_weight * nll + objective.balance_weight * balance
    weighted = torch.stack([loss, at_reference]).double() @ work.loss_share + added
    found |= {"loss": weighted[0], "loss_at_reference": weighted[1], "nll": nll[0], "balance": balance}
    return torch.stack([found[name] for name in NAMES + CHECKS])


def _means(scored: Scored, objective: Loss, work: Work) -> dict[str, Tensor]:
    """Means over the global batch of what is chosen and rejected, as far as this microbatch adds to them."""
    terms = TERMS[objective.kind]
    policy, ref = (
        objective.taken(terms.sides(readout, work.microbatch))
        for readout in (scored.policy_readout, scored.ref_readout)
    )
    gains, rewards = objective.gains(policy, ref), objective.rewards(policy, ref)
    gap = (policy.chosen - ref.chosen).abs() / policy.num_chosen
    gap = 0.5 * (gap + (policy.rejected - ref.rejected).abs() / policy.num_rejected)
    chosen, rejected, every = work.side_share
    gain = gains[0].double() @ chosen, gains[1].double() @ rejected
    return {
        "logps_chosen": policy.chosen.double() @ chosen,
        "logps_rejected": policy.rejected.double() @ rejected,
        "rewards_chosen": rewards[0].double() @ chosen,
        "rewards_rejected": rewards[1].double() @ rejected,
        "margin": gain[0] - gain[1],
        "accuracy": terms.right(*gains, work.microbatch, None) @ every,
        "gap_per_token": gap.double() @ every,
    }


def over_ranks(sums: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The sums of the ranks that share out the pairs (None: all ranks), added up."""
    total = sums.clone()
    if num_ranks(group) > 1:
        dist.all_reduce(total, group=group)
    return total


class MetricWindow:
    """Sums since the last log, on the device; each rank's own until they are reduced over `group` (None: all ranks)."""

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None = None):
        self.group = group
        self.sums = torch.zeros(len(NAMES) + len(CHECKS), dtype=torch.float64, device=device)
        self.num_steps = 0

    def add(self, step_sums: Tensor) -> None:
        self.sums += step_sums
        self.num_steps += 1

    def reduce(self) -> dict[str, Tensor]:
        """The means over the window and all ranks, by name; starts a new window. One collective, no host sync."""
        means = over_ranks(self.sums, self.group) / max(1, self.num_steps)
        self.sums = torch.zeros_like(self.sums)
        self.num_steps = 0
        return dict(zip(NAMES + CHECKS, means.unbind(), strict=True))

    def state_dict(self) -> dict[str, Tensor]:
        """For a checkpoint between two logs: the sums of all ranks."""
        return {"sums": over_ranks(self.sums, self.group).cpu(), "num_steps": torch.tensor(self.num_steps)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        # Any number of ranks may go on; the first one takes the sums.
        self.sums = state["sums"].to(self.sums.device) * float(own_rank(self.group) == 0)
        self.num_steps = int(state["num_steps"])
