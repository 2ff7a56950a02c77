"""How an objective is declared: everything about it in one place, beside its formula. Imports no torch.

The config needs the parameters of an objective, and neither `isopref --help` nor a report should wait for torch to be
imported. A declaration can hold its formula all the same: formulas use only operators and methods of tensors and the
functions of parts.py, so torch is needed only when one is computed.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal

from isopref.objectives.parts import gains as log_ratios
from isopref.types import Kind

if TYPE_CHECKING:
    from torch import Tensor

    Formula = Callable[..., Tensor]  # (policy, ref, *, parameters) -> T
    Gains = Callable[..., tuple[Tensor, Tensor]]  # (policy, ref, *, parameters) -> P, P

Reading = Literal["logp", "reward"]
Anchor = Literal["kl", "midpoint"]

BOUND_WORDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


@dataclass(frozen=True)
class Param:
    """A parameter, either a number or one of a few words: its default, its meaning and the values it may have."""

    default: float | str
    meaning: str
    bounds: Mapping[str, Any] = field(default_factory=dict)  # of a number, under pydantic's names
    words: tuple[str, ...] = ()

    def at(self, default: float | str, **bounds: float) -> Param:
        """A copy with another default, and with other bounds if some are given."""
        return replace(self, default=default, bounds=bounds or self.bounds)

    def accepts(self, value: Any) -> bool:
        return (isinstance(value, str) and value in self.words) or within(value, self.bounds)

    @property
    def wanted(self) -> str:
        """What a value must be: "a number, above 0"."""
        kind = f"one of {', '.join(self.words)}, or a number" if self.words else "a number"
        return ", ".join([kind, *(f"{BOUND_WORDS[bound]} {limit}" for bound, limit in self.bounds.items())])


def within(value: Any, bounds: Mapping[str, float]) -> bool:
    """Whether a value is a finite number within its bounds."""
    is_number = not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value)
    return is_number and all(getattr(operator, bound)(value, limit) for bound, limit in bounds.items())


# Parameters of several objectives.
BETA = Param(
    0.1,
    "How strongly to keep the model close to the reference; higher means closer. Some losses use their own scale.",
    {"gt": 0},
)
LABEL_SMOOTHING = Param(0.0, "Assumed share of flipped labels.", {"ge": 0, "lt": 0.5})


@dataclass(frozen=True)
class Objective:
    """One objective: its formula, its parameters and its documentation. It is called like its formula."""

    name: str
    formula: Formula
    params: Mapping[str, Param]
    equation: str  # in the letters of the legend in docs/objectives.md
    use: str
    paper: str
    gains: Gains  # the implicit rewards divided by beta, up to a constant: what it compares, or raises and lowers
    needs_reference: bool  # if False, no reference is scored
    kind: Kind  # what its terms are, and so what the formula takes: PairLogps, ListLogps or LabelLogps
    # Whether the formula reads PairLogps.gap, so that the data must score both answers of every comparison. A string
    # names the parameter that makes it read the gap when it is not 0.
    needs_gaps: bool | str
    coupled: bool  # whether a term depends on others of the global batch; the formula then takes `whole`
    readout: Reading  # what it takes for each answer: a log-probability, or the reward given by a reward model
    anchor: Anchor | None  # for a loss of labels: which of the `Anchors` the formula takes as `anchor`

    def __call__(self, policy: Any, ref: Any, **given: Any) -> Tensor:
        """One value for each term: T."""
        return self.formula(policy, ref, **given)

    @property
    def defaults(self) -> dict[str, float | str]:
        return {name: param.default for name, param in self.params.items()}


def objective(
    *,
    params: Mapping[str, Param],
    equation: str,
    use: str,
    paper: str,
    gains: Gains = log_ratios,
    needs_reference: bool = True,
    kind: Kind = "pairs",
    needs_gaps: bool | str = False,
    coupled: bool = False,
    readout: Reading = "logp",
    anchor: Anchor | None = None,
) -> Callable[[Formula], Objective]:
    """Decorator: declare a formula as an objective of the same name."""

    def declared(formula: Formula) -> Objective:
        return Objective(
            *(formula.__name__, formula, params, equation, use, paper, gains),
            *(needs_reference, kind, needs_gaps, coupled, readout, anchor),
        )

    return declared
