"""Losses that couple the pairs of a batch, and sums of several: by hand, by their equations, over many batches."""

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from isopref.batch.packing import Budget, plan_step
from isopref.batch.step import Step, build_step
from isopref.data.table import ExampleTable
from isopref.engine.first_pass import FirstPass, Gain, Score
from isopref.engine.train_module import DPOTrainModule
from isopref.errors import ConfigError
from isopref.objectives.coupled import Whole
from isopref.objectives.loss import Loss, pair_loss
from isopref.testing import matrix
from isopref.testing.cells import Cell, batch
from isopref.testing.equations import BATCH_CASES, batch_loss
from isopref.testing.exactness import build_module, full_gradient, measure
from isopref.testing.expected import expected
from isopref.types import PairLogps, moved

EVERY = pytest.mark.parametrize("case", BATCH_CASES)
COUPLED = ["bco_pair", "aot", "aot_unpaired"]


def logps(chosen: list[float], rejected: list[float]) -> PairLogps:
    ones = torch.ones(len(chosen), dtype=torch.long)
    return PairLogps(torch.tensor(chosen).double(), torch.tensor(rejected).double(), ones, ones)


def some_pairs(num_pairs: int = 12) -> tuple[PairLogps, PairLogps, Tensor]:
    """Policy, reference and weights."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, 31, (2, num_pairs), generator=generator)
    ref = -tokens * (0.5 + torch.rand(2, num_pairs, generator=generator, dtype=torch.float64))
    policy = ref + torch.randn(2, num_pairs, generator=generator, dtype=torch.float64)
    weights = 0.2 + torch.rand(num_pairs, generator=generator, dtype=torch.float64)
    gap = 0.2 + 3 * torch.rand(num_pairs, generator=generator, dtype=torch.float64)
    both = [PairLogps(side[0], side[1], tokens[0], tokens[1], gap=gap) for side in (policy, ref)]
    return both[0], both[1], weights


def total(loss: Loss, policy: PairLogps, ref: PairLogps, weights: Tensor) -> Tensor:
    share = weights / weights.sum()
    return (share * loss(policy, ref, whole=Whole.first(share))).sum()


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


def test_aot_by_hand() -> None:
    policy, ref = logps([-1.0, -2.0, -3.0], [-2.0, -5.0, -1.0]), logps([-4.0, -1.0, -2.0], [-1.0, -3.0, -2.0])
    # Margins 1, 3, -2 in order are -2, 1, 3; those of the reference, -3, 2, 0, are -3, 0, 2: apart by 1, 1, 1.
    loss = pair_loss("aot", beta=0.5)(policy, ref, whole=Whole.first(torch.full((3,), 1 / 3).double()))
    assert loss.tolist() == pytest.approx([softplus(-0.5)] * 3)
    # Gains of chosen 3, -1, -1 and of rejected -1, -2, 1: in order -1, -1, 3 and -2, -1, 1.
    loss = pair_loss("aot_unpaired", beta=1.0)(policy, ref, whole=Whole.first(torch.full((3,), 1 / 3).double()))
    assert loss.tolist() == pytest.approx([softplus(-2), softplus(-1), softplus(0)])


def test_a_heavy_pair_meets_several() -> None:
    policy, ref = logps([1.0, 0.0], [0.0, 0.0]), logps([0.0, 5.0], [0.0, 0.0])
    # Policy: 0 (mass 0.25), 1 (0.75). Reference: 0 (0.75), 5 (0.25). So 0 goes to 0, and 1 half to 0, a quarter to 5.
    loss = pair_loss("aot", beta=1.0)(policy, ref, whole=Whole.first(torch.tensor([0.75, 0.25]).double()))
    assert loss.tolist() == pytest.approx([(0.5 * softplus(-1) + 0.25 * softplus(4)) / 0.75, softplus(0)])


@EVERY
def test_value_and_gradient_are_the_equation_s(case: str) -> None:
    policy, ref, weights = some_pairs()
    loss, params = BATCH_CASES[case]
    leaves = policy.chosen.clone().requires_grad_(), policy.rejected.clone().requires_grad_()
    found = total(pair_loss(loss, **params), replace(policy, chosen=leaves[0], rejected=leaves[1]), ref, weights)
    assert float(found.detach()) == pytest.approx(float(batch_loss(case, policy, ref, weights.tolist())), rel=1e-12)
    step = 1e-6
    for side, gradient in zip(("chosen", "rejected"), torch.autograd.grad(found, leaves), strict=True):
        for p in range(len(weights)):
            values = []
            for sign in (1, -1):
                moved = getattr(policy, side).clone()
                moved[p] += sign * step
                with _shift_held(case, policy, ref, weights):
                    values.append(float(batch_loss(case, replace(policy, **{side: moved}), ref, weights.tolist())))
            assert float(gradient[p]) == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-5, abs=1e-8)


@contextmanager
def _shift_held(case: str, policy: PairLogps, ref: PairLogps, weights: Tensor) -> Iterator[None]:
    """bco's shift moves with the policy, but no gradient goes through it: hold it where it was."""
    gains = (policy.chosen - ref.chosen + policy.rejected - ref.rejected) / 2
    shift = float(BATCH_CASES[case][1]["beta"] * (weights * gains).sum() / weights.sum())
    with patch("isopref.testing.equations.mean_reward", lambda *_args: shift):
        yield


