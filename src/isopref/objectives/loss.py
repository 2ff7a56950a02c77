"""The loss of a run: a sum of objectives with their parameters, and what modifies it.

T: terms, which are pairs, answers of lists or labelled answers (batch/terms.py); P: pairs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from isopref.batch.terms import TERMS
from isopref.errors import ConfigError
from isopref.objectives import registry
from isopref.objectives.coupled import Whole
from isopref.objectives.declare import Anchor, Objective, Reading
from isopref.types import Anchors, Kind, Logps, Microbatch, Needs, PairLogps, Readout


@dataclass(frozen=True)
class Summand:
    """An objective with its parameters filled in, and its weight in the sum."""

    objective: Objective
    params: Mapping[str, Any]
    weight: float = 1.0

    @property
    def needs_gaps(self) -> bool:
        declared = self.objective.needs_gaps
        return bool(self.params[declared]) if isinstance(declared, str) else declared

    def __call__(self, policy: Any, ref: Any, whole: Whole | None, anchors: Anchors | None) -> Tensor:
        batch: dict[str, Any] = {"whole": whole} if self.objective.coupled else {}
        if self.objective.anchor is not None:
            batch["anchor"] = self.anchor(anchors)
        return self.weight * self.objective(policy, ref, **batch, **self.params)

    def anchor(self, anchors: Anchors | None) -> Tensor:
        """What a gain is measured against: zero without an anchor."""
        found = getattr(anchors, self.objective.anchor or "", None)
        return torch.zeros(()) if found is None else found


@dataclass(frozen=True)
class Loss:
    """A sum of objectives of one kind: (policy, reference) -> T.

    What some have to know of the global batch is `whole` for those that couple pairs, `anchors` for labels.
    """

    summands: tuple[Summand, ...]
    nll_weight: float = 0.0  # of the term that is added: the negative log-likelihood of chosen answers, per token
    ld_alpha: float = 1.0  # what a token beyond the length of the pair's shorter answer counts for
    wpo: bool = False  # whether a pair counts by how likely its answers are under the policy
    balance_weight: float = 0.0  # of the term that is added for a mixture of experts: their balance

    def __call__(
        self, policy: Logps, ref: Logps, *, whole: Whole | None = None, anchors: Anchors | None = None
    ) -> Tensor:
        first, *others = (summand(policy, ref, whole, anchors) for summand in self.summands)
        loss_T = sum(others, first)
        weight = policy.weight if isinstance(policy, PairLogps) else None
        return loss_T if weight is None else weight * loss_T

    @property
    def kind(self) -> Kind:
        """What its terms are. All its objectives have the same."""
        return self.summands[0].objective.kind

    @property
    def readout(self) -> Reading:
        """What it takes of an answer: its log-probability, or a reward. The same for all its objectives."""
        return self.summands[0].objective.readout

    @property
    def needs(self) -> Needs:
        """What it has to know of a microbatch besides log-probabilities."""
        return Needs(
            heads=self.ld_alpha != 1,
            confidence=self.wpo,
            routing=self.balance_weight > 0,
            gaps=any(one.needs_gaps for one in self.summands),
        )

    @property
    def needs_reference(self) -> bool:
        """Without: nothing is scored for one, and what stands for it is zero."""
        return any(one.objective.needs_reference for one in self.summands)

    @property
    def coupled(self) -> bool:
        """Whether the loss of a pair depends on the other pairs of its global batch."""
        return any(one.objective.coupled for one in self.summands)

    @property
    def anchors(self) -> set[Anchor]:
        """Numbers of the global batch that it measures gains against."""
        return {one.objective.anchor for one in self.summands if one.objective.anchor is not None}

    @property
    def needs_mismatched(self) -> bool:
        """Whether prompts are also scored with the answers of other examples."""
        return "kl" in self.anchors

    @property
    def scores_twice(self) -> bool:
        """Whether a step begins with a pass without gradient over all its examples."""
        return self.coupled or "midpoint" in self.anchors or self.balance_weight > 0

    @property
    def first_pass(self) -> bool:
        """Whether anything is scored without gradient before a step's gradient is computed."""
        return self.scores_twice or self.needs_mismatched

    def view(self, readout: Readout, microbatch: Microbatch) -> Logps:
        """A microbatch as this loss takes it."""
        logps: Logps = TERMS[self.kind].view(readout, microbatch, self.needs)
        return self.taken(logps) if isinstance(logps, PairLogps) else logps

    def taken(self, logps: PairLogps) -> PairLogps:
        """Log-probabilities as this loss takes them: with `ld_alpha`, a discount on what is beyond the shorter answer.

        LD-DPO, Liu et al. 2024. The policy's and the reference's alike.
        """
        if self.ld_alpha == 1:
            return logps
        assert logps.heads is not None, "not asked for"
        whole = torch.stack([logps.chosen, logps.rejected])
        chosen, rejected = logps.heads + self.ld_alpha * (whole - logps.heads)
        return replace(logps, chosen=chosen, rejected=rejected, whole_chosen=logps.chosen)

    def threshold(self, anchors: Anchors | None) -> Tensor:
        """What the gain of a good answer should exceed, for a loss of labels. That of the first objective."""
        return self.summands[0].anchor(anchors)

    def gains(self, policy: PairLogps, ref: PairLogps) -> tuple[Tensor, Tensor]:
        """The implicit rewards over beta, up to a constant: P, P. Where there are several objectives, of the first."""
        first = self.summands[0]
        return first.objective.gains(policy, ref, **first.params)

    def rewards(self, policy: PairLogps, ref: PairLogps) -> tuple[Tensor, Tensor]:
        """The implicit rewards: P, P. An answer that is as likely as under the reference has a reward of 0."""
        first = self.summands[0]
        beta = first.params.get("beta", 1.0)
        chosen, rejected = self.gains(policy, ref)
        if first.objective.needs_reference:
            at_chosen, at_rejected = self.gains(ref, ref)
            chosen, rejected = chosen - at_chosen, rejected - at_rejected
        return beta * chosen, beta * rejected


