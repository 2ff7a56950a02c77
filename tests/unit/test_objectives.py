"""Every objective against its equation written a second time, far out, and as the registry has it. P: pairs."""

import inspect
import itertools
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from isopref.config.objective import ObjectiveConfig
from isopref.errors import ConfigError
from isopref.losses import FORMULAS, PairLoss, pair_loss
from isopref.objectives import LIMITS, OBJECTIVES, Name, problems, resolve
from isopref.testing.equations import BATCH_CASES, CASES, COUPLED_EQUATIONS, by_equation
from isopref.types import PairLogps, moved

EVERY = pytest.mark.parametrize(("name", "params"), CASES.values(), ids=list(CASES))


def some_pairs(num_pairs: int = 40) -> tuple[PairLogps, PairLogps]:
    """Policy and reference, a few nats apart, with answers of 1 to 30 tokens."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, 31, (2, num_pairs), generator=generator)
    base = -tokens * (0.1 + 2 * torch.rand(2, num_pairs, generator=generator, dtype=torch.float64))
    gap = 2 * torch.randn(2, num_pairs, generator=generator, dtype=torch.float64)
    gap = torch.minimum(gap, -0.9 * base)  # log-probabilities stay below zero
    chosen, rejected = base + gap
    return PairLogps(chosen, rejected, tokens[0], tokens[1]), PairLogps(base[0], base[1], tokens[0], tokens[1])


def gradients(loss: PairLoss, policy: PairLogps, ref: PairLogps) -> tuple[Tensor, Tensor, Tensor]:
    """The losses, and the gradient of each with respect to its own two log-probabilities."""
    leaves = policy.chosen.clone().requires_grad_(), policy.rejected.clone().requires_grad_()
    loss_P = loss(PairLogps(leaves[0], leaves[1], policy.num_chosen, policy.num_rejected), ref)
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
    for beta in (params["beta"], 1.0):
        loss = pair_loss(name, **{**params, "beta": beta})
        policy = PairLogps(far[:, 0], far[:, 1], tokens, tokens)
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
    assert torch.equal(loss(policy, ref), loss(policy, other)) != OBJECTIVES[name].needs_reference  # type: ignore[index]
    assert torch.equal(loss.gains(policy, ref)[0], loss.gains(policy, other)[0]) != loss.needs_reference


def test_wpo_s_weight_multiplies_the_loss_of_a_pair() -> None:
    policy, ref = some_pairs(3)
    weight = torch.tensor([0.5, 2.0, 0.0])
    loss = pair_loss("sigmoid", wpo=True)
    assert torch.equal(loss(replace(policy, weight=weight), ref), weight * loss(policy, ref))


def test_wpo_s_weights_are_refused_where_a_pair_has_no_loss_of_its_own() -> None:
    with pytest.raises(ConfigError, match=r"^pair_loss: wpo: weighs the loss of each pair, but aot, bco_pair looks at"):
        pair_loss({"sigmoid": 1.0, "aot": 1.0, "bco_pair": 1.0}, wpo=True)


def test_rewards_by_hand() -> None:
    two, four = torch.tensor([2]), torch.tensor([4])
    policy = PairLogps(torch.tensor([-10.0]), torch.tensor([-12.0]), two, four)
    ref = PairLogps(torch.tensor([-11.0]), torch.tensor([-10.0]), two, four)
    found = {
        name: [x.item() for x in pair_loss(name).gains(policy, ref)] for name in ("sigmoid", "ipo", "simpo", "cpo")
    }
    assert found == {"sigmoid": [1, -2], "ipo": [0.5, -0.5], "simpo": [-5, -3], "cpo": [-10, -12]}


# --- the registry ----------------------------------------------------------------------------------


def test_every_objective_has_a_formula_and_a_case() -> None:
    assert list(OBJECTIVES) == list(get_args(Name)) == list(FORMULAS)
    assert {name for name, _ in CASES.values()} | set(COUPLED_EQUATIONS) == set(OBJECTIVES)
    assert {name for name, about in OBJECTIVES.items() if about.coupled} == set(COUPLED_EQUATIONS) < set(BATCH_CASES)
    for name, objective in OBJECTIVES.items():
        parameters = inspect.signature(FORMULAS[name]).parameters.values()
        keywords = {one.name for one in parameters if one.kind is one.KEYWORD_ONLY} - {"whole"}
        assert keywords == set(objective.params), name
        assert [term.params for term in pair_loss(name).terms] == [objective.params]


def test_what_is_given_goes_before_the_default() -> None:
    assert resolve("simpo", beta=None, gamma=0.0) == {"simpo": {"beta": 2.0, "gamma": 0.0}}


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("sigmoide", {}, "pair_loss: unknown loss 'sigmoide'. Known: sigmoid, dpo_norm, "),
        ("hinge", {"label_smoothing": 0.0}, "pair_loss: label_smoothing: 0.0 does nothing with the loss hinge"),
        ("hinge", {"gamma": 1.0}, "which takes beta. Remove gamma, or use a loss that has it: simpo."),
        ("simpo", {"divergence": "forward_kl"}, "or use a loss that has it: sigmoid."),
        ("simpo", {"zeta": 1}, "which takes beta, gamma. Remove zeta."),
        ("exo_pair", {"label_smoothing": 0.0}, "Use a small number such as 0.001."),
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


@pytest.mark.parametrize("param", LIMITS)
def test_the_config_has_the_same_bounds(param: str) -> None:
    limits = LIMITS[param]
    for beyond in [limits[low] - 0.1 for low in ("gt", "ge") if low in limits] + [
        limits[high] + 0.1 for high in ("lt", "le") if high in limits
    ]:
        with pytest.raises(ValueError, match=param):
            ObjectiveConfig.model_validate({param: beyond})


def test_an_integer_is_a_number() -> None:
    policy, ref = some_pairs()
    whole = pair_loss("sigmoid", beta=1, nll_weight=1, ld_alpha=1)
    assert torch.equal(whole(policy, ref), pair_loss("sigmoid", beta=1.0)(policy, ref))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_its_own_defaults_are_no_problem(name: Name) -> None:
    assert not list(problems(name, OBJECTIVES[name].params))
