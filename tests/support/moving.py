"""Steps with a reference that moves: by a loop over whole batches, and through the train module under a layout."""

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from isopref.batch.step import build_step
from isopref.data.table import ExampleTable
from isopref.engine.moving import MovingReference
from isopref.engine.train_module import DPOTrainModule
from isopref.models.conversion import from_hf
from isopref.models.parallel import data_group, parallelize
from isopref.models.policy import Policy, full
from isopref.testing import oracle
from isopref.testing.cells import Cell, batch
from isopref.testing.equations import batch_loss
from isopref.testing.exactness import StubTrainer, hf_names, plan
from isopref.testing.expected import pair_objective
from isopref.testing.models import tiny_model

STEPS, LR = 5, 0.05

Weights = dict[str, Tensor]


def by_oracle(every: int, mix: float, architecture: str = "gpt2") -> tuple[Weights, Weights]:
    """Policy and reference after some steps of plain gradient descent on one batch."""
    policy, reference = (tiny_model(architecture, dtype=torch.float64) for _ in range(2))
    pairs = batch(8)[0]
    for step in range(1, STEPS + 1):
        with torch.no_grad():
            ref = oracle.pair_logps(reference, pairs)
        loss = batch_loss("sigmoid", oracle.pair_logps(policy, pairs), ref, oracle.weights(pairs, "token"))
        gradient = oracle.gradient(policy, loss)
        with torch.no_grad():
            for name, parameter in policy.named_parameters():
                parameter.sub_(LR * gradient[name])
            if step % every == 0:
                for own, other in zip(reference.parameters(), policy.parameters(), strict=True):
                    own.copy_(mix * other + (1 - mix) * own)
    found = tuple({name: one.detach() for name, one in model.named_parameters()} for model in (policy, reference))
    return found[0], found[1]


def trained(cell: Cell, every: int, mix: float, *, stop_after: int | None = None) -> tuple[Weights, Weights]:
    """The same through the train module; with `stop_after`, a new one goes on from the first one's state."""
    module, trainer = _module(cell, every, mix)
    table = ExampleTable.from_tokens(batch(cell.num_pairs)[0])
    rank = dist.get_rank(data_group(module.model)) if cell.ranks > 1 else 0
    step = build_step(table, np.arange(cell.num_pairs), plan(cell, table.lengths), cell.rows, cell.weighting, rank=rank)
    for number in range(1, STEPS + 1):
        trainer.global_step = number
        module.train_batch({"step": step})
        module.optim_step()
        module.zero_grads()
        if number == stop_after:
            state = module.state_dict(optim=False)
            module, trainer = _module(cell, every, mix)
            module.load_state_dict(state)
    assert module.moving is not None
    return _weights(module.model), _weights(module.moving.model)


def _module(cell: Cell, every: int, mix: float) -> tuple[DPOTrainModule, StubTrainer]:
    model, reference = (_spread(cell, trained=trained) for trained in (True, False))
    module = DPOTrainModule(
        model,
        torch.optim.SGD(model.parameters(), lr=LR),
        objective=pair_objective(cell.objective),
        rank_microbatch_size=4096,
        reference=MovingReference(reference, every=every, mix=mix),
        weighting=cell.weighting,
        grad_sync=cell.grad_sync,
    )
    trainer = StubTrainer()
    module._attach_trainer(trainer)  # type: ignore[arg-type]
    return module, trainer


def _spread(cell: Cell, *, trained: bool) -> nn.Module:
    model = tiny_model(cell.architecture, dtype=getattr(torch, cell.dtype))
    policy = Policy(from_hf(model) if cell.native else model)
    whole = cell.parallel == "ddp" and not trained
    return parallelize(
        policy,
        "single" if whole else cell.parallel,
        device=torch.device("cpu"),
        world_size=1 if whole else cell.ranks,
        tensor_parallel=cell.tensor_parallel,
        context_parallel=cell.context_parallel,
    )


def _weights(model: nn.Module) -> Weights:
    named = ((name.removeprefix("module.").removeprefix("model."), one) for name, one in model.named_parameters())
    return hf_names(model, {name: full(parameter).detach().clone() for name, parameter in named})
