"""The one score path: log-probabilities of completions, for the policy, the reference and evaluation alike.

P: pairs of a microbatch, N: pairs of a table.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from isopref.data.packing import Budget, check_budget, plan_step
from isopref.data.rows import build_microbatch
from isopref.data.table import PairTable
from isopref.errors import ConfigError
from isopref.models.parallel import data_group, reshard, speaks
from isopref.ops.take import take
from isopref.ranks import num_ranks, own_rank
from isopref.types import LOGPS_ALONE, FloatArray, IntArray, Microbatch, Needs, PairLogps, Readout

WINDOW = 256  # pairs planned together when a whole table is scored


def score(policy: nn.Module, microbatch: Microbatch, needs: Needs = LOGPS_ALONE) -> Readout:
    """What a policy says of a microbatch, with gradient where gradients are on."""
    found: Readout = policy(microbatch, needs)
    return found


def compared(readout: Readout, microbatch: Microbatch, *, ld_alpha: float = 1.0) -> PairLogps:
    """The comparisons of a microbatch as pairs: the better answer of each is chosen, the worse one rejected.

    `ld_alpha`: what the tokens of an answer beyond the length of the other one count for (LD-DPO, Liu et al. 2024);
    below 1 it needs the readout's heads.
    """
    select = (microbatch.compared, microbatch.compared_copies)
    logp_2M = take(readout.logp, *select).view(2, -1)
    num_chosen, num_rejected = microbatch.num_tokens[microbatch.compared].view(2, -1)
    found = PairLogps(logp_2M[0], logp_2M[1], num_chosen, num_rejected)
    if readout.confidence is not None:
        weight = readout.confidence[microbatch.compared].view(2, -1).sum(dim=0).exp()  # WPO, Zhou et al. 2024
        found = replace(found, weight=weight)
    if ld_alpha == 1:
        return found
    assert readout.head_logp is not None, "not asked for"
    chosen, rejected = readout.head_logp + ld_alpha * (logp_2M - readout.head_logp)
    return replace(found, chosen=chosen, rejected=rejected, whole_chosen=logp_2M[0])


@dataclass(frozen=True, init=False)
class TableLogps:
    """Log-probabilities of the completions of N pairs, on the host in float64. Made of arrays or tensors."""

    chosen: FloatArray  # N
    rejected: FloatArray  # N
    whole_chosen: FloatArray | None = None  # N: see PairLogps

    def __init__(
        self,
        chosen: FloatArray | Tensor,
        rejected: FloatArray | Tensor,
        whole_chosen: FloatArray | Tensor | None = None,
    ):
        given = {"chosen": chosen, "rejected": rejected, "whole_chosen": whole_chosen}
        arrays = {name: None if values is None else _on_host(values) for name, values in given.items()}
        shapes = {name: array.shape for name, array in arrays.items() if array is not None}
        if len(set(shapes.values())) != 1 or len(shapes["chosen"]) != 1:
            raise ConfigError(f"TableLogps: each needs one value for every pair; the shapes are {shapes}.")
        for name, array in arrays.items():
            object.__setattr__(self, name, array)


def _on_host(values: FloatArray | Tensor) -> FloatArray:
    array: FloatArray = values.detach().cpu().double().numpy() if isinstance(values, Tensor) else np.asarray(values)
    return array.astype(np.float64, copy=False)


@torch.no_grad()
def score_table(
    policy: nn.Module,
    table: PairTable,
    budget: Budget,
    *,
    device: torch.device,
    ld_alpha: float = 1.0,
    progress: Callable[[int], None] | None = None,
    scored: Callable[[IntArray, Tensor], None] | None = None,
) -> TableLogps:
    """Score every pair of a table without gradients. All ranks call this; they share the work, each returns the whole.

    `progress` is called with the number of pairs done since the last call, taking the other ranks to be as fast.
    `scored` is called with what this rank has just scored: P pairs of the table, and their log-probabilities (2, P;
    float64, on the device). Raises ConfigError where a pair is longer than the budget.
    """
    if len(table):
        check_budget(table.lengths, budget, name=table.origin)
    group = data_group(policy)
    ranks = num_ranks(group)
    needs = Needs(heads=ld_alpha != 1)  # then what chosen is without it comes third
    logps_KN = torch.zeros(2 if ld_alpha == 1 else 3, len(table), dtype=torch.float64, device=device)
    for index, microbatch in _microbatches(table, budget, own_rank(group), ranks):
        on_device = microbatch.to(device)
        pairs = compared(score(policy, on_device, needs), on_device, ld_alpha=ld_alpha)
        columns = (pairs.chosen, pairs.rejected, pairs.whole_chosen)
        logps_KP = torch.stack([column.double() for column in columns if column is not None])
        logps_KN[:, torch.from_numpy(index).to(device)] = logps_KP
        if scored is not None and speaks(policy):
            scored(index, logps_KP[:2])
        if progress is not None:
            progress(len(index) * ranks)
    if ranks > 1:
        dist.all_reduce(logps_KN, group=group)  # every pair was scored on one rank and is zero on the others
    reshard(policy)
    return TableLogps(*logps_KN.cpu().numpy())


def _microbatches(table: PairTable, budget: Budget, rank: int, num_ranks: int) -> Iterator[tuple[IntArray, Microbatch]]:
    by_length = np.argsort(table.lengths.sum(axis=1), kind="stable")[::-1]
    for start in range(0, len(table), WINDOW * num_ranks):
        window = by_length[start : start + WINDOW * num_ranks]
        for group in plan_step(table.lengths[window], budget, num_ranks=num_ranks)[rank]:
            index = window[group] if group else window[:0]
            yield index, build_microbatch([table.tokens(int(i)).example for i in index], budget.kind)
