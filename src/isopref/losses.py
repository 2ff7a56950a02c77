"""Objectives: (policy, reference, parameters) -> one value per pair. Pure: no mean, no config, no other pairs.

`OBJECTIVES` is the registry. P: pairs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn.functional import logsigmoid

from isopref.errors import ConfigError
from isopref.types import PairLogps


@dataclass(frozen=True)
class PairLoss:
    """A loss of one pair with its parameters filled in: (policy, reference) -> P."""

    formula: Callable[..., Tensor]
    params: Mapping[str, Any]
    needs_reference: bool = True  # without: nothing is scored for one, and what stands for it is zero

    def __call__(self, policy: PairLogps, ref: PairLogps) -> Tensor:
        return self.formula(policy, ref, **self.params)

    @property
    def beta(self) -> float:
        """Scale of the implicit rewards."""
        return float(self.params["beta"])


def margin(policy: PairLogps, ref: PairLogps) -> Tensor:
    """How much more the policy prefers chosen over rejected than the reference does, in nats. Returns P."""
    return (policy.chosen - ref.chosen) - (policy.rejected - ref.rejected)


def rewards(policy: PairLogps, ref: PairLogps, *, beta: float) -> tuple[Tensor, Tensor]:
    """Implicit rewards beta * log(policy / reference) of chosen and rejected (DPO, section 4). Returns P, P."""
    return beta * (policy.chosen - ref.chosen), beta * (policy.rejected - ref.rejected)


def sigmoid(policy: PairLogps, ref: PairLogps, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """DPO (Rafailov et al. 2023, eq. 7); conservative DPO with label smoothing (Mitchell 2023, eq. 3). Returns P."""
    logit = beta * margin(policy, ref)
    return -(1 - label_smoothing) * logsigmoid(logit) - label_smoothing * logsigmoid(-logit)


OBJECTIVES: dict[str, Callable[..., Tensor]] = {"sigmoid": sigmoid}
REFERENCE_FREE: frozenset[str] = frozenset()  # those of OBJECTIVES that never look at the reference


def pair_loss(name: str, **params: Any) -> PairLoss:
    """The objective `name` with its parameters filled in."""
    if name not in OBJECTIVES:
        raise ConfigError(f"objective.loss: unknown '{name}'. Known: {', '.join(sorted(OBJECTIVES))}.")
    return PairLoss(OBJECTIVES[name], params, needs_reference=name not in REFERENCE_FREE)
