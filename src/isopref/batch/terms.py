"""The terms of a loss, by its kind: comparisons of two answers, answers of ranked lists, or labelled answers.

Everything that depends on the kind of a loss is here: how its terms look in a microbatch, their weights, and which
answers the metrics take as chosen and rejected. `TERMS` has one entry for each kind.

N: examples, A: answers, M: comparisons of some examples; T: their terms; S: M for pairs and lists, A for labels.
"""

from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from isopref.batch.rows import in_rounds
from isopref.examples import Lengths
from isopref.normalize import Weighting, Weights, comparison_weights, label_weights, list_weights, side_coefficients
from isopref.ops.take import take
from isopref.types import (
    LOGPS_ALONE,
    FloatArray,
    IntArray,
    Kind,
    LabelLogps,
    ListLogps,
    Microbatch,
    Needs,
    PairLogps,
    Readout,
)


class Terms(Protocol):
    """What the engine needs from a kind of loss."""

    def view(self, readout: Readout, microbatch: Microbatch, needs: Needs) -> Any:
        """A microbatch as the loss takes it."""
        ...

    def logps(self, view: Any) -> Tensor:
        """The log-probabilities that each term depends on: K, T."""
        ...

    def weights(
        self, lengths: Lengths, weighting: Weighting, own_N: FloatArray, gaps_M: FloatArray | None = None
    ) -> Weights:
        """The weight of each term, and the denominator. `gaps`: between the scores of compared answers."""
        ...

    def example(self, lengths: Lengths) -> IntArray:
        """The example of each term: T."""
        ...

    def of(self, lengths: Lengths, some: IntArray) -> IntArray:
        """The terms of some examples in the order of their microbatch, as indices among all T."""
        ...

    def liked(self, lengths: Lengths, scores_A: FloatArray, own_N: FloatArray) -> FloatArray:
        """The weight of a token of each answer in the likelihood term: A."""
        ...

    def sides(self, readout: Readout, microbatch: Microbatch) -> PairLogps:
        """What the metrics call chosen and rejected: S of each."""
        ...

    def of_sides(self, lengths: Lengths, some: IntArray) -> IntArray:
        """The sides of some examples in the order of their microbatch, as indices among all S."""
        ...

    def side_shares(self, lengths: Lengths, scores_A: FloatArray) -> FloatArray:
        """Coefficients of the sides in the means over chosen, over rejected and over all: 3, S."""
        ...

    def right(self, chosen_S: Tensor, rejected_S: Tensor, microbatch: Microbatch, threshold: Tensor) -> Tensor:
        """Whether the gains agree with the data: 1 if so, 0 if not, 0.5 for a tie: S."""
        ...


class _Comparisons:
    """What losses of pairs and of lists have in common: metrics and likelihood of each comparison."""

    def liked(self, lengths: Lengths, _scores_A: FloatArray, own_N: FloatArray) -> FloatArray:
        counts = np.bincount(lengths.sides[0], own_N[lengths.of_comparison], minlength=len(lengths.answer))
        return counts.astype(np.float64)

    def sides(self, readout: Readout, microbatch: Microbatch) -> PairLogps:
        return compared(readout, microbatch)

    def of_sides(self, lengths: Lengths, some: IntArray) -> IntArray:
        return lengths.comparisons_of(some)

    def side_shares(self, lengths: Lengths, _scores_A: FloatArray) -> FloatArray:
        return side_coefficients(np.ones((3, len(lengths.compared))))

    def right(self, chosen_S: Tensor, rejected_S: Tensor, _microbatch: Microbatch, _threshold: Tensor) -> Tensor:
        return _is_above(chosen_S - rejected_S)


class Pairs(_Comparisons):
    """A term is a comparison: T is M."""

    def view(self, readout: Readout, microbatch: Microbatch, needs: Needs) -> PairLogps:
        return compared(readout, microbatch, needs)

    def logps(self, view: PairLogps) -> Tensor:
        return torch.stack([view.chosen, view.rejected])

    def weights(
        self, lengths: Lengths, weighting: Weighting, own_N: FloatArray, gaps_M: FloatArray | None = None
    ) -> Weights:
        return Weights.of(comparison_weights(lengths, weighting, own_N, gaps_M))

    def example(self, lengths: Lengths) -> IntArray:
        return lengths.of_comparison

    def of(self, lengths: Lengths, some: IntArray) -> IntArray:
        return lengths.comparisons_of(some)