@EVERY
def test_order_does_not_matter_and_a_pair_of_weight_two_is_there_twice(case: str) -> None:
    policy, ref, weights = some_pairs(5)
    loss, params = BATCH_CASES[case]
    weights[3] = 2 * weights[4]
    value = total(pair_loss(loss, **params), policy, ref, weights)
    twice = torch.tensor([3, 1, 4, 3, 0, 2])
    weights = weights.clone()
    weights[3] /= 2
    policy, ref = (moved(side, lambda x: x[twice]) for side in (policy, ref))
    again = total(pair_loss(loss, **params), policy, ref, weights[twice])
    assert float(again) == pytest.approx(float(value), rel=1e-13)


@pytest.mark.parametrize("name", COUPLED)
def test_far_out_it_stays_finite(name: str) -> None:
    far = list(itertools.product([-1e4, -50.0, 0.0, 50.0, 1e4], repeat=2))
    policy, ref = logps([c for c, _ in far], [r for _, r in far]), logps([0.0] * len(far), [0.0] * len(far))
    leaves = [policy.chosen.requires_grad_(), policy.rejected.requires_grad_()]
    value = total(pair_loss(name, beta=1.0), policy, ref, torch.ones(len(far)).double())
    assert value.isfinite()
    assert all(one.isfinite().all() for one in torch.autograd.grad(value, leaves))


# --- through the train module ----------------------------------------------------------------------


def steps(cut: int, weighting: str = "example") -> list[Step]:
    """Eight pairs as batches of three, three and two, in microbatches of at most `cut` pairs."""
    table = ExampleTable.from_tokens(batch(8)[0])
    found = []
    for start in (0, 3, 6):
        index = np.arange(8)[start : start + 3]
        plan = plan_step(table.lengths.select(index), Budget("shared", 4096, cut), num_ranks=1)
        found.append(build_step(table, index, plan, "shared", weighting))  # type: ignore[arg-type]
    return found


def trained(case: str) -> DPOTrainModule:
    cell = Cell(objective=case, weighting="example")
    return build_module(cell, expected(cell)[3])[0]


def test_bco_s_shift_is_the_mean_over_all_pairs_so_far_whatever_the_cut() -> None:
    _, _, _, ref = expected(Cell(objective="bco_pair"))
    pasts, gradients = [], []
    for cut in (1, 3):
        module = trained("bco_pair")
        for step in steps(cut):
            module.zero_grads()
            module.train_batch({"step": step})
        assert module.first_pass is not None
        pasts.append(module.first_pass.past.tolist())
        gradients.append(full_gradient(module.model))
    policy = module.eval_batch({"step": steps(3)[0]})[0]  # lr is 0: the policy stays where it is
    assert pasts[0][1] == 8
    assert pasts[0] == pytest.approx(pasts[1], rel=1e-14)
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-10, atol=1e-14)
    gain = sum(float(getattr(policy, s)[p]) - getattr(ref, s)[p] for s in ("chosen", "rejected") for p in range(3)) / 2
    first = trained("bco_pair")
    first.train_batch({"step": steps(1)[0]})
    assert first.first_pass is not None
    assert first.first_pass.past.tolist() == pytest.approx([gain, 3.0], rel=1e-12)


