"""docs/objectives.md, made from the registry: `python -m isopref.config.objectives_page`. Imports no torch."""

from isopref.objectives.declare import Objective
from isopref.objectives.registry import OBJECTIVES

LEGEND = """\
| letters | meaning |
|---|---|
| `P_c`, `P_r` | log pi(c\\|x), log pi(r\\|x): log-probability of chosen and rejected, summed over the tokens |
| `p_c`, `p_r` | the same, divided by the tokens of the answer |
| `R_c`, `R_r` | the sums for the reference: log ref(c\\|x), log ref(r\\|x) |
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
declarations in `isopref/objectives`; do not edit it.

{legend}
A parameter that is left out (null) has the default of the loss. One that the loss does not take is refused.

| `objective.loss` | loss of a pair | reference | parameters, with defaults | when to use it | paper |
|---|---|---|---|---|---|
{rows}

## Several at once

`objective.loss: {{sigmoid: 1.0, hinge: 0.5}}` adds the losses of a pair with these weights. A parameter goes to those
that take it, and is refused where none does; one that is left out is each loss's own default. Rewards, margins and
accuracy in the metrics are those of the first.

## Losses that couple a batch

`bco_pair`, `aot` and `aot_unpaired` look at all pairs of a global batch. Each step first scores all its pairs without a
gradient and gathers their log-probabilities from all ranks: that gives the loss of the batch and what each
log-probability counts for in it. A second pass back-propagates that. So the loss is the same under every layout, for a
forward pass more, which is a third more work. Held-out pairs are evaluated as one batch.

**aot.** `sorted` pairs the two sides off by their ranks in the batch. Where pairs have weights, by
`objective.weighting` or in the data, both sides are distributions with these weights, and mass moves from one to the
other in order: a pair of weight 2 is the same as a pair that is there twice. Two margins that are equal but for
rounding may change places between two layouts.

**bco_pair.** A batch of N pairs has the mean gain g = sum w_p (G_c + G_r)/2 / sum w_p, with the loss's weights, and
d = b * (sum of N g) / (sum of N) over all batches of the run up to this one. No gradient goes through d. It is in the
checkpoint, so that a resumed run goes on with it.

## Ranked lists

`plackett_luce`, `softmax` and `lipo` take the answers of a prompt as a whole, with their scores
([data](data.md#lists-of-answers)). "Below" is a lower score; answers with equal scores are not compared. Every other
loss takes a list as comparisons: `data.compare` says which, and each is a pair to the loss. Either way an answer is
computed once. With two answers, `plackett_luce` and `softmax` are `sigmoid`.

**softmax** is one against the rest: the answer with the best score against all others at once. If several share the
best score, each of them is compared with those below, and the loss is the sum.

**lipo.** The weight of a pair i, j is

    w_ij = (2^y_i - 2^y_j) * |1 / log(1 + rank_i) - 1 / log(1 + rank_j)|

where y is the score, scaled to 0 for the worst and 1 for the best answer of the list, and the ranks are by reward. No
gradient goes through the weights. The paper's ranks are whole numbers. Those would be decided by rounding when rewards
are equal, as all of them are before the first step, and the layout would show. So which of two answers ranks higher is
left to chance here, with a probability of s((b G_i - b G_j) / `rank_temperature`), and w_ij is the mean over both
outcomes, each with the ranks to be expected then. Rewards several temperatures apart give the paper's weights.

`objective.weighting` counts a list as 1 (`example`), as the tokens of its answers (`completion`) or as the tokens of
all its sequences (`token`). For losses of pairs, the comparisons of a list share its 1 equally under `example`, while
`completion` and `token` count each comparison as a pair, and `gap` counts it by the difference between its two scores;
losses of lists refuse `gap`. Accuracy, margins and rewards are over comparisons in both
cases. `objective.wpo` and `objective.ld_alpha` are refused with losses of lists.

## Reward models

`bradley_terry` and `plackett_luce_reward` train a [reward model](rewards.md): r is the number that its head gives an
answer, and `gap` the difference between the scores that the data gives the two answers of a pair.

## Divergences

`objective.divergence` of `sigmoid`, by u = pi/ref of an answer (f-DPO, table 1). A constant falls out of the
difference; here f'(1) is 0, so that an answer's reward, b f'(u), is 0 where the policy equals the reference:

| `objective.divergence` | f'(u) |
|---|---|
| `reverse_kl` | log u: DPO |
| `forward_kl` | 1 - 1/u |
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

Without it, a loss of the margin alone can fall while the chosen answers become less likely too: only the difference
counts. The demo shows what that does to a small model. Two runs that differ in nothing but this field, one each (155
pairs, 20 steps, `lr` 1e-5, `beta` 0.1), with the demo's [spot checks](reports.md#what-it-cost):

| `nll_weight` | held-out accuracy | mean reward margin | of 32 facts, still correct | text, log-prob per token |
|---|---|---|---|---|
| 4 | 0.975 | +1.31 | 30 | +0.021 |
| 0 | 1.000 | +2.27 | 20 | +0.019 |

The accuracy and the margin are better without the term, and the model is worse: "The capital of Russia is Russia.",
"The planet is called the red planet.", and "A volcano is a volcano is a volcano" up to the limit. With it: "The capital
of Russia is Moscow.", "The planet is called Mars.", "A volcano is a volcano that erupts and creates lava." Plain text
stays as likely in both, so it takes questions to see the difference.

## The balance of experts

`objective.balance_weight` adds, for a mixture of experts, the auxiliary loss of the Switch Transformer (Fedus et al.
2021, 2101.03961, eqs. 4 to 6), on the mean over the layers that have experts:

    balance_weight * mean over layers of E * sum over experts e of f_e P_e

f_e is the share of the global batch's tokens that are sent to e, P_e the mean over them of its probability; E is the
number of experts. The tokens are those of both sequences of every pair, prompts in each of the two, as if no layout
shared them, and never padding. Every token counts the same, whatever its pair's weight. With k experts for a token and
all of them busy alike it is k. No gradient goes through f, so f comes from a first pass, as above, and P from the
second: exact under every layout. It is logged as `train/balance`; `train/loss` includes it, the held-out loss does not.
Models that do not show their routers' decisions (`router_logits` of transformers) are refused, and so are those that
choose experts by more than these, such as a correction bias. Layers are not compiled with it.

## Length

`objective.ld_alpha` is the alpha of LD-DPO (Liu et al. 2024, 2409.06411). With n tokens in a pair's shorter answer,

    log pi(y|x) = sum of the first n tokens' log-probabilities + alpha * sum of those after

for both answers, under the model and the reference alike, in any of the losses; token counts stay what they are. 1 is
plain, 0 cuts the longer answer off. Log-probabilities in the metrics and in the evaluation are these too, but for the
likelihood term, which has all tokens.

## Pairs the model would write

`objective.wpo` multiplies the loss of a pair by w(c) w(r) (WPO, Zhou et al. 2024, 2406.11827):

    w(y) = exp of the mean over the tokens of y of [log pi(token) - log sum_v pi(v)^2]

of the model as it is at this step; no gradient goes through it. A token that the model would draw now has about 1. The
denominator of the loss stays the sum of w_p, and neither the likelihood term nor the held-out loss has these weights.
It costs one pass more over the logits. Losses that couple a batch have no loss of one pair, and are refused with it.

## A reference that moves

`objective.reference_moves: [k, a]` (TR-DPO, Gorbatovski et al. 2024, 2404.09656) moves the weights of the reference
after every k-th step:

    ref = a * model + (1 - a) * ref

It begins where `model.reference` says. It costs a second set of weights in memory and in every checkpoint, sharded as
the model is (whole on every rank under DDP), and a forward pass for each microbatch (two where the loss has a first
pass), in place of log-probabilities that are known ahead of time. Held-out pairs are compared with the reference as it
was at the start, so that the figures of a run can be compared.

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
- **aot, aot_unpaired** are the same on one batch with `weighting: example`. TRL sorts inside each microbatch.
- **bco_pair.** TRL 1.16 leaves the shift d out.
- **reference_moves.** The same weights after the same steps (`sync_ref_model`).
- **ld_alpha, wpo** are the same for one pair. TRL divides by the pairs of a microbatch.
- **balance_weight.** TRL and transformers throw all layers together before they multiply f and P, and balance each
  microbatch. Here each layer is balanced, over the global batch. With one layer and one microbatch they agree.
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
    params = ", ".join(f"`{param}` {value}" for param, value in one.defaults.items())
    reference = "yes" if one.needs_reference else "no"
    return f"| `{name}` | `{one.equation}` | {reference} | {params} | {one.use}. | {one.paper} |"


if __name__ == "__main__":
    import sys

    sys.stdout.write(page())
