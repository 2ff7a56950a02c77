"""The one place that divides. Weights of comparisons become coefficients that sum to one over the global batch.

L = sum_m w_m * l_m / sum_m w_m over all comparisons m of the global batch, whatever microbatch or rank they fall on. A
mean over tokens, sum_m v_m * (sum over the tokens of m) / sum_m v_m * n_m, has a denominator of its own. Both are known
before any forward pass: every rank has all lengths of the batch. A pair is one comparison.

N: examples, M: comparisons, P: pairs or comparisons.
"""

from typing import Literal

import numpy as np
from torch import Tensor

from isopref.examples import Lengths
from isopref.types import FloatArray, IntArray

Weighting = Literal["token", "completion", "example"]


def comparison_weights(lengths: Lengths, weighting: Weighting, own_N: FloatArray) -> FloatArray:
    """w of each comparison (M): its tokens, the trained ones alone, or its part of one; times its example's weight.

    `token` counts all tokens of the two sequences of a comparison, the prompt in each, context included; `completion`
    counts the tokens of the two answers that are trained, each as one whatever its weight. Comparisons of one example
    share it equally.
    """
    example_M = lengths.of_comparison
    completion: FloatArray = lengths.compared_tokens.sum(axis=0, dtype=np.float64)
    sizes: dict[Weighting, FloatArray] = {
        "token": lengths.sequence[lengths.sides].sum(axis=0, dtype=np.float64),
        "completion": completion,
        "example": 1.0 / lengths.num_comparisons[example_M],
    }
    return sizes[weighting] * own_N[example_M]


def list_weights(lengths: Lengths, weighting: Weighting, own_N: FloatArray) -> FloatArray:
    """w of each list (N): the tokens of its sequences, its trained tokens, or one; times its own weight."""
    sums = {"token": lengths.sequence, "completion": lengths.trained}
    if weighting == "example":
        return own_N
    tokens = np.bincount(lengths.of_answer, sums[weighting], minlength=len(lengths))
    return tokens * own_N


def coefficients(weights_P: FloatArray, *, total: float | None = None) -> FloatArray:
    """w_p / sum of w over the global batch, in float64. `total` is that sum where P is only a part of the batch."""
    total = float(weights_P.sum(dtype=np.float64)) if total is None else total
    if not total > 0:
        raise ValueError(f"the weights of a global batch must have a positive sum, got {total}")
    return weights_P / total


def token_coefficients(own_P: FloatArray, num_tokens_P: IntArray, *, total: float | None = None) -> FloatArray:
    """v_p / sum of v * n over the global batch: what a sum over the n_p tokens of a pair counts for in their mean.

    v is the weight the data gives a pair. `total` is as in `coefficients`.
    """
    total = token_weight(own_P, num_tokens_P) if total is None else total
    return coefficients(own_P, total=total)


def token_weight(own_P: FloatArray, num_tokens_P: IntArray) -> float:
    """sum of v * n: the denominator of a mean over tokens."""
    return float((own_P * num_tokens_P).sum(dtype=np.float64))


def balance_coefficients(tokens_LE: Tensor, num_tokens: int) -> Tensor:
    """What each unit of an expert's probability counts for in the balance loss of a global batch: L, E.

    (1/L) sum_l E sum_e f_le P_le, where f is the share of the tokens that were sent to expert e in layer l, and P the
    mean of its probability over tokens: `tokens` are those sent, `num_tokens` is their number in all.
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
