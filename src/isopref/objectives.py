"""What is known of each objective, but for its formula (losses.py): parameters, defaults, equation, paper.

The registry of the family. The config checks itself against it, and config/objectives_page.py makes
docs/objectives.md of it. What raises here is an argument of `pair_loss`. Imports no torch.
"""

import math
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, get_args

from isopref.errors import ConfigError

Name = Literal[
    "sigmoid", "dpo_norm", "robust", "hinge", "ipo", "ipo_sum", "exo_pair", "nca_pair", "sppo_hard", "apo_zero",
    "apo_down", "discopop", "bco_pair", "aot", "aot_unpaired", "simpo", "orpo", "cpo",
]  # fmt: skip

Loss = str | Mapping[Any, float]  # the name of an objective, or several with the weights of their sum
Divergence = Literal["reverse_kl", "forward_kl", "jensen_shannon"]  # or a number: the alpha of its divergence

# What each parameter may be, for the config's fields and `pair_loss` alike; the bounds have pydantic's names.
LIMITS: dict[str, dict[str, Any]] = {
    "beta": {"gt": 0},
    "label_smoothing": {"ge": 0, "lt": 0.5},
    "gamma": {"ge": 0},
    "divergence": {"gt": 0, "lt": 1},
    "nll_weight": {"ge": 0},
    "balance_weight": {"ge": 0},
    "ld_alpha": {"ge": 0, "le": 1},
}
LIMIT_WORDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


@dataclass(frozen=True)
class Objective:
    """One objective of the family."""

    params: Mapping[str, Any]  # the parameters it takes, and what each one is where it is not given
    equation: str  # in the letters of LEGEND
    use: str
    paper: str
    needs_reference: bool = True  # without: nothing is scored for one
    per_token: bool = False  # its rewards are means over the tokens of an answer, not sums
    coupled: bool = False  # the loss of a pair depends on the other pairs of the global batch


