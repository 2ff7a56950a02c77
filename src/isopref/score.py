"""The one score path: log-probabilities of answers, for the policy, the reference and evaluation alike.

A: answers, M: comparisons, of a microbatch or of a table.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from isopref.batch.packing import Budget, check_budget, plan_step
from isopref.batch.rows import build_microbatch, in_rounds
from isopref.data.mismatched import Mismatched
from isopref.data.table import ExampleTable
from isopref.errors import ConfigError
from isopref.examples import Example, Lengths
from isopref.models.parallel import data_group, reshard, speaks
from isopref.ranks import num_ranks, own_rank
from isopref.types import LOGPS_ALONE, FloatArray, IntArray, Microbatch, Needs, PairLogps, Readout

WINDOW = 256  # examples planned together when many are scored


def score(policy: nn.Module, microbatch: Microbatch, needs: Needs = LOGPS_ALONE) -> Readout:
    """A policy's scores of a microbatch, with gradients if they are enabled."""
    found: Readout = policy(microbatch, needs)
    return found


@dataclass(frozen=True, init=False)
class TableLogps:
    """Log-probabilities of the answers of a table, on the host in float64. Takes arrays or tensors."""

    answers: FloatArray  # A
    heads: FloatArray | None = None  # 2, M: of better and worse answers, up to the length of the shorter one
    mismatched: FloatArray | None = None  # N: of prompts with other examples' answers (data/mismatched.py)

    def __init__(
        self,
        answers: FloatArray | Tensor,
        heads: FloatArray | Tensor | None = None,
        mismatched: FloatArray | Tensor | None = None,
    ):
        object.__setattr__(self, "answers", _on_host(answers))
        object.__setattr__(self, "heads", None if heads is None else _on_host(heads))
        object.__setattr__(self, "mismatched", None if mismatched is None else _on_host(mismatched))
        if self.answers.ndim != 1 or (self.heads is not None and self.heads.ndim != 2):
            shapes = [x.shape for x in (self.answers, self.heads) if x is not None]
            raise ConfigError(
                f"TableLogps: needs one value for every answer of the table; the shapes are {shapes}. For pairs, use "
                "TableLogps.of_pairs(chosen, rejected)."
            )

    @classmethod
    def of_pairs(cls, chosen: FloatArray | Tensor, rejected: FloatArray | Tensor) -> "TableLogps":
        """The log-probabilities of a table of pairs."""
        sides = _on_host(chosen), _on_host(rejected)
        if sides[0].shape != sides[1].shape or sides[0].ndim != 1:
            raise ConfigError(
                "TableLogps.of_pairs: each needs one value for every pair; the shapes are "
                f"{sides[0].shape} and {sides[1].shape}."
            )
        return cls(np.stack(sides, axis=1).ravel())

    @property
    def every(self) -> FloatArray:
        """All values, in the order of reference/answers.py."""
        parts = (self.answers, self.heads, self.mismatched)
        return np.concatenate([part.ravel() for part in parts if part is not None])

    @property
    def chosen(self) -> FloatArray:
        """For a table of pairs: log-probabilities of the chosen answers."""
        return self.answers[::2]

    @property
    def rejected(self) -> FloatArray:
        """For a table of pairs: log-probabilities of the rejected answers."""
        return self.answers[1::2]

    def compared(self, lengths: Lengths, gaps: FloatArray | None = None) -> PairLogps:
        """The comparisons of the corresponding table as pairs; with the table's gaps, if given."""
        chosen, rejected = (torch.from_numpy(self.answers[side]) for side in lengths.sides)
        num_chosen, num_rejected = (torch.from_numpy(count.astype(np.int64)) for count in lengths.compared_tokens)
        heads = None if self.heads is None else torch.from_numpy(self.heads)
        gap = None if gaps is None else torch.from_numpy(gaps)
        return PairLogps(chosen, rejected, num_chosen, num_rejected, heads=heads, gap=gap)


def _on_host(values: FloatArray | Tensor) -> FloatArray:
    array: FloatArray = values.detach().cpu().double().numpy() if isinstance(values, Tensor) else np.asarray(values)
    return array.astype(np.float64, copy=False)


class Examples(Protocol):
    """Anything that can be scored: a table, or some answers of one (reference/answers.py)."""

    @property
    def lengths(self) -> Lengths: ...

    def example(self, index: int) -> Example: ...

    def origin(self, index: int) -> str: ...


@torch.no_grad()
def score_table(
    policy: nn.Module,
    table: Examples,
    budget: Budget,
    *,
    device: torch.device,
    needs: Needs = LOGPS_ALONE,
    mismatched: bool = False,
    progress: Callable[[int], None] | None = None,
    scored: Callable[[IntArray, Tensor], None] | None = None,
) -> TableLogps:
    """Score every answer of a table without gradients. All ranks must call this: they share the work and the results.

    `needs`: also return heads. `mismatched`: also score prompts with other examples' answers, for kto. `progress` is
    called with the number of answers done since the last call, assuming that other ranks are as fast. `scored` is
    called with what this rank has just scored: some answers of the table, and their log-probabilities (float64, on the
    device). Raises ConfigError if an example is longer than the budget.
    """
    lengths = table.lengths
    if len(lengths):
        check_budget(lengths, budget, name=table.origin)
    group = data_group(policy)
    ranks = num_ranks(group)
    logp_A = torch.zeros(len(lengths.answer), dtype=torch.float64, device=device)
    head_2M = torch.zeros(2, len(lengths.compared) if needs.heads else 0, dtype=torch.float64, device=device)
    for index, microbatch in _microbatches(table, budget, own_rank(group), ranks):
        readout = score(policy, microbatch.to(device), needs)
        answers = in_rounds(lengths, index)
        found_A = readout.logp.double()
        logp_A[torch.from_numpy(answers).to(device)] = found_A
        if readout.head_logp is not None:
            head_2M[:, torch.from_numpy(lengths.comparisons_of(index)).to(device)] = readout.head_logp.double()
        if scored is not None and speaks(policy):
            scored(answers, found_A)
        if progress is not None:
            progress(len(answers) * ranks)
    if ranks > 1:
        for values in (logp_A, head_2M):  # every example was scored on one rank and is zero on the others
            dist.all_reduce(values, group=group)
    reshard(policy)
    found = TableLogps(logp_A.cpu().numpy(), head_2M.cpu().numpy() if needs.heads else None)
    if not mismatched:
        return found
    assert isinstance(table, ExampleTable), "mismatched pairs need a whole table"
    others = score_table(policy, Mismatched(table), budget, device=device, progress=progress)
    return TableLogps(found.answers, found.heads, others.answers)


def _microbatches(table: Examples, budget: Budget, rank: int, num_ranks: int) -> Iterator[tuple[IntArray, Microbatch]]:
    lengths = table.lengths
    num_passes = int(lengths.num_answers.max(initial=1))
    by_length = np.argsort(_tokens(lengths), kind="stable")[::-1]
    for start in range(0, len(lengths), WINDOW * num_ranks):
        window = by_length[start : start + WINDOW * num_ranks]
        for group in plan_step(lengths.select(window), budget, num_ranks=num_ranks)[rank]:
            index = window[np.array(group, np.int64)]
            examples = [table.example(int(i)) for i in index]
            yield index, build_microbatch(examples, budget.kind, num_passes=num_passes)


def _tokens(lengths: Lengths) -> IntArray:
    """Tokens of each example, its prompt once and all its answers: N."""
    of_answers = np.bincount(lengths.of_answer, lengths.answer, minlength=len(lengths)).astype(np.int64)
    return lengths.prompt + of_answers
