"""docs/objectives.md, generated from the registry: `python -m isopref.config.objectives_page`. Imports no torch."""

from isopref.objectives.declare import Objective
from isopref.objectives.registry import OBJECTIVES

LEGEND = """\
| symbol | meaning |
|---|---|
| `P_c`, `P_r` | log pi(c\\|x), log pi(r\\|x): log-probability of the chosen and rejected answer, summed over tokens |
| `p_c`, `p_r` | the same, divided by the number of trained tokens in the answer |
| `R_c`, `R_r` | the same sums under the reference: log ref(c\\|x), log ref(r\\|x) |
| `G_c`, `G_r` | log pi - log ref of the answer, summed over its tokens |
| `g_c`, `g_r` | the same, divided by the number of trained tokens in the answer |
| `m` | G_c - G_r, the margin |
| `G` | G of a labelled answer |
| `b`, `e` | `objective.beta`, `objective.label_smoothing` |
| `s`, `ls` | the logistic function and its logarithm |
"""

PAGE = """\
# Objectives

`objective.loss` selects the loss of a pair, a list or a labelled answer. The loss of a global batch is the weighted
mean of these ([concepts](concepts.md#the-objective)), under every layout. `make docs` generates this page from the
declarations in `isopref/objectives`; do not edit it.

{legend}
An omitted parameter (null) takes the loss's default. A parameter that the loss does not take is refused.

| `objective.loss` | loss of a pair | reference | parameters, with defaults | when to use it | paper |
|---|---|---|---|---|---|
{rows}

## Combining losses

`objective.loss: {{sigmoid: 1.0, hinge: 0.5}}` adds the losses of a pair with these weights. A parameter applies to
every loss that takes it and is refused if none does; if you omit it, each loss uses its own default. Rewards, margins
and accuracy in the metrics are those of the first loss.

## Losses that couple a batch

`bco_pair`, `aot` and `aot_unpaired` depend on all pairs of a global batch. Each step first scores all its pairs without
gradients and gathers their log-probabilities from all ranks, which gives the batch loss and its derivative with respect
to each log-probability. A second pass back-propagates these derivatives. So the loss is the same under every layout, at
the cost of one extra forward pass, about a third more work. Held-out pairs are evaluated as one batch.

**aot.** `sorted` matches the two sides by rank within the batch. If pairs have weights, from `objective.weighting` or
the data, both sides are distributions with these weights, and mass is matched in order: a pair of weight 2 equals the
same pair twice. Two margins that are equal up to rounding may be ordered differently in different layouts.

**bco_pair.** A batch of N pairs has the mean gain g = sum w_p (G_c + G_r)/2 / sum w_p, with the loss's weights, and
d = b * (sum of N g) / (sum of N) over all batches of the run so far. No gradient flows through d. The checkpoint
includes it, so a resumed run continues with it.

## Ranked lists

`plackett_luce`, `softmax` and `lipo` take all answers to a prompt at once, with their scores
([data](data.md#lists-of-answers)). "Below" means a lower score; answers with equal scores are not compared. Every other
loss sees a list as comparisons: `data.compare` selects them, and the loss treats each one as a pair. Either way, each
answer is computed once. With two answers, `plackett_luce` and `softmax` equal `sigmoid`.

**softmax** compares the best answer with all the others at once. If several answers share the best score, each of them
is compared with those below, and the loss is the sum.

**lipo** weights a pair i, j by

    w_ij = (2^y_i - 2^y_j) * |1 / log(1 + rank_i) - 1 / log(1 + rank_j)|

where y is the score, scaled to 0 for the worst and 1 for the best answer of the list, and the ranks are by reward. No
gradient flows through the weights. The paper's ranks are integers. But when rewards are equal, as all of them are
before the first step, such ranks would depend on rounding, and therefore on the layout. So isopref makes them soft:
answer i ranks above j with probability s((b G_i - b G_j) / `rank_temperature`), and w_ij is the mean over both
outcomes, each with the ranks expected in that case. Rewards several temperatures apart give the paper's weights.

The weight of a list in the batch depends on `objective.weighting`:

| `objective.weighting` | with a list loss | with a pairwise loss |
|---|---|---|
| `example` | the list counts as 1 | the list counts as 1, shared equally by its comparisons |
| `completion` | trained tokens of its answers | each comparison counts as a pair: trained tokens of its two answers |
| `token` | tokens of all its sequences | each comparison counts as a pair: tokens of its two sequences |
| `gap` | refused | each comparison counts by the difference between its two scores |

In all cases accuracy, margins and rewards are over comparisons. `objective.wpo` and `objective.ld_alpha` are refused
with list losses.

## Labelled answers

`kto` and `bco` learn from single answers labelled good or bad: a thumbs up or down. They also accept pairs, with the
chosen answer as good and the rejected one as bad. Scored lists are refused, because a score is not a label. Answers to
the same prompt can share an example, so that the prompt is computed once.

`objective.weighting` sets the weight of each answer: an equal share of its example, which counts as 1 (`example`); its
number of trained tokens (`completion`); or the tokens of its full sequence (`token`). `objective.nll_weight` adds the
likelihood of good answers. `objective.wpo` and `objective.ld_alpha` are refused, and losses for labels cannot be
combined with others.

**kto.** z estimates the KL divergence between policy and reference: the mean of G over mismatched pairs (a prompt with
an answer to another prompt), clamped at 0 and without a gradient. Each example has a fixed partner, determined by
content: the next example with a different question in the order of their hashes. The partner contributes its answer
with the smallest hash, truncated so that the mismatched sequence is no longer than the longest one in the data. z
averages over the mismatched pairs of the global batch, across all ranks, weighted like their examples. This costs a
forward pass over one extra answer per example. Data with a single question is refused. w_d and w_u are
`objective.desirable_weight` and `objective.undesirable_weight`; the loss is still divided by the sum of the weights
without them.

**bco.** d is b times the midpoint between the mean of G over good answers and its mean over bad answers. Both means use
the weights of the loss and cover all batches of the run so far, each batch in proportion to its answers. Until both
kinds have appeared, d uses the mean of the kind seen so far. d has no gradient and is saved in checkpoints. On pairs
with `weighting: example`, `bco` is half of `bco_pair`.

Training logs `rewards_chosen` and `logps_chosen` over good answers, `rewards_rejected` and `logps_rejected` over bad
ones, `margin` as the difference between the means of G over good and bad answers, and for kto the KL estimate as `kl`.
`accuracy` is the share of answers on the correct side of z or d. A batch without bad answers does not contribute to the
metrics of bad answers. Held-out answers are evaluated as a single batch: loss, AUC of rewards, mean rewards, and how
well sigmoid(reward) predicts the share of good answers.

## Reward models

`bradley_terry` and `plackett_luce_reward` train a [reward model](rewards.md): r is the reward that its head assigns to
an answer, and `gap` is the difference between the scores of the pair's two answers in the data.

## Divergences

With the loss `sigmoid`, `objective.divergence` selects f' in terms of u = pi/ref of an answer (f-DPO, table 1).
Constants cancel in the difference; here f'(1) = 0, so an answer's reward, b f'(u), is 0 if the policy equals the
reference:

| `objective.divergence` | f'(u) |
|---|---|
| `reverse_kl` | log u: DPO |
| `forward_kl` | 1 - 1/u |
| `jensen_shannon` | log(2u / (1 + u)) |
| a number a between 0 and 1, exclusive | (1 - u^-a) / a: the alpha-divergence; near 0 reverse KL, near 1 forward KL |

Above exp(30), powers of u are extrapolated linearly in log u, so outlier pairs keep a finite loss and a gradient.

## The likelihood of chosen answers

`objective.nll_weight` adds a term to any loss, with its own denominator:

    nll_weight * - sum v_p log pi(c_p|x_p) / sum v_p n_p

n_p is the number of tokens in the chosen answer c_p, v_p the pair's weight in the data (1 by default); both sums are
over the global batch. Without the factor `nll_weight`, this is the loss of supervised fine-tuning on the chosen
answers, the same under every layout. It is logged as `train/nll`; `train/loss` is what is minimised, including this
term. RPO (Pang et al. 2024, 2404.19733, eq. 1) adds a mean over each answer's own tokens; here every token counts the
same.

Without this term, a loss that depends only on the margin can fall while the chosen answers become less likely too. The
demo shows what that does to a small model. The table compares two runs that differ only in this field, one run each
(155 pairs, 20 steps, `lr` 1e-5, `beta` 0.1), with the demo's [spot checks](reports.md#what-it-cost):

| `nll_weight` | held-out accuracy | mean reward margin | facts kept, of 32 | change in text log-prob per token |
|---|---|---|---|---|
| 4 | 0.975 | +1.31 | 30 | +0.021 |
| 0 | 1.000 | +2.27 | 20 | +0.019 |

Without the term, accuracy and margin are better, but the model is worse: "The capital of Russia is Russia.", "The
planet is called the red planet.", and "A volcano is a volcano is a volcano" up to the length limit. With it: "The
capital of Russia is Moscow.", "The planet is called Mars.", "A volcano is a volcano that erupts and creates lava."
Plain text stays as likely in both runs, so only the questions reveal the difference.

## The balance of experts

For a mixture of experts, `objective.balance_weight` adds the auxiliary loss of the Switch Transformer (Fedus et al.
2021, 2101.03961, eqs. 4 to 6), averaged over the layers that have experts:

    balance_weight * mean over layers of E * sum over experts e of f_e P_e

f_e is the share of the global batch's tokens routed to expert e, P_e its mean routing probability over all tokens of
the batch, and E the number of experts. The tokens are those of both sequences of every pair, and the prompt counts in
each, even if the layout shares it; padding never counts. Every token counts the same, whatever its pair's weight. With
k experts per token and a uniform load, the value is k. No gradient flows through f, so f comes from a first pass, as
[above](#losses-that-couple-a-batch), and P from the second. So the term is exact under every layout. It is logged as
`train/balance`; `train/loss` includes it, the held-out loss does not. Models that do not expose their routers'
decisions (`router_logits` in transformers) are refused, and so are those that select experts by anything else, such as
a correction bias. With this term, isopref does not compile layers.

## Length

`objective.ld_alpha` is the alpha of LD-DPO (Liu et al. 2024, 2409.06411). If a pair's shorter answer has n tokens,

    log pi(y|x) = sum of the first n tokens' log-probabilities + alpha * sum of those after

for both answers, under the model and the reference alike, in any loss; token counts stay the same. 1 is off, 0
truncates the longer answer. Log-probabilities in the metrics and in the evaluation follow this definition too. Only the
likelihood term uses all tokens.

## Pairs the model would write

`objective.wpo` multiplies the loss of a pair by w(c) w(r) (WPO, Zhou et al. 2024, 2406.11827):

    w(y) = exp of the mean over the tokens of y of [log pi(token) - log sum_v pi(v)^2]

under the model at the current step; no gradient flows through it. For a token that the model would sample itself, the
exponential is about 1. The denominator of the loss remains the sum of w_p, and these weights apply neither to the
likelihood term nor to the held-out loss. WPO costs one extra pass over the logits. It is refused with losses that
couple a batch, since these have no loss per pair.

## A reference that moves

`objective.reference_moves: [k, a]` (TR-DPO, Gorbatovski et al. 2024, 2404.09656) updates the weights of the reference
after every k-th step:

    ref = a * model + (1 - a) * ref

It starts from `model.reference`. It costs a second set of weights in memory and in every checkpoint, sharded like the
model (a full copy on every rank under DDP), and one forward pass per microbatch (two if the loss has a first pass)
instead of precomputed log-probabilities. Held-out pairs are compared with the initial reference, so metrics stay
comparable over the run.

{notes}"""

