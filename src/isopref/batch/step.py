"""One global batch as one rank sees it: its own microbatches, and what it knows about the whole batch.

A `Step` comes from a table of examples and a plan (isopref's own loader), or from a padded batch in the form that
OLMo-core scripts use (engine/padded.py). Both end in the same list of microbatches.

E: examples of a microbatch, A: their answers, M: their comparisons; a pair has one. T: terms of the loss, S: what the
metrics take as chosen and rejected (terms.py).
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from isopref.batch import packing
from isopref.batch.rows import FILLER_TOKENS, build_microbatch, in_rounds
from isopref.batch.terms import TERMS
from isopref.data.mismatched import Mismatched
from isopref.data.table import ExampleTable
from isopref.examples import Lengths
from isopref.normalize import Weighting, coefficients, token_coefficients
from isopref.types import Anchors, IntArray, Kind, Microbatch, moved


@dataclass(frozen=True)
class Linear:
    """A loss that couples comparisons, linearised at the log-probabilities of a first pass (engine/first_pass.py)."""

    slope: Tensor  # 2, M: derivative of the batch's loss with respect to the log-probability of chosen and rejected
    loss: Tensor  # M
    loss_at_reference: Tensor  # M: what the loss would be if the policy were the reference


@dataclass(frozen=True)
class Work:
    """One microbatch with the coefficients of its T terms."""

    microbatch: Microbatch
    index: Tensor  # E: which examples of the table
    answers: Tensor  # A: which answer of the table, to look up the reference
    comparisons: Tensor  # M: which comparison of the table, likewise
    place: Tensor  # M: which comparison of the global batch
    example: Tensor  # T: which example of the table the term is of
    loss_share: Tensor  # T: coefficient in the loss
    side_share: Tensor  # 3, S: coefficients in the means over chosen, over rejected and over all of the global batch
    nll_share: Tensor  # A: coefficient in the mean over the chosen tokens of the global batch; 0 if not chosen
    linear: Linear | None = None  # if the objective couples pairs
    anchors: Anchors | None = None  # if the objective measures gains against them
    balance_share: Tensor | None = None  # L, E: coefficients of the experts' probabilities, if they are balanced

    def to(self, device: torch.device) -> "Work":
        return moved(self, lambda tensor: tensor.to(device, non_blocking=True))


@dataclass(frozen=True)
class MismatchedWork:
    """One microbatch of prompts, each with an answer of another example (data/mismatched.py). It has no gradient."""

    microbatch: Microbatch
    index: Tensor  # E: which examples of the table the prompts are of
    share: Tensor  # E: coefficient in a mean over the global batch

    def to(self, device: torch.device) -> "MismatchedWork":
        return moved(self, lambda tensor: tensor.to(device, non_blocking=True))


@dataclass(frozen=True)
class Step:
    """This rank's share of a global batch. The counts are of the whole batch, over all ranks."""

    work: tuple[Work, ...]
    num_examples: int
    num_comparisons: int
    num_terms: int  # of the loss; for lists, comparisons
    num_tokens: int  # real tokens of all sequences, the prompt counted in each
    padding_fraction: float  # share of the token slots of all microbatches that hold no token
    # The whole batch: examples of the table, and their lengths. None if a rank knows only its own share.
    index: IntArray | None = None
    lengths: Lengths | None = None
    has_sides: tuple[bool, bool] = (True, True)  # whether there are chosen and rejected answers
    mismatched: tuple[MismatchedWork, ...] = ()  # this rank's share, if the loss needs mismatched pairs

    def pinned(self) -> "Step":
        """A copy in page-locked memory, from which transfers to a GPU are asynchronous."""
        return replace(
            self,
            work=tuple(moved(work, Tensor.pin_memory) for work in self.work),
            mismatched=tuple(moved(work, Tensor.pin_memory) for work in self.mismatched),
        )


def build_step(
    table: ExampleTable,
    index: IntArray,
    plan: list[list[packing.Group]],
    kind: packing.RowKind,
    weighting: Weighting,
    *,
    rank: int = 0,
    loss_kind: Kind = "pairs",
) -> Step:
    """This rank's share of the global batch `index` (examples of `table`), cut as `plan` says (by rank)."""
    terms = TERMS[loss_kind]
    lengths, own = table.lengths.select(index), table.weights[index]
    scores = table.scores[table.lengths.answers_of(index)]
    gaps = table.gaps[table.lengths.comparisons_of(index)]
    weights, example = terms.weights(lengths, weighting, own, gaps), terms.example(lengths)
    loss_share = coefficients(weights.of_term, total=weights.total)
    side_share = terms.side_shares(lengths, scores)
    nll_share = token_coefficients(terms.liked(lengths, scores, own), lengths.trained)
    num_passes = int(lengths.num_answers.max())

    def work(group: IntArray) -> Work:
        of_table, some = index[group], terms.of(lengths, group)
        examples = [table.example(int(i)) for i in of_table]
        return Work(
            build_microbatch(examples, kind, num_passes=num_passes),
            index=torch.from_numpy(of_table),
            answers=torch.from_numpy(in_rounds(table.lengths, of_table)),
            comparisons=torch.from_numpy(table.lengths.comparisons_of(of_table)),
            place=torch.from_numpy(lengths.comparisons_of(group)),
            example=torch.from_numpy(index[example[some]]),
            loss_share=torch.from_numpy(loss_share[some]),
            side_share=torch.from_numpy(side_share[:, terms.of_sides(lengths, group)]),
            nll_share=torch.from_numpy(nll_share[in_rounds(lengths, group)]),
        )

    slots = sum(_slots(lengths, group, kind, num_passes) for of_rank in plan for group in of_rank)
    filled = int(lengths.tree.sum() if kind == "shared" else lengths.sequence.sum())
    return Step(
        work=tuple(work(np.asarray(group, np.int64)) for group in plan[rank]),
        num_examples=len(index),
        num_comparisons=len(lengths.compared),
        num_terms=side_share.shape[1],
        num_tokens=int(lengths.sequence.sum()),
        index=index,
        lengths=lengths,
        padding_fraction=1 - filled / slots,
        has_sides=(bool(side_share[0].any()), bool(side_share[1].any())),
    )


def build_mismatched(
    mismatched: Mismatched, index: IntArray, plan: list[list[packing.Group]], kind: packing.RowKind, *, rank: int = 0
) -> tuple[MismatchedWork, ...]:
    """This rank's share of the mismatched pairs of the global batch `index`, cut as `plan` says (by rank)."""
    share = coefficients(mismatched.table.weights[index])

    def work(group: IntArray) -> MismatchedWork:
        examples = [mismatched.example(int(i)) for i in index[group]]
        return MismatchedWork(
            build_microbatch(examples, kind, num_passes=1),
            index=torch.from_numpy(index[group]),
            share=torch.from_numpy(share[group]),
        )

    return tuple(work(np.asarray(group, np.int64)) for group in plan[rank])


def _slots(lengths: Lengths, group: packing.Group, kind: packing.RowKind, num_passes: int) -> int:
    """Token slots of a microbatch, including the fillers of passes without an answer."""
    passes = num_passes if kind == "padded_separate" else 1
    used = int(lengths.num_answers[group].max(initial=0)) if kind == "padded_separate" else min(1, len(group))
    return packing.padded_tokens(lengths, group, kind) + (passes - used) * FILLER_TOKENS
