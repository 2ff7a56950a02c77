"""Every declared objective by name, and the parameters of a loss that adds some of them up. Imports no torch.

The config is checked against the registry, and config/objectives_page.py makes docs/objectives.md from it. Functions
that raise ConfigError do so for arguments of `pair_loss`; the others yield what is wrong, for the caller to report.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from isopref.errors import ConfigError
from isopref.objectives import coupled, labels, lists, pairs, reference_free, rewards
from isopref.objectives.declare import Objective, Param, Reading, within
from isopref.types import Kind

LossSpec = str | Mapping[Any, float]  # the name of an objective, or several with the weights of their sum

OBJECTIVES: dict[str, Objective] = {
    one.name: one
    for module in (pairs, coupled, reference_free, lists, labels, rewards)
    for one in vars(module).values()
    if isinstance(one, Objective)
}

# By the name of a parameter: each objective that takes it, with its declaration.
PARAMS: dict[str, dict[str, Param]] = {
    param: {name: one.params[param] for name, one in OBJECTIVES.items() if param in one.params}
    for param in dict.fromkeys(param for one in OBJECTIVES.values() for param in one.params)
}

# Modifiers of the loss, which do not belong to an objective.
MODIFIERS: dict[str, Param] = {
    "nll_weight": Param(
        0.0,
        "Weight of an extra term for any loss: the negative log-likelihood of the chosen answers, per token over the "
        "global batch (fine-tuning on them, as in RPO).",
        {"ge": 0},
    ),
    "balance_weight": Param(
        0.0,
        "Weight of an extra term for mixtures of experts: the load-balancing loss over the tokens of the global batch. "
        "Costs one more forward pass.",
        {"ge": 0},
    ),
    "ld_alpha": Param(
        1.0,
        "Weight of tokens beyond the length of the pair's shorter answer, in model and reference (LD-DPO): below 1, "
        "length counts less. 1: all tokens count the same.",
        {"ge": 0, "le": 1},
    ),
}


def weights(loss: LossSpec) -> dict[str, float]:
    """The objectives that are added up, with their weights. Raises ConfigError for an unknown name or a bad weight."""
    named = dict(loss) if isinstance(loss, Mapping) else {loss: 1.0}
    for name in named:
        if name not in OBJECTIVES:
            raise ConfigError(f"pair_loss: unknown loss {name!r}. Known: {', '.join(OBJECTIVES)}.")
    if not named or not all(within(weight, {"gt": 0}) for weight in named.values()):
        raise ConfigError(f"pair_loss: {named} must name at least one loss, each with a weight above 0.")
    return named


def takes(loss: LossSpec) -> list[str]:
    """The parameters of all objectives of a loss."""
    return list(dict.fromkeys(param for name in weights(loss) for param in OBJECTIVES[name].params))


def resolve(loss: LossSpec, **given: Any) -> dict[str, dict[str, float | str]]:
    """The parameters of each objective of a loss: the given ones that it takes, and its defaults for the others.

    None means not given. Raises ConfigError for an unknown objective, a parameter that no objective takes, and a value
    out of bounds.
    """
    given = {param: value for param, value in given.items() if value is not None}
    for param, what in unused(loss, given):
        raise ConfigError(f"pair_loss: {param}: {what}")
    resolved = {}
    for name in weights(loss):
        own = OBJECTIVES[name]
        found = {param: checked(param, given[param], own.params[param]) for param in own.params if param in given}
        resolved[name] = {**own.defaults, **found}
    return resolved


def checked(name: str, value: Any, param: Param) -> float | str:
    """The value of a parameter, if it is within its bounds. Raises ConfigError."""
    if not param.accepts(value):
        raise ConfigError(f"pair_loss: {name} must be {param.wanted}; found {value!r}.")
    return value if isinstance(value, str) else float(value)


def unused(loss: LossSpec, given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (parameter, what is wrong and the way out) for given parameters that no objective of a loss takes."""
    names, taken = ", ".join(weights(loss)), takes(loss)
    for param, value in given.items():
        if param not in taken:
            others = ", ".join(PARAMS.get(param, ()))
            yield (
                param,
                f"{value} does nothing with the loss {names}, which takes {', '.join(taken) or 'no parameters'}. "
                f"Remove {param}" + (f", or use a loss that has it: {others}." if others else "."),
            )


