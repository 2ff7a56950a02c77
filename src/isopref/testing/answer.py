"""An answer as the equations take it. Numbers are scalar float64 tensors, so that the oracle can differentiate them."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Answer:
    """log pi(y|x) and log ref(y|x), the number of tokens of y, and its score in the data, up to a constant."""

    policy: Tensor
    ref: Tensor
    tokens: int
    score: float = math.nan

    @property
    def ratio(self) -> Tensor:
        """pi(y|x) / ref(y|x)."""
        return torch.exp(self.policy) / torch.exp(self.ref)

    @property
    def log_ratio(self) -> Tensor:
        return self.policy - self.ref

    @property
    def likelihood(self) -> Tensor:
        """The geometric mean of the probabilities of the tokens of y."""
        return torch.exp(self.policy / self.tokens)


def sigma(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))
