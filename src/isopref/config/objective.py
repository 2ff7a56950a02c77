"""The section `objective`: what is minimised over a global batch. Imports no torch.

Its own fields apply to any loss. In addition, it takes the parameters of the chosen loss, which the objectives declare.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic.functional_validators import ModelWrapValidatorHandler  # pydantic 2.9 does not export it elsewhere
from pydantic_core import InitErrorDetails, PydanticCustomError

from isopref.config.section import Count, Positive, Section
from isopref.objectives import registry
from isopref.objectives.registry import MODIFIERS, OBJECTIVES, PARAMS

if TYPE_CHECKING:
    Name = str
else:
    Name = Literal[tuple(OBJECTIVES)]

Weighting = Literal["example", "completion", "token", "gap"]


def _modifier(name: str) -> Any:
    param = MODIFIERS[name]
    return Field(default=param.default, description=param.meaning, **param.bounds)


class ObjectiveConfig(Section):
    model_config = ConfigDict(extra="allow")  # parameters of the loss, which `_check_params` lets in

    loss: Name | Annotated[dict[Name, Positive], Field(min_length=1)] = Field(
        default="sigmoid",
        description="Loss of a pair, list or labelled answer. sigmoid: the loss of the DPO paper; docs/objectives.md "
        "describes them all. To add several with weights: {sigmoid: 1.0, hinge: 0.5}.",
    )
    nll_weight: float = _modifier("nll_weight")
    balance_weight: float = _modifier("balance_weight")
    ld_alpha: float = _modifier("ld_alpha")
    wpo: bool = Field(
        default=False,
        description="Weight the loss of each pair by how likely its answers are under the current model (WPO).",
    )
    # Not strict: YAML has lists where Python has tuples. The two numbers in it stay strict.
    reference_moves: tuple[Count, Annotated[float, Field(gt=0, le=1)]] | None = Field(
        default=None,
        strict=False,
        description="Move the reference towards the model during training (TR-DPO): [64, 0.6] moves it every 64 steps, "
        "0.6 of the way. Keeps a second model in memory. null: the reference stays fixed.",
    )
    weighting: Weighting = Field(
        default="example",
        description="Weight of a pair in the batch mean. example: 1, as in the DPO paper; completion: the number of "
        "trained tokens in its two answers; token: the number of tokens in both its sequences, including the prompt; "
        "gap: the difference between the scores of its answers, which the data must have.",
    )

    @model_validator(mode="wrap")
    @classmethod
    def _check_params(cls, values: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Read the fields and the parameters of losses, and report problems with either in one error."""
        if not isinstance(values, dict):
            return handler(values)
        told = {name: value for name, value in values.items() if name not in cls.model_fields}
        wrong = list(_wrong_params(told))
        try:
            section = handler({name: value for name, value in values.items() if name not in told})
        except ValidationError as error:
            wrong = [*map(_raisable, error.errors()), *wrong]
        if wrong:
            raise ValidationError.from_exception_data(cls.__name__, wrong)
        assert section.model_extra is not None
        section.model_extra.update(dict.fromkeys(registry.takes(section.loss)))
        for name, value in told.items():
            if value is not None:
                section.model_extra[name] = value if isinstance(value, str) else float(value)
        return section

    @property
    def params(self) -> dict[str, float | str | None]:
        """The parameters of the loss; None stands for the loss's default."""
        return dict(self.model_extra or {})

    @property
    def needs_reference(self) -> bool:
        return any(OBJECTIVES[name].needs_reference for name in registry.weights(self.loss))

    @property
    def trains_reward_model(self) -> bool:
        return registry.readout(self.loss) == "reward"

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, what is wrong and how to fix it) for settings that conflict or have no effect."""
        told = {name: value for name, value in self.params.items() if value is not None}
        yield from registry.unused(self.loss, told)
        yield from registry.out_of_bounds(self.loss, told)
        for what in registry.wpo_problems(self.loss) if self.wpo else ():
            yield "wpo", what
        for what in registry.kind_problems(self.loss, ld_alpha=self.ld_alpha):
            yield "loss", what
        for what in registry.reward_problems(
            self.loss, nll_weight=self.nll_weight, ld_alpha=self.ld_alpha, wpo=self.wpo
        ):
            yield "loss", what
        for what in registry.gap_problems(self.loss) if self.weighting == "gap" else ():
            yield "weighting", what
        if self.reference_moves and not self.needs_reference:
            moves, loss = list(self.reference_moves), ", ".join(registry.weights(self.loss))
            yield (
                "reference_moves",
                f"{moves} has no effect with objective.loss: {loss}, which uses no reference. Remove it.",
            )


def param_fields() -> dict[str, FieldInfo]:
    """The parameters of all losses, in the form of fields."""
    found = {}
    for name, of in PARAMS.items():
        first, param = next(iter(of.items()))
        number: Any = Annotated[float, Field(**param.bounds)]
        kind: Any = (Literal[param.words] | number if param.words else number) | None
        others = [one for one in OBJECTIVES if one not in of]
        takers = f" Not for {', '.join(others)}." if len(others) < len(of) else f" For {', '.join(of)}."
        takers = takers if others else ""
        plain = param.default if isinstance(param.default, str) else f"{param.default:g}"
        default = f"null: the loss's own default, which is {plain} for {first}."
        found[name] = FieldInfo.from_annotated_attribute(
            kind, Field(default=None, description=f"{param.meaning}{takers} {default}")
        )
    return found


def _wrong_params(told: Mapping[Any, Any]) -> Iterator[InitErrorDetails]:
    """Yield errors for parameters that no loss takes and values that no loss accepts.

    The chosen loss may accept fewer; `problems` checks that.
    """
    for name, value in told.items():
        if name not in PARAMS:
            yield {"type": "extra_forbidden", "loc": (str(name),), "input": value}
        elif value is not None and not any(param.accepts(value) for param in PARAMS[name].values()):
            wanted = next(iter(PARAMS[name].values())).wanted
            yield {
                "type": PydanticCustomError("param", "must be {wanted}", {"wanted": wanted}),
                "loc": (name,),
                "input": value,
            }


def _raisable(error: Any) -> InitErrorDetails:
    """A caught error's details, in the form in which it can be raised again together with others."""
    kind = PydanticCustomError(error["type"], "{text}", {"text": error["msg"]})
    return {"type": kind, "loc": error["loc"], "input": error["input"]}
