"""The section `objective`: what is minimised over a global batch. Imports no torch."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from isopref import objectives
from isopref.config.section import Count, Positive, Section

LOSS_PARAMS = ("beta", "label_smoothing", "gamma", "divergence")  # null: the loss's own default
Weighting = Literal["token", "completion", "pair"]


def _within(param: str) -> Any:
    """The bounds of a parameter."""
    return Field(**objectives.LIMITS[param])


class ObjectiveConfig(Section):
    loss: objectives.Name | Annotated[dict[objectives.Name, Positive], Field(min_length=1)] = Field(
        default="sigmoid",
        description="Loss of one pair. sigmoid: the loss of the DPO paper; docs/objectives.md tells them all apart. "
        "Several are added with their weights, as in {sigmoid: 1.0, hinge: 0.5}.",
    )
    beta: Annotated[float, _within("beta")] | None = Field(
        default=None,
        description="How strongly the model is held to the reference; higher: it stays closer. For some losses a scale "
        "of their own. null: the loss's default, which is 0.1 for sigmoid.",
    )
    label_smoothing: Annotated[float, _within("label_smoothing")] | None = Field(
        default=None,
        description="Share of the labels taken to be swapped. For sigmoid, dpo_norm, robust, exo_pair, aot and "
        "aot_unpaired. null: the loss's default, which is 0 for sigmoid.",
    )
    gamma: Annotated[float, _within("gamma")] | None = Field(
        default=None, description="Margin of rewards to reach. For simpo. null: the loss's default."
    )
    divergence: objectives.Divergence | Annotated[float, _within("divergence")] | None = Field(
        default=None,
        description="What holds the model to the reference; a number is the alpha of the alpha-divergence. For "
        "sigmoid. null: reverse_kl, as in the DPO paper.",
    )
    nll_weight: Annotated[float, _within("nll_weight")] = Field(
        default=0.0,
        description="Weight of a term that is added for any loss: the negative log-likelihood of the chosen answers, "
        "per token over the global batch (fine-tuning on them, as in RPO).",
    )
    balance_weight: Annotated[float, _within("balance_weight")] = Field(
        default=0.0,
        description="Weight of a term that is added for mixtures of experts: the balance of their experts over the "
        "tokens of the global batch. Takes a forward pass more.",
    )
    ld_alpha: Annotated[float, _within("ld_alpha")] = Field(
        default=1.0,
        description="What a token beyond the length of the pair's shorter answer counts for, in model and reference "
        "alike (LD-DPO): below 1, length weighs less. 1: all tokens alike.",
    )
    wpo: bool = Field(
        default=False,
        description="Weigh the loss of each pair by how likely its answers are under the model as it is (WPO).",
    )
    # Not strict: YAML has lists where Python has tuples. The two numbers in it stay strict.
    reference_moves: tuple[Count, Annotated[float, Field(gt=0, le=1)]] | None = Field(
        default=None,
        strict=False,
        description="Move the reference towards the model as it trains (TR-DPO): [64, 0.6] is every 64 steps, 0.6 of "
        "the way. Keeps a second model in memory. null: it stays where it is.",
    )
    weighting: Weighting = Field(
        default="token",
        description="Weight of a pair in the batch's mean. token: the tokens of both its sequences, "
        "prompt included; completion: the tokens of its two answers; pair: 1, as in the DPO paper.",
    )

    @property
    def params(self) -> dict[str, float | str | None]:
        """The parameters of the loss; None where its default is asked for."""
        return {name: getattr(self, name) for name in LOSS_PARAMS}

    @property
    def needs_reference(self) -> bool:
        return any(objectives.OBJECTIVES[name].needs_reference for name in objectives.weights(self.loss))

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, what is wrong and the way out) for settings that cannot work or do nothing together."""
        told = {name: value for name, value in self.params.items() if value is not None}
        yield from objectives.problems(self.loss, told)
        for what in objectives.wpo_problems(self.loss) if self.wpo else ():
            yield "wpo", what
        if self.reference_moves and not self.needs_reference:
            moves, loss = list(self.reference_moves), ", ".join(objectives.weights(self.loss))
            yield "reference_moves", f"{moves} does nothing with objective.loss: {loss}: no reference. Remove it."