def pair_loss(
    loss: registry.LossSpec,
    *,
    nll_weight: float = 0.0,
    ld_alpha: float = 1.0,
    wpo: bool = False,
    balance_weight: float = 0.0,
    **params: Any,
) -> Loss:
    """The objective of that name, or the sum of several with their weights: {"sigmoid": 1.0, "hinge": 0.5}.

    Parameters go to the objectives that take them; each has its defaults for those left out. Raises ConfigError for
    values out of bounds and for parameters that none of them takes.
    `nll_weight` adds that much of the negative log-likelihood of chosen answers, per token over the global batch.
    `ld_alpha` is LD-DPO's (the reference's log-probabilities must have the same), `wpo` weighs pairs as WPO does.
    `balance_weight` adds that much of the balance loss of a mixture of experts.
    """
    if not isinstance(wpo, bool):
        raise ConfigError(f"pair_loss: wpo must be True or False; found {wpo!r}.")
    for what in registry.wpo_problems(loss) if wpo else ():
        raise ConfigError(f"pair_loss: wpo: {what}")
    for what in registry.kind_problems(loss, ld_alpha=ld_alpha):
        raise ConfigError(f"pair_loss: {what}")
    for what in registry.reward_problems(loss, nll_weight=nll_weight, ld_alpha=ld_alpha, wpo=wpo):
        raise ConfigError(f"pair_loss: {what}")
    added = {"nll_weight": nll_weight, "ld_alpha": ld_alpha, "balance_weight": balance_weight}
    for name, value in added.items():
        registry.checked(name, value, registry.MODIFIERS[name])
    filled = registry.resolve(loss, **params)
    weights = registry.weights(loss)
    summands = (Summand(registry.OBJECTIVES[name], filled[name], weight) for name, weight in weights.items())
    return Loss(tuple(summands), nll_weight, ld_alpha, wpo, balance_weight)


def log_likelihood(policy: PairLogps) -> Tensor:
    """log pi(chosen), all its tokens alike: P."""
    return policy.chosen if policy.whole_chosen is None else policy.whole_chosen
