"""Every objective against its equation written a second time, far out, and as the registry has it. P: pairs."""

import inspect
import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from isopref.config.load import load_config
from isopref.config.schema import run_id
from isopref.errors import ConfigError
from isopref.objectives.declare import Param
from isopref.objectives.loss import Loss, pair_loss
from isopref.objectives.registry import MODIFIERS, OBJECTIVES, PARAMS, out_of_bounds, resolve, unused
from isopref.testing.equations import (
    ALL_CASES,
    BATCH_CASES,
    CASES,
    COUPLED_EQUATIONS,
    LABEL_CASES,
    answers,
    by_equation,
    reward,
)
from isopref.testing.labels import LABEL_EQUATIONS
from isopref.testing.list_equations import LIST_CASES, LIST_EQUATIONS
from isopref.types import PairLogps, moved

MINIMAL = {"model": {"path": "m"}, "data": {"train": "d"}}
EVERY = pytest.mark.parametrize(("name", "params"), CASES.values(), ids=list(CASES))


def some_pairs(num_pairs: int = 40) -> tuple[PairLogps, PairLogps]:
    """Policy and reference, a few nats apart, with answers of 1 to 30 tokens."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, 31, (2, num_pairs), generator=generator)
    base = -tokens * (0.1 + 2 * torch.rand(2, num_pairs, generator=generator, dtype=torch.float64))
    gap = 2 * torch.randn(2, num_pairs, generator=generator, dtype=torch.float64)
    gap = torch.minimum(gap, -0.9 * base)  # log-probabilities stay below zero
    chosen, rejected = base + gap
    scores = 0.2 + 3 * torch.rand(num_pairs, generator=generator, dtype=torch.float64)
    policy = PairLogps(chosen, rejected, tokens[0], tokens[1], gap=scores)
    return policy, PairLogps(base[0], base[1], tokens[0], tokens[1], gap=scores)


def gradients(loss: Loss, policy: PairLogps, ref: PairLogps) -> tuple[Tensor, Tensor, Tensor]:
    """The losses, and the gradient of each with respect to its own two log-probabilities."""
    leaves = policy.chosen.clone().requires_grad_(), policy.rejected.clone().requires_grad_()
    loss_P = loss(replace(policy, chosen=leaves[0], rejected=leaves[1]), ref)
    found = torch.autograd.grad(loss_P.sum(), leaves, allow_unused=True, materialize_grads=True)
    return loss_P.detach(), found[0], found[1]


@EVERY
def test_value_is_the_equation_s(name: str, params: dict[str, Any]) -> None:
    policy, ref = some_pairs()
    expected = by_equation(name, params)(policy, ref)
    assert expected.std() > 1e-3
    torch.testing.assert_close(pair_loss(name, **params)(policy, ref), expected, rtol=1e-11, atol=1e-11)


@EVERY
def test_gradient_is_the_equation_s_finite_difference(name: str, params: dict[str, Any]) -> None:
    policy, ref = some_pairs()
    equation, step = by_equation(name, params), 1e-5
    _, *found = gradients(pair_loss(name, **params), policy, ref)
    for side, gradient in zip(("chosen", "rejected"), found, strict=True):
        shifted = []
        for sign in (1, -1):
            moved = {**vars(policy), side: getattr(policy, side) + sign * step}
            shifted.append(equation(PairLogps(**moved), ref))
        expected = (shifted[0] - shifted[1]) / (2 * step)
        torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-6)


@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_far_out_it_stays_finite(name: str, params: dict[str, Any], dtype: torch.dtype) -> None:
    far = torch.tensor(list(itertools.product([-1e4, -50.0, 0.0, 50.0, 1e4], repeat=2)), dtype=dtype)
    tokens = torch.ones(len(far), dtype=torch.long)
    for more in ({}, {"beta": 1.0} if "beta" in params else {}):
        loss = pair_loss(name, **{**params, **more})
        policy = PairLogps(far[:, 0], far[:, 1], tokens, tokens, gap=torch.logspace(-4, 4, len(far), dtype=dtype))
        ref = PairLogps(torch.zeros_like(far[:, 0]), torch.zeros_like(far[:, 1]), tokens, tokens)
        for values in gradients(loss, policy, ref):
            assert values.isfinite().all()


@pytest.mark.parametrize("divergence", ["forward_kl", 0.5])
def test_a_divergence_far_out_still_pulls(divergence: str | float) -> None:
    one = torch.ones(1, dtype=torch.long)
    policy, ref = (PairLogps(torch.tensor([x]), torch.zeros(1), one, one) for x in (-1e4, 0.0))
    _, chosen, _ = gradients(pair_loss("sigmoid", divergence=divergence), policy, ref)
    assert chosen.item() < -1  # up with the chosen answer


@EVERY
def test_a_pair_knows_nothing_of_the_others(name: str, params: dict[str, Any]) -> None:
    policy, ref = some_pairs(5)
    loss = pair_loss(name, **params)
    alone = [loss(*(moved(side, lambda x, p=p: x[p : p + 1]) for side in (policy, ref))) for p in range(5)]  # type: ignore[misc]
    torch.testing.assert_close(loss(policy, ref), torch.cat(alone), rtol=1e-14, atol=0)
    none = [moved(side, lambda x: x[:0]) for side in (policy, ref)]
    assert loss(*none).shape == (0,)


@EVERY
def test_without_a_reference_none_is_looked_at(name: str, params: dict[str, Any]) -> None:
    policy, ref = some_pairs()
    other = PairLogps(ref.chosen - 1, ref.rejected - 2, ref.num_chosen, ref.num_rejected)
    loss = pair_loss(name, **params)
    assert torch.equal(loss(policy, ref), loss(policy, other)) != OBJECTIVES[name].needs_reference
    assert torch.equal(loss.gains(policy, ref)[0], loss.gains(policy, other)[0]) != loss.needs_reference


def test_wpo_s_weight_multiplies_the_loss_of_a_pair() -> None:
    policy, ref = some_pairs(3)
    weight = torch.tensor([0.5, 2.0, 0.0])
    loss = pair_loss("sigmoid", wpo=True)
    assert torch.equal(loss(replace(policy, weight=weight), ref), weight * loss(policy, ref))


def test_wpo_s_weights_are_refused_where_a_pair_has_no_loss_of_its_own() -> None:
    with pytest.raises(ConfigError, match=r"^pair_loss: wpo: weights the loss of each pair, but with aot, bco_pair a"):
        pair_loss({"sigmoid": 1.0, "aot": 1.0, "bco_pair": 1.0}, wpo=True)


def test_rewards_by_hand() -> None:
    two, four = torch.tensor([2]), torch.tensor([4])
    policy = PairLogps(torch.tensor([-10.0]), torch.tensor([-12.0]), two, four)
    ref = PairLogps(torch.tensor([-11.0]), torch.tensor([-10.0]), two, four)
    found = {
        name: [x.item() for x in pair_loss(name).gains(policy, ref)] for name in ("sigmoid", "ipo", "simpo", "cpo")
    }
    assert found == {"sigmoid": [1, -2], "ipo": [0.5, -0.5], "simpo": [-5, -3], "cpo": [-10, -12]}


@pytest.mark.parametrize(
    ("divergence", "of_twice", "of_half"),
    [
        ("reverse_kl", math.log(2), -math.log(2)),
        ("forward_kl", 1 - 1 / 2, 1 - 2),
        ("jensen_shannon", math.log(4 / 3), math.log(2 / 3)),
        (0.5, (1 - 2**-0.5) / 0.5, (1 - 2**0.5) / 0.5),
    ],
)
def test_rewards_of_a_divergence_by_hand(divergence: str | float, of_twice: float, of_half: float) -> None:
    """Answers twice and half as likely as under the reference, and one as likely: beta f'(2), beta f'(1/2), 0."""
    one = torch.ones(2, dtype=torch.long)
    up = torch.tensor([math.log(2), 0.0], dtype=torch.float64)
    policy, ref = (PairLogps(-9 + sign * up, -7 - sign * up, one, one) for sign in (1, 0))
    loss = pair_loss("sigmoid", beta=0.3, divergence=divergence)
    chosen, rejected = loss.rewards(policy, ref)
    assert chosen.tolist() == pytest.approx([0.3 * of_twice, 0.0], abs=1e-15)
    assert rejected.tolist() == pytest.approx([0.3 * of_half, 0.0], abs=1e-15)
    gain_chosen, gain_rejected = loss.gains(policy, ref)
    assert (gain_chosen - gain_rejected).tolist() == pytest.approx([of_twice - of_half, 0.0])


@pytest.mark.parametrize("case", ALL_CASES)
def test_rewards_are_those_of_the_second_writing(case: str) -> None:
    policy, ref = some_pairs()
    loss, params = ALL_CASES[case]
    first = loss if isinstance(loss, str) else next(iter(loss))
    for side, found in enumerate(pair_loss(loss, **params).rewards(policy, ref)):
        expected = torch.stack([reward(first, pair[side], params) for pair in answers(policy, ref)])
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


# --- the registry ----------------------------------------------------------------------------------


def test_every_objective_has_a_formula_and_a_case() -> None:
    paired = {name for name, _ in CASES.values()} | set(COUPLED_EQUATIONS)
    assert paired | set(LIST_EQUATIONS) | set(LABEL_EQUATIONS) == set(OBJECTIVES)
    assert {name for name, about in OBJECTIVES.items() if about.kind == "labels"} == set(LABEL_EQUATIONS)
    assert set(LABEL_EQUATIONS) < set(LABEL_CASES)
    assert (
        {name for name, about in OBJECTIVES.items() if about.kind == "lists"} == set(LIST_EQUATIONS) == set(LIST_CASES)
    )
    assert {name for name, about in OBJECTIVES.items() if about.coupled} == set(COUPLED_EQUATIONS) < set(BATCH_CASES)
    for name, objective in OBJECTIVES.items():
        parameters = inspect.signature(objective.formula).parameters.values()
        keywords = {one.name for one in parameters if one.kind is one.KEYWORD_ONLY}
        of_batch = ["whole"] * objective.coupled + ["anchor"] * (objective.anchor is not None)
        assert keywords == {*objective.params, *of_batch}, name
        assert [term.params for term in pair_loss(name).summands] == [objective.defaults]


def test_what_is_given_goes_before_the_default() -> None:
    assert resolve("simpo", beta=None, gamma=0.0) == {"simpo": {"beta": 2.0, "gamma": 0.0}}


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("sigmoide", {}, "pair_loss: unknown loss 'sigmoide'. Known: sigmoid, odpo, dpo_norm, "),
        ("hinge", {"label_smoothing": 0.0}, "pair_loss: label_smoothing: 0.0 does nothing with the loss hinge"),
        ("hinge", {"gamma": 1.0}, "which takes beta. Remove gamma, or use a loss that has it: simpo."),
        ("simpo", {"divergence": "forward_kl"}, "or use a loss that has it: sigmoid."),
        ("simpo", {"zeta": 1}, "which takes beta, gamma. Remove zeta."),
        ("exo_pair", {"label_smoothing": 0.0}, "label_smoothing must be a number, above 0, below 0.5; found 0.0."),
    ],
)
def test_what_an_objective_cannot_use_is_refused(name: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        pair_loss(name, **params)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("loss", "params", "message"),
    [
        ("sigmoid", {"beta": -1}, "beta must be a number, above 0; found -1."),
        ("sigmoid", {"beta": 0}, "beta must be a number, above 0; found 0."),
        ("sigmoid", {"beta": float("inf")}, "beta must be a number, above 0; found inf."),
        ("sigmoid", {"beta": float("nan")}, "beta must be a number, above 0; found nan."),
        ("sigmoid", {"beta": "0.1"}, "beta must be a number, above 0; found '0.1'."),
        ("sigmoid", {"beta": True}, "beta must be a number, above 0; found True."),
        ("robust", {"label_smoothing": 0.5}, "label_smoothing must be a number, at least 0, below 0.5; found 0.5."),
        ("sigmoid", {"label_smoothing": -0.1}, "label_smoothing must be a number, at least 0, below 0.5; found -0.1."),
        ("simpo", {"gamma": -1.0}, "gamma must be a number, at least 0; found -1.0."),
        (
            "sigmoid",
            {"divergence": "js"},
            "divergence must be one of reverse_kl, forward_kl, jensen_shannon, or a number, above 0, below 1; "
            "found 'js'.",
        ),
        ("sigmoid", {"divergence": 1.0}, "or a number, above 0, below 1; found 1.0."),
        ("sigmoid", {"ld_alpha": 3}, "ld_alpha must be a number, at least 0, at most 1; found 3."),
        ("sigmoid", {"nll_weight": -1}, "nll_weight must be a number, at least 0; found -1."),
        ("sigmoid", {"nll_weight": None}, "nll_weight must be a number, at least 0; found None."),
        ("sigmoid", {"balance_weight": -0.1}, "balance_weight must be a number, at least 0; found -0.1."),
        ("sigmoid", {"wpo": "no"}, "wpo must be True or False; found 'no'."),
        ({"sigmoid": float("inf")}, {}, "each with a weight above 0."),
        ({"sigmoid": "1"}, {}, "each with a weight above 0."),
        (3, {}, "unknown loss 3. Known: sigmoid, "),
    ],
)
def test_an_argument_out_of_its_bounds_is_refused(loss: Any, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        pair_loss(loss, **params)
    assert str(caught.value).startswith("pair_loss: ")
    assert message in str(caught.value)
    assert "objective." not in str(caught.value)


BOUNDED = [("sigmoid", name, of) for name, of in MODIFIERS.items()]
BOUNDED += [(loss, name, of) for loss, one in OBJECTIVES.items() for name, of in one.params.items()]


@pytest.mark.parametrize(("loss", "name", "param"), BOUNDED, ids=[f"{loss}-{name}" for loss, name, _ in BOUNDED])
def test_the_config_has_the_same_bounds(loss: str, name: str, param: Param) -> None:
    steps = {"ge": -0.1, "gt": 0.0, "le": 0.1, "lt": 0.0}
    refused = [limit + steps[bound] for bound, limit in param.bounds.items()]
    assert refused
    for value in [*refused, "a word", True]:
        with pytest.raises(ConfigError, match=f"objective.{name}: must be"):
            load_config({**MINIMAL, "objective": {"loss": loss, name: value}})
    kept = load_config({**MINIMAL, "objective": {"loss": loss, name: param.default}}).objective
    assert kept.model_dump()[name] == param.default


def test_an_integer_is_a_number() -> None:
    policy, ref = some_pairs()
    whole = pair_loss("sigmoid", beta=1, nll_weight=1, ld_alpha=1)
    assert torch.equal(whole(policy, ref), pair_loss("sigmoid", beta=1.0)(policy, ref))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_its_own_defaults_are_no_problem(name: str) -> None:
    assert not list(unused(name, OBJECTIVES[name].defaults))
    assert not list(out_of_bounds(name, OBJECTIVES[name].defaults))


def test_a_parameter_means_the_same_in_all_that_take_it() -> None:
    for name, of in PARAMS.items():
        assert len({param.meaning for param in of.values()}) == 1, name


# --- in the config ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_section_holds_the_parameters_of_its_loss(name: str) -> None:
    section = load_config({**MINIMAL, "objective": {"loss": name}}).objective
    assert section.params == dict.fromkeys(OBJECTIVES[name].params)


def test_a_sum_takes_what_one_of_its_losses_takes() -> None:
    objective = {"loss": {"hinge": 1, "simpo": 0.5}, "gamma": 1, "label_smoothing": None}
    section = load_config({**MINIMAL, "objective": objective}).objective
    assert section.params == {"beta": None, "gamma": 1.0}
    assert isinstance(section.params["gamma"], float)


def test_wrong_parameters_and_wrong_fields_are_reported_at_once() -> None:
    objective = {"loss": "dpo", "beta": 0, "zeta": 1, "nll_weight": -1, 3: 4}
    with pytest.raises(ConfigError) as caught:
        load_config({**MINIMAL, "objective": objective})
    for name in ("loss: must be", "beta: must be", "zeta: no such", "nll_weight: must be", "3: no such"):
        assert f"objective.{name}" in str(caught.value)
    assert str(caught.value).startswith("config: 5 problems:")


@pytest.mark.parametrize("name", PARAMS)
def test_the_run_id_follows_every_parameter(name: str) -> None:
    loss, param = next(iter(PARAMS[name].items()))
    told: list[dict[str, Any]] = [{}, {name: None}, {name: param.default}]
    plain, null, written = (run_id(load_config({**MINIMAL, "objective": {"loss": loss, **one}})) for one in told)
    assert plain == null
    assert plain != written


def test_a_parameter_of_another_loss_may_be_null() -> None:
    """As in the file that `isopref init` writes, once another loss is chosen there."""
    config = load_config({**MINIMAL, "objective": {"loss": "hinge", **dict.fromkeys(PARAMS)}})
    assert config == load_config({**MINIMAL, "objective": {"loss": "hinge"}})
