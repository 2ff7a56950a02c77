"""What is known of each objective, but for its formula (losses.py): parameters, defaults, equation, paper.

The registry of the family. The config checks itself against it, and docs/objectives.md is made from it:
`python -m isopref.objectives`. Imports no torch.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from isopref.errors import ConfigError

Name = Literal[
    "sigmoid", "dpo_norm", "robust", "hinge", "ipo", "ipo_sum", "exo_pair", "nca_pair", "sppo_hard", "apo_zero",
    "apo_down", "discopop", "simpo", "orpo", "cpo",
]  # fmt: skip


@dataclass(frozen=True)
class Objective:
    """One objective of the family: the facts about a loss of one pair."""

    params: Mapping[str, Any]  # the parameters it takes, and what each one is where it is not given
    equation: str  # in the letters of LEGEND
    use: str
    paper: str
    needs_reference: bool = True  # without: nothing is scored for one
    per_token: bool = False  # its rewards are means over the tokens of an answer, not sums


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


def resolve(name: str, **given: Any) -> dict[str, Any]:
    """The parameters of the objective `name`: those given, and its defaults for those that are None or left out.

    Raises ConfigError for an unknown name, and for what the objective cannot use.
    """
    if name not in OBJECTIVES:
        raise ConfigError(f"objective.loss: unknown '{name}'. Known: {', '.join(OBJECTIVES)}.")
    told = {param: value for param, value in given.items() if value is not None}
    for param, what in problems(name, told):
        raise ConfigError(f"objective.{param}: {what}")
    return {**OBJECTIVES[name].params, **told}


def problems(name: Name, told: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (parameter, what is wrong and the way out) for parameters that were told and cannot be used."""
    takes = OBJECTIVES[name].params
    for param, value in told.items():
        if param not in takes:
            others = [other for other, one in OBJECTIVES.items() if param in one.params]
            yield (
                param,
                f"{value} does nothing with objective.loss: {name}, which takes {', '.join(takes)}. Remove {param}"
                + (f", or use a loss that has it: {', '.join(others)}." if others else "."),
            )
    if name == "exo_pair" and told.get("label_smoothing") == 0:
        yield (
            "label_smoothing",
            "0 with objective.loss: exo_pair asks for the logarithm of 0. Use a small number such as 0.001.",
        )


LEGEND = """\
| letters | meaning |
|---|---|
| `P_c`, `P_r` | log pi(c\\|x), log pi(r\\|x): log-probability of chosen and rejected, summed over the tokens |
| `p_c`, `p_r` | the same, divided by the tokens of the answer |
| `G_c`, `G_r` | log pi - log ref of the answer, summed over its tokens |
| `g_c`, `g_r` | the same, divided by the tokens of the answer |
| `m` | G_c - G_r, the margin |
| `b`, `e` | `objective.beta`, `objective.label_smoothing` |
| `s`, `ls` | the logistic function, and its logarithm |
"""

PAGE = """\
# Objectives

`objective.loss` names the loss of one pair. The loss of a global batch is the weighted mean over its pairs
([concepts](concepts.md#the-objective)), for each of them, under every layout. `make docs` writes this page from the
registry in `isopref/objectives.py`; do not edit it.

{legend}
A parameter that is left out (null) has the default of the loss. One that the loss does not take is refused.

| `objective.loss` | loss of a pair | reference | parameters, with defaults | when to use it | paper |
|---|---|---|---|---|---|
{rows}

## Divergences

`objective.divergence` of `sigmoid`, by u = pi/ref of an answer (f-DPO, table 1; constants fall out of the difference):

| `objective.divergence` | f'(u) |
|---|---|
| `reverse_kl` | log u: DPO |
| `forward_kl` | -1/u |
| `jensen_shannon` | log(2u / (1 + u)) |
| a number a, above 0 and below 1 | (1 - u^-a) / a: the alpha-divergence; near 0 reverse KL, near 1 forward KL |

Powers of u above exp 30 are continued by their tangent, so that a pair far out has a finite loss and still a gradient.

## The likelihood of chosen answers

`objective.nll_weight` adds a term to any of them, with a denominator of its own:

    nll_weight * - sum v_p log pi(c_p|x_p) / sum v_p n_p

n_p are the tokens of the chosen answer c_p, v_p is the weight of the pair in the data (1 where there is none); both
sums go over the global batch. It is the loss of fine-tuning on the chosen answers, the same under every layout, and is
logged as `train/nll`; `train/loss` is what is minimised, this term included. RPO (Pang et al. 2024, 2404.19733, eq. 1)
adds a mean over each answer's own tokens; here a token counts the same in every answer.

{notes}"""

NOTES = """\
## Where others differ

Compared with TRL 1.16 on the same log-probabilities, pair by pair:

- **Batches.** TRL takes a mean over each microbatch, so all its losses change with the cut.
- **sigmoid.** TRL accepts `label_smoothing` and does not use it for this loss. Here it is conservative DPO.
- **alpha-divergence.** TRL's coefficient is 1 - a. It cuts powers of u off at exp 80, where the gradient ends.
- **exo_pair.** The same, but here the smoothing it needs has a default.
- **ipo.** The same as `ipo` here. `ipo_sum` is not in TRL.
- **dpo_norm** is TRL's `sigmoid_norm`, here with label smoothing.
- **discopop.** The same where TRL's is finite: its exp(-b m) overflows far below zero, times a zero. Here the product
  is one exponential.
- **simpo** is the same. TRL also has smoothing for it.
- **robust, hinge, nca_pair, sppo_hard, apo_zero, apo_down** are the same.
- **orpo.** TRL adds the likelihood as a mean over the tokens of a microbatch, prompts included. Here it is the mean
  over the chosen answer's tokens, pair by pair.
- **cpo.** The paper writes the log-likelihood of an answer as a sum; TRL takes the mean over the tokens of a
  microbatch. Here it is the mean over the answer's tokens, pair by pair.
"""


def page() -> str:
    """docs/objectives.md."""
    rows = "\n".join(_row(name, one) for name, one in OBJECTIVES.items())
    return PAGE.format(legend=LEGEND, rows=rows, notes=NOTES)


def _row(name: str, one: Objective) -> str:
    params = ", ".join(f"`{param}` {value}" for param, value in one.params.items())
    reference = "yes" if one.needs_reference else "no"
    return f"| `{name}` | `{one.equation}` | {reference} | {params} | {one.use}. | {one.paper} |"


if __name__ == "__main__":
    import sys

    sys.stdout.write(page())
