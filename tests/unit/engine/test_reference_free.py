"""A train module in a user's own script, with an objective that has no reference."""

import pytest
import torch

from isopref.engine.train_module import DPOTrainModule
from isopref.errors import ConfigError
from isopref.models.policy import Policy
from isopref.objectives.loss import Loss, pair_loss
from isopref.testing import oracle
from isopref.testing.cells import batch
from isopref.testing.equations import CASES, by_equation
from isopref.testing.exactness import StubTrainer, full_gradient, padded_batch
from isopref.testing.models import tiny_model
from isopref.types import PairLogps


def module(objective: Loss) -> DPOTrainModule:
    policy = Policy(tiny_model("gpt2", dtype=torch.float64))
    return DPOTrainModule(
        policy, torch.optim.SGD(policy.parameters()), objective=objective, rank_microbatch_size=150, weighting="example"
    )


@pytest.mark.parametrize("case", ["simpo", "orpo", "cpo"])
def test_no_reference_is_asked_for_or_checked(case: str) -> None:
    name, params = CASES[case]
    trained = module(pair_loss(name, **params))
    trainer = StubTrainer(global_step=1)  # the step at which policy and reference would be compared
    trained._attach_trainer(trainer)  # type: ignore[arg-type]
    trained.train_batch(padded_batch(list(range(8)), 8))
    model, pairs = tiny_model("gpt2", dtype=torch.float64), batch(8)[0]
    policy = oracle.pair_logps(model, pairs)
    nothing = PairLogps(
        torch.zeros_like(policy.chosen), torch.zeros_like(policy.chosen), policy.num_chosen, policy.num_rejected
    )
    loss = oracle.global_loss(by_equation(name, params)(policy, nothing), [1.0] * 8)
    assert trainer.metrics["train/loss"] == pytest.approx(float(loss.detach()), rel=1e-10)
    assert oracle.relative_error(full_gradient(trained.model), oracle.gradient(model, loss)) < 1e-10


def test_an_objective_with_a_reference_asks_for_it() -> None:
    with pytest.raises(ConfigError, match="`reference` is None"):
        module(pair_loss("sigmoid"))