class Lists(_Comparisons):
    """A term is what one answer adds to the loss of its list: T is A, and each answer has the weight of its list."""

    def view(self, readout: Readout, microbatch: Microbatch, _needs: Needs) -> ListLogps:
        return ListLogps(readout.logp, microbatch.num_tokens, microbatch.example, microbatch.score)

    def logps(self, view: ListLogps) -> Tensor:
        return view.logp[None]

    def weights(
        self, lengths: Lengths, weighting: Weighting, own_N: FloatArray, _gaps_M: FloatArray | None = None
    ) -> Weights:
        of_lists = Weights.of(list_weights(lengths, weighting, own_N))
        return of_lists._replace(of_term=of_lists.of_term[lengths.of_answer])

    def example(self, lengths: Lengths) -> IntArray:
        return lengths.of_answer

    def of(self, lengths: Lengths, some: IntArray) -> IntArray:
        return in_rounds(lengths, some)


class Labels:
    """A term is a labelled answer: T and S are A. Good answers are called chosen, bad ones rejected."""

    def view(self, readout: Readout, microbatch: Microbatch, _needs: Needs) -> LabelLogps:
        return LabelLogps(readout.logp, microbatch.num_tokens, microbatch.score > 0)

    def logps(self, view: LabelLogps) -> Tensor:
        return view.logp[None]

    def weights(
        self, lengths: Lengths, weighting: Weighting, own_N: FloatArray, _gaps_M: FloatArray | None = None
    ) -> Weights:
        return Weights.of(label_weights(lengths, weighting, own_N))

    def example(self, lengths: Lengths) -> IntArray:
        return lengths.of_answer

    def of(self, lengths: Lengths, some: IntArray) -> IntArray:
        return in_rounds(lengths, some)

    def liked(self, lengths: Lengths, scores_A: FloatArray, own_N: FloatArray) -> FloatArray:
        return own_N[lengths.of_answer] * (scores_A > 0)

    def sides(self, readout: Readout, microbatch: Microbatch) -> PairLogps:
        """Every answer is on both sides; its coefficient on one of them is zero (`side_shares`)."""
        return PairLogps(readout.logp, readout.logp, microbatch.num_tokens, microbatch.num_tokens)

    def of_sides(self, lengths: Lengths, some: IntArray) -> IntArray:
        return in_rounds(lengths, some)

    def side_shares(self, lengths: Lengths, scores_A: FloatArray) -> FloatArray:
        good_A = scores_A > 0
        return side_coefficients(np.stack([good_A, ~good_A, np.ones_like(good_A)]).astype(np.float64))

    def right(self, chosen_S: Tensor, _rejected_S: Tensor, microbatch: Microbatch, threshold: Tensor) -> Tensor:
        """Good answers should gain more than the loss's threshold, bad ones less."""
        return _is_above(torch.where(microbatch.score > 0, 1, -1) * (chosen_S - threshold))


TERMS: dict[Kind, Terms] = {"pairs": Pairs(), "lists": Lists(), "labels": Labels()}


def compared(readout: Readout, microbatch: Microbatch, needs: Needs = LOGPS_ALONE) -> PairLogps:
    """The comparisons of a microbatch as pairs: the better answer of each is chosen, the worse one rejected.

    `needs`: gaps are returned too, as wide as the log-probabilities.
    """
    chosen, rejected = take(readout.logp, microbatch.compared, microbatch.compared_copies).view(2, -1)
    num_chosen, num_rejected = microbatch.num_tokens[microbatch.compared].view(2, -1)
    weight = None
    if readout.confidence is not None:
        weight = readout.confidence[microbatch.compared].view(2, -1).sum(dim=0).exp()  # WPO, Zhou et al. 2024
    gap = microbatch.gap.to(readout.logp.dtype) if needs.gaps else None
    return PairLogps(chosen, rejected, num_chosen, num_rejected, heads=readout.head_logp, weight=weight, gap=gap)


def _is_above(difference: Tensor) -> Tensor:
    return (difference > 0).double() + 0.5 * (difference == 0).double()
