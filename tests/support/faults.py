"""Faults that real runs meet, planted: numbers that are not finite, a device without room."""

import math
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from isopref.data.packing import Budget
from isopref.data.table import PairTable
from isopref.engine import train_module
from isopref.engine.guard import Skipped
from isopref.engine.loader import PairLoader
from isopref.engine.oom_retry import OomRetry
from isopref.engine.train_module import DPOTrainModule
from isopref.models.finite import bad_weights
from isopref.models.parallel import Parallel, parallelize, unwrap
from isopref.models.policy import Policy, full
from isopref.objectives.loss import pair_loss
from isopref.ranks import num_ranks, own_rank
from isopref.runs.files import MICROBATCH_FILE
from isopref.score import TableLogps, score
from isopref.testing.exactness import StubTrainer, full_gradient
from isopref.testing.models import random_pairs, tiny_model
from isopref.testing.oracle import relative_error
from isopref.types import Microbatch, Needs, Readout

NUM_PAIRS = 6


class Skip(NamedTuple):
    """What a step with a fault in it left."""

    moved: list[str]  # parameters, and parts of the optimizer, that are others than before
    report: Skipped | None
    trains_on: bool  # whether the next step, without the fault, moves the weights


def bad_step(mode: Parallel, fused: bool, fault: float, pair: int, loss: str = "hinge") -> Skip:
    """A good step, one in which the reference of a pair is `fault`, and a good one. All ranks call this together.

    With a hinge and minus infinity, the loss is infinite and its own gradient is not.
    """
    module = _module(mode, fused, loss)
    _step(module, 1)
    before = _state(module)
    assert module.reference_2N is not None
    good = module.reference_2N.clone()
    module.reference_2N[1, pair] = fault
    _step(module, 2)
    after = _state(module)
    module.reference_2N = good
    report = module.guard.report()
    _step(module, 3)
    return Skip(
        [name for name in before if not torch.equal(before[name], after[name])],
        report,
        any(not torch.equal(after[name], now) for name, now in _state(module).items()),
    )


def bad_weight(mode: Parallel, fault: float) -> tuple[list[str], list[str]]:
    """What is found in weights that are fine, and after the last rank put a fault into its part of one."""
    module = _module(mode, fused=False)
    before = bad_weights(unwrap(module.model).model, trained_only=True)
    weights = dict(unwrap(module.model).named_parameters())
    weight = weights["model.model.layers.0.mlp.up_proj.weight"].detach()
    if own_rank() == num_ranks() - 1:
        (weight.to_local() if isinstance(weight, DTensor) else weight)[-1, -1] = fault
    return before, bad_weights(unwrap(module.model).model, trained_only=True)


def _module(mode: Parallel, fused: bool, loss: str = "hinge") -> DPOTrainModule:
    world = dist.get_world_size() if mode != "single" else 1
    model = parallelize(Policy(tiny_model("llama")), mode, device=torch.device("cpu"), world_size=world)
    module = DPOTrainModule(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=fused),
        objective=pair_loss(loss, beta=0.1),
        rank_microbatch_size=4096,
        reference=TableLogps(np.full(NUM_PAIRS, -30.0), np.full(NUM_PAIRS, -30.0)),
        max_grad_norm=1.0,
        check_first_step=False,
    )
    module._attach_trainer(StubTrainer())  # type: ignore[arg-type]
    return module


def loader(budget: Budget, *, num_pairs: int = NUM_PAIRS, ranks: int = 1, rank: int = 0) -> PairLoader:
    """Batches of all pairs of a small table."""
    return PairLoader(
        PairTable.from_tokens(random_pairs(num_pairs, seed=5)),
        batch_pairs=num_pairs,
        budget=budget,
        weighting="token",
        seed=0,
        work_dir=".",
        dp_rank=rank,
        dp_world_size=ranks,
    )


def _step(module: DPOTrainModule, number: int) -> None:
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if module.num_ranks > 1 else (0, 1)
    module.trainer.global_step = number
    module.train_batch({"step": loader(Budget("shared", 60), ranks=ranks, rank=rank).step(np.arange(NUM_PAIRS))})
    module.optim_step()
    module.zero_grads()


def _state(module: DPOTrainModule) -> dict[str, Tensor]:
    """Weights and optimizer, whole."""
    state: dict[str, Tensor] = {}
    for name, parameter in module.model.named_parameters():
        parts = {"": parameter.detach(), **module.optim.state.get(parameter, {})}
        state |= {f"{name} {part}": full(value).clone() for part, value in parts.items()}
    assert all(math.isfinite(float(value.sum())) for value in state.values())
    return state


SMALL = Budget("shared", 60)


class Cut(NamedTuple):
    """What a step that ran out of memory came to."""

    gradient_error: float  # against the same step without the fault
    tokens: int  # of a microbatch, from then on
    padding: tuple[float, float]  # as logged, and of the step as it was done in the end
    said: list[str]


def out_of_memory(
    mode: Parallel, rank: int | None, microbatch: int, folder: str, *, budget: Budget = SMALL, meets: bool = False
) -> Cut:
    """A step in which a rank (None: each) runs out of memory once, in a microbatch. All ranks call this together."""
    own, ranks = (dist.get_rank(), dist.get_world_size()) if mode != "single" else (0, 1)
    module, pairs = _module(mode, False), loader(budget, num_pairs=12, ranks=ranks, rank=own)
    module.reference_2N = torch.full((2, 12), -30.0, dtype=torch.float64)
    step = pairs.step(np.arange(12))
    assert len(step.work) > microbatch + 1
    module.train_batch({"step": step})
    expected = full_gradient(module.model)
    module.zero_grads()
    said: list[str] = []
    file = Path(folder) / MICROBATCH_FILE
    module.oom_retry = OomRetry(module.model, pairs, meets=meets, asked={}, file=file, say=said.append)
    left = [microbatch if rank in (own, None) else -1]

    def failing(model: nn.Module, one: Microbatch, needs: Needs) -> Readout:
        # First: DDP lets ranks meet in a forward pass once, when it learns its buckets.
        scored = score(model, one, needs)
        left[0] -= 1
        if left[0] == -1:
            raise torch.OutOfMemoryError("planted")
        return scored

    with patch.object(train_module, "score", failing):
        module.train_batch({"step": step})
    metrics: dict[str, float] = module.trainer.metrics  # type: ignore[attr-defined]
    padding = float(metrics["train/padding_fraction"]), pairs.step(np.arange(12)).padding_fraction
    return Cut(relative_error(full_gradient(module.model), expected), pairs.budget.tokens, padding, said)
