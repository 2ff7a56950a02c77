"""One global batch as one rank sees it: its microbatches, and what is known of the whole batch.

A `Step` comes from a table of pairs and a plan (isopref's own loader), or from a padded batch in the form that
OLMo-core scripts use (padded.py). Both end in the same list of microbatches.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from isopref.data import packing
from isopref.data.rows import FILLER_TOKENS, build_microbatch
from isopref.data.table import PairTable
from isopref.normalize import Weighting, coefficients, pair_weights, token_coefficients
from isopref.types import CHOSEN, PROMPT, IntArray, Microbatch, moved


@dataclass(frozen=True)
class Linear:
    """A loss that couples pairs, at the log-probabilities that a first pass found (see first_pass.py)."""

    slope: Tensor  # 2, P: derivative of the batch's loss by the log-probability of chosen and rejected
    loss: Tensor  # P
    loss_at_reference: Tensor  # P: what it would be if the policy were the reference


@dataclass(frozen=True)
class Work:
    """One microbatch with what each of its P pairs counts for."""

    microbatch: Microbatch
    index: Tensor  # P: which pair of the table, to look up the reference
    place: Tensor  # P: which pair of the global batch
    loss_share: Tensor  # P: coefficient in the loss; they sum to one over the global batch
    mean_share: Tensor  # P: one over the pairs of the global batch
    nll_share: Tensor  # P: what the chosen answer counts for in a mean over the chosen tokens of the global batch
    linear: Linear | None = None  # where the objective is coupled
    balance_share: Tensor | None = None  # L, E: what the experts' probabilities count for, where they are balanced

    def to(self, device: torch.device) -> "Work":
        return moved(self, lambda tensor: tensor.to(device, non_blocking=True))


@dataclass(frozen=True)
class Step:
    """This rank's share of a global batch. The counts are of the whole batch, over all ranks."""

    work: tuple[Work, ...]
    num_pairs: int
    num_tokens: int  # real tokens of both sequences of every pair
    padding_fraction: float  # share of the token slots of all microbatches that hold no token
    # The whole batch: pairs of the table, and their lengths (num_pairs, 3). None where a rank knows only its own.
    index: IntArray | None = None
    lengths: IntArray | None = None

    def pinned(self) -> "Step":
        """The same in page-locked memory, from which a copy to a GPU does not wait."""
        return replace(self, work=tuple(moved(work, Tensor.pin_memory) for work in self.work))


def build_step(
    table: PairTable,
    index: IntArray,
    plan: list[list[packing.Group]],
    kind: packing.RowKind,
    weighting: Weighting,
    *,
    rank: int = 0,
) -> Step:
    """This rank's share of the global batch `index` (pairs of `table`), cut as `plan` says (by rank)."""
    lengths = table.lengths[index]
    loss_share = coefficients(pair_weights(lengths, weighting, table.weights[index]))
    mean_share = coefficients(np.ones(len(index)))
    nll_share = token_coefficients(table.weights[index], lengths[:, CHOSEN])
    work = [
        Work(
            build_microbatch([table.tokens(int(i)).example for i in index[group]], kind),
            torch.from_numpy(index[group]),
            torch.from_numpy(group),
            torch.from_numpy(loss_share[group]),
            torch.from_numpy(mean_share[group]),
            torch.from_numpy(nll_share[group]),
        )
        for group in (np.asarray(group, np.int64) for group in plan[rank])
    ]
    groups = [group for of_rank in plan for group in of_rank]
    filler = FILLER_TOKENS * (2 if kind == "padded_separate" else 1)
    slots = sum(packing.padded_tokens(lengths[group], kind) if group else filler for group in groups)
    filled = int(lengths.sum()) + (0 if kind == "shared" else int(lengths[:, PROMPT].sum()))
    return Step(
        work=tuple(work),
        num_pairs=len(index),
        num_tokens=int(lengths[:, CHOSEN:].sum()) + 2 * int(lengths[:, PROMPT].sum()),
        index=index,
        lengths=lengths,
        padding_fraction=1 - filled / slots,
    )