OBJECTIVES: dict[Name, Objective] = {
    "sigmoid": Objective(
        {"beta": 0.1, "label_smoothing": 0.0, "divergence": "reverse_kl"},
        "-(1-e) ls(b m) - e ls(-b m), where m = G_c - G_r, or f'(exp G_c) - f'(exp G_r) with another divergence",
        "The loss of DPO, and a good start. `label_smoothing`: labels that are wrong now and then (conservative DPO). "
        "`divergence`: what holds the policy to the reference; forward_kl and jensen_shannon keep more variety",
        "DPO, Rafailov et al. 2023 (2305.18290), eq. 7; cDPO, Mitchell 2023, eq. 3; f-DPO, Wang et al. 2023 "
        "(2309.16240)",
    ),
    "dpo_norm": Objective(
        {"beta": 5.0, "label_smoothing": 0.0},
        "-(1-e) ls(b (g_c - g_r)) - e ls(-b (g_c - g_r))",
        "DPO that does not reward length: answers count by their mean over tokens. Wants a larger beta",
        "Tulu 3, Lambert et al. 2024 (2411.15124)",
        per_token=True,
    ),
    "robust": Objective(
        {"beta": 0.1, "label_smoothing": 0.1},
        "[-(1-e) ls(b m) + e ls(-b m)] / (1 - 2e)",
        "A known share of swapped labels: the expected loss is that of clean ones. Has no lower bound",
        "rDPO, Chowdhury et al. 2024 (2403.00409)",
    ),
    "hinge": Objective(
        {"beta": 0.1},
        "max(0, 1 - b m)",
        "Pairs that are apart by 1/beta stop pulling",
        "SLiC-HF, Zhao et al. 2023 (2305.10425); with a reference RSO, Liu et al. 2023 (2309.06657)",
    ),
    "ipo": Objective(
        {"beta": 0.1},
        "(g_c - g_r - 1/(2b))^2",
        "A margin to reach, not to exceed: does not run away on certain labels. Per token, as its authors run it",
        "IPO, Azar et al. 2023 (2310.12036), eq. 17",
        per_token=True,
    ),
    "ipo_sum": Objective(
        {"beta": 0.1},
        "(m - 1/(2b))^2",
        "IPO as the equation has it, over sums: long answers weigh more",
        "IPO, Azar et al. 2023 (2310.12036), eq. 17",
    ),
    "exo_pair": Objective(
        {"beta": 0.1, "label_smoothing": 1e-3},
        "s(b m) [ls(b m) - log(1-e)] + s(-b m) [ls(-b m) - log e]",
        "Reverse KL to the labels, smoothed by e > 0: seeks the mode",
        "EXO, Ji et al. 2024 (2402.00856), eq. 16",
    ),
    "nca_pair": Objective(
        {"beta": 0.01},
        "-ls(b G_c) - ls(-b G_c)/2 - ls(-b G_r)/2",
        "Keeps the likelihood of chosen answers from falling",
        "NCA, Chen et al. 2024 (2402.05369)",
    ),
    "sppo_hard": Objective(
        {"beta": 0.001},
        "(G_c - 1/(2b))^2 + (G_r + 1/(2b))^2",
        "Self-play with hard labels: both answers have a target of their own",
        "SPPO, Wu et al. 2024 (2405.00675), eq. 4.7 with preferences of 1 and 0",
    ),
    "apo_zero": Objective(
        {"beta": 0.1},
        "1 - s(b G_c) + s(b G_r)",
        "Chosen answers that are better than the model's own: up with them, down with rejected ones",
        "APO, D'Oosterlinck et al. 2024 (2408.06266), eq. 7",
    ),
    "apo_down": Objective(
        {"beta": 0.1},
        "s(b G_c) + 1 - s(b m)",
        "Chosen answers that are worse than the model's own: down with both, with rejected ones more",
        "APO, D'Oosterlinck et al. 2024 (2408.06266), eq. 8",
    ),
    "discopop": Objective(
        {"beta": 0.05},
        "-(1 - s(b m/t)) ls(b m) + s(b m/t) exp(-b m), where t = 0.05",
        "A blend of the logistic and the exponential loss that a search found",
        "DiscoPOP, Lu et al. 2024 (2406.08414), eq. 5",
    ),
    "bco_pair": Objective(
        {"beta": 0.1},
        "-ls(b G_c - d) - ls(d - b G_r), where d is the mean of all rewards b G so far, this batch included",
        "A classifier of good and bad answers, whose threshold moves along with the rewards",
        "BCO, Jung et al. 2024 (2404.04656)",
        coupled=True,
    ),
    "aot": Objective(
        {"beta": 0.1, "label_smoothing": 0.0},
        "-(1-e) ls(b q) - e ls(-b q), where q = sorted(P_c - P_r) - sorted(R_c - R_r)",
        "Margins of the policy are to exceed those of the reference as distributions over the batch, not pair by pair",
        "AOT, Melnyk et al. 2024 (2406.05882), paired",
        coupled=True,
    ),
    "aot_unpaired": Objective(
        {"beta": 0.1, "label_smoothing": 0.0},
        "-(1-e) ls(b q) - e ls(-b q), where q = sorted(G_c) - sorted(G_r)",
        "Chosen answers are to gain more than rejected ones as distributions over the batch, whatever their prompts",
        "AOT, Melnyk et al. 2024 (2406.05882), unpaired",
        coupled=True,
    ),
    "simpo": Objective(
        {"beta": 2.0, "gamma": 1.0},
        "-ls(b (p_c - p_r) - gamma)",
        "No reference, so no scoring ahead; the reward is the mean log-probability, apart by gamma",
        "SimPO, Meng et al. 2024 (2405.14734), eq. 6",
        needs_reference=False,
        per_token=True,
    ),
    "orpo": Objective(
        {"beta": 0.1},
        "-p_c - b ls(o_c - o_r), where o = log(exp p / (1 - exp p))",
        "Fine-tuning and preferences in one, from a base model. beta is the paper's lambda",
        "ORPO, Hong et al. 2024 (2403.07691), eqs. 4, 6 and 7",
        needs_reference=False,
        per_token=True,
    ),
    "cpo": Objective(
        {"beta": 0.1},
        "-ls(b (P_c - P_r)) - p_c",
        "DPO with a uniform reference, held by the likelihood of chosen answers",
        "CPO, Xu et al. 2024 (2401.08417), eq. 3 and its likelihood term",
        needs_reference=False,
    ),
}


