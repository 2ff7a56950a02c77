"""Checks arguments from a script when they are passed: a mistake would otherwise surface steps later, as a KeyError."""

import math
from numbers import Integral, Real
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from isopref.errors import ConfigError
from isopref.models.policy import Policy


def check_choice(where: str, name: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Raise ConfigError unless `value` is one of the choices."""
    if value not in choices:
        raise ConfigError(f"{where}: {name} must be one of {', '.join(map(str, choices))}; found {value!r}.")


def check_kind(where: str, name: str, value: Any, kinds: type | tuple[type, ...], wanted: str) -> None:
    """Raise ConfigError unless `value` is an instance of `kinds`, which `wanted` describes in words."""
    if not isinstance(value, kinds):
        found = repr(value) if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"
        raise ConfigError(f"{where}: {name} must be {wanted}; found {found}.")


def check_count(where: str, name: str, value: Any, *, least: int = 1) -> None:
    """Raise ConfigError unless `value` is a whole number, at least `least`."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ConfigError(f"{where}: {name} must be a whole number, at least {least}; found {value!r}.")


def check_positive(where: str, name: str, value: Any) -> None:
    """Raise ConfigError unless `value` is a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < float(value) < math.inf:
        raise ConfigError(f"{where}: {name} must be a number above 0; found {value!r}.")


def check_policy(where: str, model: Any) -> None:
    """Raise ConfigError unless `model` is a policy, on its own or distributed over ranks."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    if not isinstance(inner, Policy):
        raise ConfigError(
            f"{where}: model must be a Policy, or what parallelize returns for one; found a {type(inner).__name__}. "
            "Wrap it: Policy(model)."
        )
