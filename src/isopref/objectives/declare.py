"""How an objective is declared: everything about it in one place, beside its formula. Imports no torch.

The config has to know what an objective takes, and neither `isopref --help` nor a report should wait for torch. A
declaration holds its formula all the same: formulas are written with the operators and methods of tensors and with the
functions of parts.py, so that torch is needed only once a formula is computed.
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
    """A number, or one of a few words: what it means, what it may be, and what it is where it is not given."""

    default: float | str
    meaning: str
    bounds: Mapping[str, Any] = field(default_factory=dict)  # of a number, under pydantic's names
    words: tuple[str, ...] = ()

    def at(self, default: float | str, **bounds: float) -> Param:
        """The same with another default, and with other bounds where some are given."""
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
    """One objective: what it minimises, what it takes, and what to say of it. It is called as its formula is."""

    name: str
    formula: Formula
    params: Mapping[str, Param]
    equation: str  # in the letters of the legend in docs/objectives.md
    use: str
    paper: str
    gains: Gains  # the implicit rewards over beta, up to a constant: what it compares, or pushes up and down
    needs_reference: bool  # without: nothing is scored for one
    kind: Kind  # what its terms are, and so what it takes: PairLogps, ListLogps or LabelLogps
    # It reads PairLogps.gap: the data must score both answers of every comparison. Or the parameter that makes it do so
    # where it is not 0.
    needs_gaps: bool | str
    coupled: bool  # a term depends on others of the global batch; what the formula needs of them is given as `whole`
    readout: Reading  # what it takes of an answer: its log-probability, or the reward that a reward model gives it
    anchor: Anchor | None  # of a loss of labels: which of `Anchors` the formula is given as `anchor`

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
    """Declare the function below as the formula of an objective, which has its name."""

    def declared(formula: Formula) -> Objective:
        return Objective(
            *(formula.__name__, formula, params, equation, use, paper, gains),
            *(needs_reference, kind, needs_gaps, coupled, readout, anchor),
        )

    return declared