def test_the_past_is_in_the_checkpoint_and_a_dry_run_is_not_in_the_past() -> None:
    first, *others = steps(2)
    module = trained("bco_pair")
    module.train_batch({"step": first})
    state = module.state_dict(optim=False)
    resumed = trained("bco_pair")
    resumed.load_state_dict(state)
    resumed.train_batch({"step": others[1]}, dry_run=True)
    module.zero_grads()
    fresh = trained("bco_pair")
    for one in (module, resumed, fresh):
        one.train_batch({"step": others[0]})
    straight, again, without = (full_gradient(one.model) for one in (module, resumed, fresh))
    assert all(torch.equal(straight[name], again[name]) for name in straight)
    assert not all(torch.equal(straight[name], without[name]) for name in straight)


@pytest.mark.parametrize("case", COUPLED)
def test_coupling_inside_a_microbatch_would_show(case: str) -> None:
    """What others do: each microbatch is sorted by itself."""
    prepare = FirstPass.prepare

    def local(self: FirstPass, step: Step, score: Score, gain: Gain) -> Step:
        alone = []
        for work in step.work:
            places = torch.arange(len(work.place))
            share = float(work.loss_share.sum())
            one = replace(work, place=places, loss_share=work.loss_share / share)
            cut = prepare(self, replace(step, work=(one,), num_comparisons=len(places)), score, gain).work[0]
            assert cut.linear is not None
            alone.append(replace(work, linear=replace(cut.linear, slope=cut.linear.slope * share)))
        return replace(step, work=tuple(alone))

    cell = Cell(objective=case)
    assert measure(cell).gradient_error <= matrix.bound(cell)
    with patch.object(FirstPass, "prepare", local):
        assert measure(cell).gradient_error > 1e-3
        assert measure(replace(cell, cut="whole")).gradient_error <= matrix.bound(cell)


# --- several at once -------------------------------------------------------------------------------


def test_a_sum_of_two_by_hand() -> None:
    policy, ref = logps([-5.0], [-7.0]), logps([-6.0], [-7.0])
    loss = pair_loss({"sigmoid": 2.0, "hinge": 0.5}, beta=0.4, label_smoothing=0.25)
    smoothed = 0.75 * softplus(-0.4) + 0.25 * softplus(0.4)
    assert loss(policy, ref).tolist() == pytest.approx([2 * smoothed + 0.5 * 0.6])
    assert loss.needs_reference
    assert not loss.coupled


def test_each_of_several_has_its_own_defaults_and_the_first_gives_the_rewards() -> None:
    loss = pair_loss({"simpo": 1.0, "sppo_hard": 0.1}, gamma=0.3)
    assert [term.params for term in loss.summands] == [{"beta": 2.0, "gamma": 0.3}, {"beta": 0.001}]
    assert loss.needs_reference
    policy, ref = logps([-5.0], [-7.0]), logps([-6.0], [-7.0])
    assert [gain.item() for gain in loss.gains(policy, ref)] == [-5.0, -7.0]
    assert [reward.item() for reward in loss.rewards(policy, ref)] == [-10.0, -14.0]


def test_what_none_of_several_takes_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"with the loss hinge, ipo, which takes beta\. Remove gamma"):
        pair_loss({"hinge": 1.0, "ipo": 1.0}, gamma=1.0)
    for none in ({}, {"sigmoid": 0.0}, {"sigmoid": 1.0, "hinge": -1.0}):
        with pytest.raises(ConfigError, match="at least one loss, each with a weight above 0"):
            pair_loss(none)
    with pytest.raises(ConfigError, match="unknown loss 'hing'"):
        pair_loss({"sigmoid": 1.0, "hing": 1.0})
