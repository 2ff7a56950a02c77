"""The one place that divides. Weights of the terms of a loss become coefficients that sum to one over the global batch.

L = sum_t w_t * l_t / sum_t w_t over all terms t of the global batch (comparisons, lists or labelled answers), whatever
microbatch or rank they fall on. A mean over tokens, sum_a v_a * (sum over the tokens of a) / sum_a v_a * n_a, has a
denominator of its own. Both are known before any forward pass: every rank has all lengths of the batch.

N: examples, A: answers, M: comparisons, T: terms of a loss, P: any of these.
"""

from typing import Literal, NamedTuple

import numpy as np
from torch import Tensor

from isopref.examples import Lengths
from isopref.types import FloatArray, IntArray

Weighting = Literal["token", "completion", "example", "gap"]


class Weights(NamedTuple):
    """The weights of the terms of a loss."""

    of_term: FloatArray  # T
    total: float  # the denominator

    @classmethod
    def of(cls, weights_T: FloatArray) -> "Weights":
        """The weights of terms whose denominator is their sum."""
        return cls(weights_T, float(weights_T.sum(dtype=np.float64)))


def comparison_weights(
    lengths: Lengths, weighting: Weighting, own_N: FloatArray, gaps_M: FloatArray | None = None
) -> FloatArray:
    """w of each comparison (M): its size by `weighting`, times the weight of its example.

    `token` counts all tokens of its two sequences, the prompt in each, context included; `completion` counts the
    trained tokens of its two answers, each as 1 whatever its weight; `gap` is the difference between its two scores.
    Under `example`, the comparisons of one example share a weight of 1 equally.
    """
    example_M = lengths.of_comparison
    if weighting == "gap":
        assert gaps_M is not None, "weighting by gap takes the table's gaps"
        return gaps_M * own_N[example_M]
    completion: FloatArray = lengths.compared_tokens.sum(axis=0, dtype=np.float64)
    sizes: dict[Weighting, FloatArray] = {
        "token": lengths.sequence[lengths.sides].sum(axis=0, dtype=np.float64),
        "completion": completion,
        "example": 1.0 / lengths.num_comparisons[example_M],
    }
    return sizes[weighting] * own_N[example_M]


def list_weights(lengths: Lengths, weighting: Weighting, own_N: FloatArray) -> FloatArray:
    """w of each list (N): the tokens of its sequences, its trained tokens, or 1; times its own weight.

    The config refuses "gap" for losses of lists, because a gap is between two answers.
    """
    sums = {"token": lengths.sequence, "completion": lengths.trained}
    if weighting not in sums:
        return own_N
    tokens = np.bincount(lengths.of_answer, sums[weighting], minlength=len(lengths))
    return tokens * own_N


def label_weights(lengths: Lengths, weighting: Weighting, own_N: FloatArray) -> FloatArray:
    """w of each labelled answer (A): the tokens of its sequence, its trained tokens, or 1 shared equally among the
    answers of its example; times the example's weight.
    """
    sizes: dict[Weighting, FloatArray] = {
        "token": lengths.sequence.astype(np.float64),
        "completion": lengths.trained.astype(np.float64),
        "example": 1.0 / lengths.num_answers[lengths.of_answer],
    }
    return sizes[weighting] * own_N[lengths.of_answer]


def coefficients(weights_P: FloatArray, *, total: float | None = None) -> FloatArray:
    """w_p / sum of w over the global batch, in float64. `total` is that sum if P is only part of the batch."""
    total = float(weights_P.sum(dtype=np.float64)) if total is None else total
    if not total > 0:
        raise ValueError(f"the weights of a global batch must have a positive sum, got {total}")
    return weights_P / total


def token_coefficients(own_A: FloatArray, num_tokens_A: IntArray, *, total: float | None = None) -> FloatArray:
    """v_a / sum of v * n over the global batch: the coefficient of a sum over an answer's n_a tokens in their mean.

    v is the weight of each token of an answer. `total` is as in `coefficients`. Zeros if no token has a weight, as in a
    batch without good answers.
    """
    total = token_weight(own_A, num_tokens_A) if total is None else total
    return coefficients(own_A, total=total) if own_A.any() else np.zeros_like(own_A)


def token_weight(own_A: FloatArray, num_tokens_A: IntArray) -> float:
    """sum of v * n: the denominator of a mean over tokens."""
    return float((own_A * num_tokens_A).sum(dtype=np.float64))


def side_coefficients(counts_KP: FloatArray) -> FloatArray:
    """Coefficients of P values in K means over the global batch; mean k counts value p `counts[k, p]` times: K, P.

    Zeros for a mean over nothing, such as over the bad answers of a batch without any.
    """
    totals = counts_KP.sum(axis=1, keepdims=True)
    shares: FloatArray = np.divide(counts_KP, totals, out=np.zeros_like(counts_KP), where=totals > 0)
    return shares


def balance_coefficients(tokens_LE: Tensor, num_tokens: int) -> Tensor:
    """The coefficient of each expert's summed probability in the balance loss of a global batch: L, E.

    (1/L) sum_l E sum_e f_le P_le, where f is the share of the tokens that were sent to expert e in layer l, and P the
    mean of its probability over tokens. `tokens` counts those sent to each expert, `num_tokens` all of the batch.
    """
    num_layers, num_experts = tokens_LE.shape
    return tokens_LE * (num_experts / (num_layers * num_tokens**2))


def resampled_means(values_NK: FloatArray, weights_N: FloatArray, counts_RN: FloatArray) -> FloatArray:
    """Weighted means of K values of N pairs, where resample r has pair n `counts[r, n]` times: R, K.

    sum_n c_rn w_n v_nk / sum_n c_rn w_n. NaN for a resample without weight.
    """
    with np.errstate(invalid="ignore"):
        means: FloatArray = (counts_RN @ (weights_N[:, None] * values_NK)) / (counts_RN @ weights_N)[:, None]
    return means


def share_of_loss(loss_P: Tensor, coefficient_P: Tensor, *, num_ranks: int) -> Tensor:
    """What one microbatch adds to the loss that is back-propagated: sum of value * coefficient.

    DDP and FSDP average gradients over ranks; multiply back so that each pair counts once.
    """
    return (loss_P * coefficient_P).sum() * num_ranks