def weights(loss: Loss) -> dict[Name, float]:
    """The objectives that are added, with their weights. Raises ConfigError for what cannot be added."""
    named = dict(loss) if isinstance(loss, Mapping) else {loss: 1.0}
    for name in named:
        if name not in OBJECTIVES:
            raise ConfigError(f"pair_loss: unknown loss {name!r}. Known: {', '.join(OBJECTIVES)}.")
    if not named or not all(_within(weight, {"gt": 0}) for weight in named.values()):
        raise ConfigError(f"pair_loss: {named} must name at least one loss, each with a weight above 0.")
    return named  # type: ignore[return-value]  # checked


def resolve(loss: Loss, **given: Any) -> dict[Name, dict[str, Any]]:
    """The parameters of each objective of a loss: those given that it takes, and its defaults for the others.

    None is as good as not given. Raises ConfigError for an unknown name, for what no objective can use, and for a value
    out of its bounds.
    """
    named = weights(loss)
    told = {param: value for param, value in given.items() if value is not None}
    for param, what in problems(loss, told):
        raise ConfigError(f"pair_loss: {param}: {what}")
    told = {param: checked(param, value) for param, value in told.items()}
    return {
        name: {param: told.get(param, default) for param, default in OBJECTIVES[name].params.items()} for name in named
    }


def checked(param: str, value: Any) -> float | str:
    """The value of a parameter, if it is within its bounds. Raises ConfigError."""
    names = get_args(Divergence) if param == "divergence" else ()
    if isinstance(value, str) and value in names:
        return value
    if _within(value, LIMITS[param]):
        return float(value)
    bounds = [f"{LIMIT_WORDS[bound]} {limit}" for bound, limit in LIMITS[param].items()]
    wanted = "one of " + ", ".join(names) + ", or a number" if names else "a number"
    raise ConfigError(f"pair_loss: {param} must be {', '.join([wanted, *bounds])}; found {value!r}.")


def _within(value: Any, limits: Mapping[str, float]) -> bool:
    is_number = not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value)
    return is_number and all(getattr(operator, bound)(value, limit) for bound, limit in limits.items())


def wpo_problems(loss: Loss) -> Iterator[str]:
    """Yield what is wrong with WPO's weights for a loss."""
    coupled = [name for name in weights(loss) if OBJECTIVES[name].coupled]
    if coupled:
        yield (
            f"weighs the loss of each pair, but {', '.join(coupled)} looks at a whole batch, where a pair has no loss "
            "of its own. Remove wpo, or use another loss."
        )


def problems(loss: Loss, told: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (parameter, what is wrong and the way out) for parameters that were told and cannot be used."""
    names = ", ".join(weights(loss))
    takes = list(dict.fromkeys(param for name in weights(loss) for param in OBJECTIVES[name].params))
    for param, value in told.items():
        if param not in takes:
            others = [other for other, one in OBJECTIVES.items() if param in one.params]
            yield (
                param,
                f"{value} does nothing with the loss {names}, which takes {', '.join(takes)}. Remove {param}"
                + (f", or use a loss that has it: {', '.join(others)}." if others else "."),
            )
    if "exo_pair" in weights(loss) and told.get("label_smoothing") == 0:
        yield (
            "label_smoothing",
            "0 with the loss exo_pair asks for the logarithm of 0. Use a small number such as 0.001.",
        )
