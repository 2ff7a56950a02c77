"""Signs that a run learnt its preference but damaged the model, which a held-out accuracy of 1.00 does not show.

The signs come from what every run records: training metrics, and answers to held-out prompts before and after.
"""

import math
from collections.abc import Iterator, Sequence

from isopref.report.elements import fixed
from isopref.runs.read import RunRecord, Series

FALL = 0.15  # fall of the chosen answers' log-probability, relative to its value at the start
REPEATED = 0.3  # share of an answer's word triples that repeat an earlier one
MORE_REPEATED = 0.2  # by how much that share must exceed the share before training
SHORT = 4  # words; a shorter answer has at most one triple, so it cannot repeat any
COLLAPSED = 3  # how many times shorter answers must be than before, and than a chosen answer
LETTERS = 4  # per token, roughly, in English; other scripts have fewer, so there this sign is rarer
AT_EACH_END = 10  # a tenth of the logged steps, at least one, is averaged at either end


def signs(run: RunRecord) -> Iterator[str]:
    """One sentence for each sign of degeneration."""
    yield from _less_likely(run)
    before, after = ([sample[f"greedy_{when}"] for sample in run.samples] for when in ("before", "after"))
    if not after:
        return
    old, new = _mean_repetition(before), _mean_repetition(after)
    if new > REPEATED and new > old + MORE_REPEATED:
        yield (
            f"Answers repeat themselves: {100 * new:.0f}% of their word triples are repeats, up from "
            f"{100 * old:.0f}% before training."
        )
    empty, was_empty = (sum(not text.strip() for text in texts) for texts in (after, before))
    if empty > was_empty:
        yield f"{empty} of {len(after)} answers are empty, up from {was_empty} before training."
    yield from _collapsed(run, *(sum(len(text.strip()) for text in texts) / len(texts) for texts in (before, after)))


def _collapsed(run: RunRecord, before: float, after: float) -> Iterator[str]:
    """Answers are far shorter than before, although the chosen answers are not. Lengths are in letters."""
    if after * COLLAPSED > before:
        return
    compared = ""
    if run.rewards is not None:
        tokens = float(run.rewards.tokens[:, 0].mean())
        if after * COLLAPSED > tokens * LETTERS:  # the chosen answers are short too
            return
        compared = f", while held-out chosen answers have {tokens:.0f} tokens"
    yield (f"Answers collapsed in length: {after:.0f} letters on average, from {before:.0f} before training{compared}.")


def _less_likely(run: RunRecord) -> Iterator[str]:
    logps, rewards = (_ends(run.metrics.get(f"train/{name}_chosen")) for name in ("logps", "rewards"))
    if logps is None:
        return
    first, last = logps
    if last >= first - FALL * abs(first):
        return
    # Steps have different pairs, and longer answers are less likely. The reward compares the same answers.
    if rewards is not None and rewards[1] >= rewards[0]:
        return
    weight = run.config["objective"]["nll_weight"]
    remedy = (
        f"a larger objective.nll_weight ({weight} here) or a smaller optim.lr" if weight else "objective.nll_weight"
    )
    yield (
        f"Chosen answers became less likely: their mean log-probability in training fell from {fixed(first, 1)} to "
        f"{fixed(last, 1)} nats. Losses that see only the margin allow this; {remedy} counteracts it."
    )


def _ends(series: Series | None) -> tuple[float, float] | None:
    """Means over the first and the last logged steps with finite values; None if there are fewer than two."""
    values = [value for value in series.values if math.isfinite(value)] if series is not None else []
    if len(values) < 2:
        return None
    part = max(1, len(values) // AT_EACH_END)
    first, last = (sum(some) / part for some in (values[:part], values[-part:]))
    return first, last


def _mean_repetition(texts: Sequence[str]) -> float:
    return sum(map(repetition, texts)) / len(texts)


def repetition(text: str) -> float:
    """The share of a text's word triples that repeat an earlier one. 0 for a text of fewer than SHORT words."""
    words = text.lower().split()
    triples = list(zip(words, words[1:], words[2:], strict=False))
    return 1 - len(set(triples)) / len(triples) if len(words) >= SHORT else 0.0
