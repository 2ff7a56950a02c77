"""TR-DPO: a reference that moves towards the policy, against a loop that does it by hand."""

import numpy as np
import pytest
import torch

from isopref.engine.moving import MovingReference
from isopref.engine.train_module import DPOTrainModule
from isopref.errors import ConfigError
from isopref.models.policy import Policy
from isopref.objectives.loss import pair_loss
from isopref.testing import oracle
from isopref.testing.cells import Cell
from isopref.testing.expected import pair_objective
from isopref.testing.models import tiny_model
from support.moving import STEPS, by_oracle, trained

EVERY = pytest.mark.parametrize(("every", "mix"), [(1, 0.3), (2, 1.0), (3, 0.6)])


@EVERY
@pytest.mark.parametrize("cut", ["pair", "whole"])
def test_weights_of_both_models_are_the_loop_s(every: int, mix: float, cut: str) -> None:
    found = trained(Cell(cut=cut), every, mix)  # type: ignore[arg-type]
    for one, other in zip(found, by_oracle(every, mix), strict=True):
        assert oracle.relative_error(one, other) < 1e-10


def test_where_it_stands_still_the_loop_is_another() -> None:
    """The test above would see a reference that never moves, or moves at other steps."""
    moves = by_oracle(2, 1.0)[0]
    assert oracle.relative_error(by_oracle(STEPS + 1, 1.0)[0], moves) > 1e-3
    assert oracle.relative_error(by_oracle(3, 1.0)[0], moves) > 1e-3


def test_it_goes_on_from_a_checkpoint_bit_for_bit() -> None:
    whole = trained(Cell(), 2, 0.6)
    resumed = trained(Cell(), 2, 0.6, stop_after=3)
    for one, other in zip(whole, resumed, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_another_shape_is_refused() -> None:
    policy = Policy(tiny_model("gpt2"))
    other = MovingReference(Policy(tiny_model("gpt2", n_layer=1)), every=1, mix=0.5)
    with pytest.raises(ConfigError, match=r"'model\.transformer\.h\.1\..*' differs between them"):
        DPOTrainModule(
            policy,
            torch.optim.SGD(policy.parameters()),
            objective=pair_objective(),
            rank_microbatch_size=4096,
            reference=other,
        )


def test_without_a_reference_there_is_none_to_move() -> None:
    policy, other = (Policy(tiny_model("gpt2")) for _ in range(2))
    with pytest.raises(ConfigError, match="a moving reference has no effect"):
        DPOTrainModule(
            policy,
            torch.optim.SGD(policy.parameters()),
            objective=pair_loss("simpo"),
            rank_microbatch_size=4096,
            reference=MovingReference(other, every=1, mix=0.5),
        )


@pytest.mark.parametrize(("every", "mix"), [(0, 0.5), (1, 0.0), (1, 1.5), (1, np.nan)])
def test_what_it_cannot_do_is_refused(every: int, mix: float) -> None:
    with pytest.raises(ConfigError, match="a moving reference needs every >= 1 and 0 < mix <= 1"):
        MovingReference(Policy(tiny_model("gpt2")), every=every, mix=mix)
