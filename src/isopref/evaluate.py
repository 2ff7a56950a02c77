"""Evaluation on held-out pairs: what the log-probabilities of policy and reference say, pair by pair.

Pure arithmetic on scored tables; the scoring itself is score.py's. N: pairs.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor

from isopref.normalize import Weighting, coefficients, pair_weights
from isopref.score import TableLogps
from isopref.types import CHOSEN, REJECTED, FloatArray, IntArray, PairLogps


@dataclass(frozen=True)
class Evaluation:
    """Figures over held-out pairs; every pair counts once, but for the loss, which has the objective's weighting."""

    pairs: int
    accuracy: float  # share of pairs whose chosen answer has the larger implicit reward; a tie is half
    reward_margin: float  # mean of beta * margin
    loss: float
    logp_accuracy: float  # share of pairs whose chosen answer has the larger log-probability per token

    def as_metrics(self) -> dict[str, float]:
        return {f"eval/{name}": value for name, value in asdict(self).items() if name != "pairs"}


def evaluate(
    policy: TableLogps,
    ref: TableLogps,
    lengths_N3: IntArray,
    own_N: FloatArray,
    *,
    loss: Callable[[PairLogps, PairLogps], Tensor],
    beta: float,
    weighting: Weighting,
) -> Evaluation:
    """Compare policy and reference on N pairs."""
    margin = (policy.chosen - ref.chosen) - (policy.rejected - ref.rejected)
    loss_N = loss(_pair_logps(policy, lengths_N3), _pair_logps(ref, lengths_N3)).numpy()
    each = np.full(len(margin), 1.0)
    mean = coefficients(each)
    per_token = policy.chosen / lengths_N3[:, CHOSEN] - policy.rejected / lengths_N3[:, REJECTED]
    return Evaluation(
        pairs=len(margin),
        accuracy=float(_won(margin) @ mean),
        reward_margin=float(beta * margin @ mean),
        loss=float(loss_N @ coefficients(pair_weights(lengths_N3, weighting, own_N))),
        logp_accuracy=float(_won(per_token) @ mean),
    )


def _won(difference: FloatArray) -> FloatArray:
    won: FloatArray = (difference > 0) + 0.5 * (difference == 0)
    return won


def _pair_logps(logps: TableLogps, lengths_N3: IntArray) -> PairLogps:
    counts = torch.from_numpy(lengths_N3[:, CHOSEN:].astype(np.int64))
    return PairLogps(torch.from_numpy(logps.chosen), torch.from_numpy(logps.rejected), counts[:, 0], counts[:, 1])
