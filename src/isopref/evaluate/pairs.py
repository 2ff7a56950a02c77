"""What is known about each held-out pair, and accuracy by length. A comparison of two answers of a list is a pair.

N: pairs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isopref.evaluate.intervals import Figure, share
from isopref.examples import Lengths
from isopref.objectives.loss import Loss, log_likelihood
from isopref.score import TableLogps
from isopref.types import FloatArray, IntArray, PairLogps

NUM_BUCKETS = 4


@dataclass(frozen=True)
class Bucket:
    """A quarter of the pairs by the tokens of their answers (the mean of the two); 1 has the shortest."""

    quarter: int
    shortest: float
    longest: float
    pairs: int
    accuracy: Figure


@dataclass(frozen=True)
class Pairs:
    """The inputs of the metrics, per pair."""

    won: FloatArray  # N
    rewards: FloatArray  # N, 2
    per_token: FloatArray | None  # N, 2: log-probability per token; None for a reward model, which gives none
    nll: FloatArray  # N: of a chosen token, times its weight in the objective
    tokens: IntArray  # N, 2
    chosen_weights: FloatArray  # N: of the NLL
    example: IntArray  # N: the example it belongs to

    def select(self, some_N: NDArray[np.bool_]) -> "Pairs":
        def selected(part: Any) -> Any:
            return None if part is None else part[some_N]

        return Pairs(*map(selected, vars(self).values()))


def pairs_of(
    logps: tuple[PairLogps, PairLogps], policy: TableLogps, lengths: Lengths, own: FloatArray, loss: Loss
) -> Pairs:
    """The pairs of a table, from the log-probabilities of policy and reference as the loss takes them."""
    gain_N2, reward_N2 = (_side_by_side(of(*logps)) for of in (loss.gains, loss.rewards))
    tokens_N2 = lengths.compared_tokens.T
    return Pairs(
        won=won(gain_N2),
        rewards=reward_N2,
        per_token=policy.answers[lengths.sides].T / tokens_N2 if loss.readout == "logp" else None,
        nll=-loss.nll_weight * log_likelihood(logps[0]).numpy() / tokens_N2[:, 0],
        tokens=tokens_N2,
        chosen_weights=own[lengths.of_comparison] * tokens_N2[:, 0],
        example=lengths.of_comparison,
    )


def taken(
    policy: TableLogps, ref: TableLogps, lengths: Lengths, loss: Loss, gaps: FloatArray | None
) -> tuple[PairLogps, PairLogps]:
    """The comparisons of a table as the loss takes them."""
    return loss.taken(policy.compared(lengths, gaps)), loss.taken(ref.compared(lengths, gaps))


def rewards(policy: TableLogps, ref: TableLogps, lengths: Lengths, loss: Loss) -> FloatArray:
    """The implicit rewards of every comparison's answers, chosen and rejected: N, 2."""
    return _side_by_side(loss.rewards(*taken(policy, ref, lengths, loss, None)))


def answer_rewards(policy: TableLogps, ref: TableLogps, lengths: Lengths, loss: Loss) -> FloatArray:
    """The implicit reward of every answer, in which all tokens count equally (without LD-DPO's discount): A."""
    tokens = torch.from_numpy(lengths.trained.astype(np.int64))
    both = ((torch.from_numpy(of.answers),) * 2 for of in (policy, ref))
    found: FloatArray = loss.rewards(*(PairLogps(*sides, tokens, tokens) for sides in both))[0].numpy()
    return found


def won(sides_N2: FloatArray) -> FloatArray:
    """1 where the chosen value is larger than the rejected one, 0 where it is smaller, 0.5 for a tie."""
    difference = sides_N2[:, 0] - sides_N2[:, 1]
    points: FloatArray = (difference > 0) + 0.5 * (difference == 0)
    return points


def buckets(pairs: Pairs) -> Iterator[Bucket]:
    """Accuracy by length."""
    tokens_N = pairs.tokens.mean(axis=1)
    edges = np.quantile(tokens_N, np.arange(1, NUM_BUCKETS) / NUM_BUCKETS, method="inverted_cdf")
    bucket_N = np.searchsorted(edges, tokens_N, side="left")  # a pair on an edge belongs to the shorter bucket
    for number in np.unique(bucket_N):
        inside = bucket_N == number
        shortest, longest = float(tokens_N[inside].min()), float(tokens_N[inside].max())
        accuracy = share(pairs.won[inside], pairs.example[inside])
        yield Bucket(int(number) + 1, shortest, longest, int(inside.sum()), accuracy)


def _side_by_side(chosen_and_rejected: tuple[Tensor, Tensor]) -> FloatArray:
    values_N2: FloatArray = torch.stack(chosen_and_rejected, dim=1).numpy()
    return values_N2