NOTES = """\
## Where others differ

Compared with TRL 1.16 on the same log-probabilities, pair by pair:

- **Batches.** TRL averages over each microbatch, so all its losses depend on the microbatch size.
- **sigmoid.** TRL accepts `label_smoothing` but ignores it for this loss. Here it gives conservative DPO.
- **alpha-divergence.** TRL's coefficient is 1 - a. TRL clamps powers of u at exp(80), beyond which there is no
  gradient.
- **exo_pair.** The same, except that the label smoothing it needs has a default here.
- **ipo.** The same. `ipo_sum` is not in TRL.
- **dpo_norm** is TRL's `sigmoid_norm`, here with label smoothing.
- **discopop.** The same wherever TRL's is finite: for very negative margins, TRL's exp(-b m) overflows and is
  multiplied by zero. Here the product is a single exponential.
- **aot, aot_unpaired** are the same on one batch with `weighting: example`, but TRL sorts within each microbatch.
- **bco_pair.** TRL 1.16 omits the shift d.
- **kto.** The same loss for given log-probabilities and a given KL term. TRL pairs each prompt with the previous answer
  in its microbatch, even one to the same prompt, averages the KL term over ranks but not over accumulated microbatches,
  and takes a mean over each microbatch.
- **bco** is not in TRL 1.16.
- **reference_moves.** The same weights after the same steps (`sync_ref_model`).
- **ld_alpha, wpo** are the same for one pair. TRL divides by the number of pairs in a microbatch.
- **balance_weight.** TRL and transformers pool all layers before multiplying f and P, and balance each microbatch. Here
  each layer is balanced over the global batch. With one layer and one microbatch they agree.
- **simpo** is the same. TRL also offers label smoothing for it.
- **robust, hinge, nca_pair, sppo_hard, apo_zero, apo_down** are the same.
- **orpo.** TRL adds the likelihood as a mean over the tokens of a microbatch, including prompts. Here it is the mean
  over the chosen answer's tokens, per pair.
- **cpo.** The paper writes the log-likelihood of an answer as a sum; TRL takes the mean over the tokens of a
  microbatch. Here it is the mean over the answer's tokens, per pair.
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
