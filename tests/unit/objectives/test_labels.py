"""Losses of labelled answers: by hand, by their equations, far out, over many batches, and what cannot go with them."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from isopref.batch.packing import Budget
from isopref.data.table import ExampleTable
from isopref.engine.loader import ExampleLoader
from isopref.engine.refusals import check_table
from isopref.errors import ConfigError, DataError
from isopref.examples import Example
from isopref.objectives.labels import midpoint
from isopref.objectives.loss import pair_loss
from isopref.testing import matrix
from isopref.testing.answer import Answer
from isopref.testing.cells import KINDS, Cell, batch, tree_batch
from isopref.testing.equations import LABEL_CASES
from isopref.testing.exactness import build_module, full_gradient, measure
from isopref.testing.expected import expected
from isopref.testing.labels import LABEL_EQUATIONS
from isopref.testing.models import labelled_trees
from isopref.types import Anchors, LabelLogps
from support import mutations


def number(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


def labelled(gains: list[float], good: list[bool]) -> tuple[LabelLogps, LabelLogps]:
    """Policy and reference of answers that gained so many nats."""
    known = torch.full((len(gains),), 5), torch.tensor(good)
    ref = torch.linspace(-40, -20, len(gains), dtype=torch.float64)
    return LabelLogps((ref + torch.tensor(gains).double()).requires_grad_(), *known), LabelLogps(ref, *known)


@pytest.mark.parametrize("rows", KINDS)
@pytest.mark.parametrize("objective", ["kto", "bco"])
def test_context_inside_labelled_answers(objective: str, rows: Any) -> None:
    """Of answers and of mismatched ones, in every kind of row, against the oracle."""
    cell = Cell(objective=objective, rows=rows, trees=True, context="weights", weighting="completion", nll_weight=0.7)
    found = measure(cell)
    assert found.gradient_error <= matrix.bound(cell)
    assert found.loss_error <= matrix.value_bound(cell)
    assert found.metric_error <= matrix.value_bound(cell)


@pytest.mark.parametrize(
    "name", ["trained_tool_results", "weights_of_other_turns", "weights_of_the_token_before", "leaking_attention"]
)
def test_planted_bugs_in_context_show(name: str) -> None:
    cell = Cell(objective="kto", trees=True, context="weights")
    assert mutations.mutated(name, measure, cell).gradient_error > 1e-3


def test_kto_by_hand() -> None:
    policy, ref = labelled([3.0, 3.0, 1.0], [True, False, True])
    loss = pair_loss("kto", beta=math.log(3) / 2, desirable_weight=2.0, undesirable_weight=0.5)
    # Over the KL term of 1: rewards log 3, log 3 and 0, whose logistic function is 3/4, 3/4 and 1/2.
    found = loss(policy, ref, anchors=Anchors(kl=number(1.0)))
    assert found.tolist() == pytest.approx([2 * 1 / 4, 0.5 * 3 / 4, 2 * 1 / 2])


def test_bco_by_hand() -> None:
    policy, ref = labelled([3.0, 3.0, 1.0], [True, False, True])
    found = pair_loss("bco", beta=math.log(3) / 2)(policy, ref, anchors=Anchors(midpoint=number(1.0)))
    assert found.tolist() == pytest.approx([-math.log(3 / 4), -math.log(1 / 4), -math.log(1 / 2)])


def test_the_midpoint_is_between_the_mean_of_good_and_the_mean_of_bad_answers() -> None:
    assert float(midpoint(torch.tensor([[12.0, 4.0], [-1.0, 1.0]]))) == (3 - 1) / 2
    assert float(midpoint(torch.tensor([[12.0, 4.0], [0.0, 0.0]]))) == 3
    assert float(midpoint(torch.tensor([[0.0, 0.0], [-6.0, 2.0]]))) == -3


@pytest.mark.parametrize("name", LABEL_EQUATIONS)
def test_values_and_gradients_are_those_of_the_second_writing(name: str) -> None:
    _, params = LABEL_CASES[name]
    policy, ref = labelled([2.0, -1.0, 0.3, -4.0, 7.0], [True, True, False, False, False])
    found = pair_loss(name, **params)(policy, ref, anchors=Anchors(kl=number(0.7), midpoint=number(0.7)))
    every = [
        LABEL_EQUATIONS[name](Answer(policy.logp[a], ref.logp[a], 5), bool(policy.good[a]), 0.7, params)
        for a in range(5)
    ]
    torch.testing.assert_close(found, torch.stack(every), rtol=1e-12, atol=1e-13)
    (mine,), (theirs,) = (torch.autograd.grad(x, policy.logp) for x in (found.sum(), torch.stack(every).sum()))
    torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("name", LABEL_EQUATIONS)
def test_far_out_all_is_finite(name: str) -> None:
    policy, ref = labelled([1e4, -1e4, 1e4, -1e4, 0.0], [True, True, False, False, True])
    loss = pair_loss(name, beta=1.0)(policy, ref, anchors=Anchors(kl=number(1e4), midpoint=number(-1e4)))
    (gradient,) = torch.autograd.grad(loss.sum(), policy.logp)
    assert loss.isfinite().all()
    assert gradient.isfinite().all()


@pytest.mark.parametrize(
    ("loss", "more", "message"),
    [
        (
            {"sigmoid": 1.0, "kto": 0.5},
            {},
            "sigmoid is a loss of pairs, kto is a loss of labelled answers. Only losses",
        ),
        ({"softmax": 1.0, "bco": 0.5}, {}, "softmax is a loss of lists, bco is a loss of labelled answers"),
        ("kto", {"ld_alpha": 0.5}, "ld_alpha is 0.5, which discounts"),
        ("bco", {"wpo": True}, "wpo: weights the loss of each pair, but with bco a single pair has no loss of its own"),
        ("bco", {"desirable_weight": 2.0}, "does nothing with the loss bco, which takes beta"),
        ("kto", {"undesirable_weight": 0.0}, "undesirable_weight must be a number, above 0"),
    ],
)
def test_what_cannot_go_together(loss: object, more: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pair_loss(loss, **more)  # type: ignore[arg-type]


# --- through loader and train module ---------------------------------------------------------------


def loader(examples: list[Example], loss: str, size: int = 4) -> ExampleLoader:
    table = ExampleTable.from_tokens(examples)
    budget = Budget("shared", 300)
    return ExampleLoader(
        table, batch_size=size, budget=budget, work_dir=".", objective=pair_loss(loss), weighting="example"
    )


def module(loss: str, *, trees: bool = True) -> Any:
    cell = Cell(objective=loss, trees=trees, weighting="example")
    return build_module(cell, expected(cell)[3])


def test_bco_on_pairs_is_half_of_bco_pair() -> None:
    """The same shift, and two terms of one half where bco_pair has one."""
    pairs = [pair.example for pair in batch(8)[0]]
    gradients = []
    for loss, other in (("bco", "bco_pair"), ("bco_pair", "bco_pair")):
        found, _ = module(loss, trees=False)
        found.reference = module(other, trees=False)[0].reference
        for index in (np.arange(5), np.arange(5, 8)):  # the second has a past
            found.zero_grads()
            found.train_batch({"step": loader(pairs, loss).step(index)})
        gradients.append(full_gradient(found.model))
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(2 * gradient, gradients[1][name], rtol=1e-9, atol=1e-14)


def test_the_past_of_bco_is_in_the_checkpoint() -> None:
    examples = labelled_trees(tree_batch()[0])
    first, second = (loader(examples, "bco").step(index) for index in (np.arange(4), np.arange(4, 7)))
    straight, _ = module("bco")
    straight.train_batch({"step": first})
    resumed, _ = module("bco")
    resumed.load_state_dict(straight.state_dict(optim=False))
    straight.zero_grads()
    fresh, _ = module("bco")
    for one in (straight, resumed, fresh):
        one.train_batch({"step": second})
    gradient, again, without = (full_gradient(one.model) for one in (straight, resumed, fresh))
    assert all(torch.equal(gradient[name], again[name]) for name in gradient)
    assert not all(torch.equal(gradient[name], without[name]) for name in gradient)


@pytest.mark.parametrize("label", [0.0, 1.0])
@pytest.mark.parametrize("loss", ["kto", "bco"])
def test_a_batch_of_one_label_has_finite_metrics_and_leaves_out_the_other(loss: str, label: float) -> None:
    examples = [one._replace(scores=(label,) * len(one.answers)) for one in labelled_trees(tree_batch()[0])]
    found, trainer = module(loss)
    found.train_batch({"step": loader(examples, loss).step(np.arange(4))})
    there, missing = ("chosen", "rejected") if label else ("rejected", "chosen")
    assert all(math.isfinite(value) for value in trainer.metrics.values())
    assert {f"train/rewards_{there}", f"train/logps_{there}", "train/loss", "train/accuracy"} <= trainer.metrics.keys()
    assert not {f"train/rewards_{missing}", f"train/logps_{missing}", "train/margin"} & trainer.metrics.keys()
    assert ("train/kl" in trainer.metrics) is (loss == "kto")


def test_a_reference_without_mismatched_pairs_is_refused() -> None:
    cell = Cell(objective="bco", trees=True)
    reference = type(expected(cell)[3])(expected(cell)[3].answers)
    with pytest.raises(ConfigError, match=r"score_table\(\.\.\., mismatched=True\)"):
        build_module(Cell(objective="kto", trees=True), reference)


# --- data of another kind --------------------------------------------------------------------------


def test_data_of_another_kind_is_refused() -> None:
    trees, labels = tree_batch()[0], labelled_trees(tree_batch()[0])
    pairs = ExampleTable.from_tokens([pair.example for pair in batch(3)[0]])
    for loss in ("kto", "bco", "sigmoid", "plackett_luce"):
        check_table(pairs, pair_loss(loss))
    check_table(ExampleTable.from_tokens(labels), pair_loss("kto"))
    with pytest.raises(DataError, match=r"example 0: kto needs a label .* has a score of -0\.5.* use a loss of lists"):
        check_table(
            ExampleTable.from_tokens([one._replace(scores=(-0.5, *one.scores[1:])) for one in trees]), pair_loss("kto")
        )
    with pytest.raises(DataError, match=r"example 0: kto needs a label .* an answer has none"):
        check_table(ExampleTable.from_tokens([one._replace(scores=()) for one in trees]), pair_loss("kto"))
    for loss in ("sigmoid", "plackett_luce"):
        with pytest.raises(
            DataError, match=rf"nothing to compare, but {loss} .* \(7 of 7 .* objective.loss: kto or bco"
        ):
            check_table(ExampleTable.from_tokens(labels), pair_loss(loss))