def out_of_bounds(loss: LossSpec, given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (parameter, what is wrong and the way out) for parameters whose value an objective of a loss refuses."""
    for name in weights(loss):
        for param, declared in OBJECTIVES[name].params.items():
            if param in given and not declared.accepts(given[param]):
                yield param, f"must be {declared.wanted} with the loss {name}; found {given[param]}."


KIND_WORDS: dict[Kind, str] = {"pairs": "pairs", "lists": "lists", "labels": "labelled answers"}


def kinds(loss: LossSpec) -> dict[Kind, list[str]]:
    """The objectives of a loss by their kind. A valid loss has one kind."""
    found: dict[Kind, list[str]] = {}
    for name in weights(loss):
        found.setdefault(OBJECTIVES[name].kind, []).append(name)
    return found


def kind_problems(loss: LossSpec, *, ld_alpha: float) -> Iterator[str]:
    """Yield what is wrong if objectives of several kinds are added up, or if `ld_alpha` does not fit their kind."""
    found = kinds(loss)
    if len(found) > 1:
        each = ", ".join(f"{', '.join(names)} is a loss of {KIND_WORDS[kind]}" for kind, names in found.items())
        yield f"{each}. Only losses of one kind can be added."
    unpaired = [name for kind, names in found.items() if kind != "pairs" for name in names]
    if unpaired and ld_alpha != 1:
        yield (
            f"ld_alpha is {ld_alpha}, which discounts what the longer answer of a pair has beyond the shorter one, but "
            f"{', '.join(unpaired)} does not compare pairs. Remove ld_alpha, or use a loss of pairs."
        )


def gap_problems(loss: LossSpec) -> Iterator[str]:
    """Yield what is wrong with weighting a loss by the gap between scores."""
    without = [name for name in weights(loss) if OBJECTIVES[name].kind != "pairs"]
    if without:
        yield (
            f"gap weights comparisons of two answers, but {', '.join(without)} is not a loss of pairs. Use example, "
            "completion or token, or a loss of pairs."
        )


def readout(loss: LossSpec) -> Reading:
    """What a loss takes for each answer, according to its first objective."""
    return OBJECTIVES[next(iter(weights(loss)))].readout


def reward_problems(loss: LossSpec, *, nll_weight: float, ld_alpha: float, wpo: bool) -> Iterator[str]:
    """Yield what is wrong with a loss that trains a reward model: other objectives, or modifiers."""
    of_rewards = [name for name in weights(loss) if OBJECTIVES[name].readout == "reward"]
    if not of_rewards:
        return
    named = ", ".join(of_rewards)
    if others := ", ".join(name for name in weights(loss) if name not in of_rewards):
        yield f"{named} trains a reward model, {others} a language model. Only losses of one kind can be added."
    used = {"nll_weight": nll_weight != 0, "ld_alpha": ld_alpha != 1, "wpo": wpo}
    if modifiers := " and ".join(name for name, is_used in used.items() if is_used):
        yield (
            f"{modifiers} needs log-probabilities, and {named} trains a reward model, which has none. Remove it, or "
            "use another loss."
        )


def wpo_problems(loss: LossSpec) -> Iterator[str]:
    """Yield what is wrong with WPO's weights for a loss, which needs a value of its own for every pair."""
    without = [name for name in weights(loss) if OBJECTIVES[name].coupled or OBJECTIVES[name].kind != "pairs"]
    if without:
        yield (
            f"weights the loss of each pair, but with {', '.join(without)} a single pair has no loss of its own. "
            "Remove wpo, or use another loss."
        )
