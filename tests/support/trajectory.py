"""Whole trajectories: the weights after many optimizer steps, by the oracle and under a layout."""

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from isopref.batch.packing import Budget
from isopref.data.schedule import epoch_order
from isopref.data.table import ExampleTable
from isopref.engine.loader import ExampleLoader
from isopref.engine.optim import Kind, build_optimizer
from isopref.examples import PairTokens
from isopref.models.parallel import data_group
from isopref.models.policy import full
from isopref.score import TableLogps
from isopref.testing import oracle
from isopref.testing.cells import Cell
from isopref.testing.exactness import build_module, hf_names
from isopref.testing.expected import pair_objective
from isopref.testing.models import random_pairs, tiny_model

NUM_PAIRS, BATCH_SIZE, EPOCHS = 23, 5, 4  # five steps an epoch, the last one short: 20 steps
LR, SEED = 3e-3, 7

Weights = dict[str, Tensor]


def pairs() -> list[PairTokens]:
    return random_pairs(NUM_PAIRS, seed=11, longest=16)


def reference(architecture: str, dtype: torch.dtype, seed: int) -> TableLogps:
    """The reference is the starting point itself, as in training."""
    with torch.no_grad():
        logps = oracle.pair_logps(tiny_model(architecture, dtype=dtype, seed=seed), pairs())
    return TableLogps.of_pairs(logps.chosen, logps.rejected)


def by_oracle(architecture: str = "gpt2", *, dtype: torch.dtype = torch.float64, seed: int = 0) -> Weights:
    """The slow, obvious loop: every epoch in order, consecutive batches, every pair once."""
    model = tiny_model(architecture, dtype=dtype, seed=seed)
    optim = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    every = pairs()
    with torch.no_grad():
        ref = oracle.pair_logps(model, every)
    for epoch in range(1, EPOCHS + 1):
        order = epoch_order(NUM_PAIRS, seed=SEED, epoch=epoch).tolist()
        for start in range(0, NUM_PAIRS, BATCH_SIZE):
            some = order[start : start + BATCH_SIZE]
            batch = [every[i] for i in some]
            weight = oracle.weights(batch, "token")
            part = type(ref)(*(x[some] for x in (ref.chosen, ref.rejected, ref.num_chosen, ref.num_rejected)))
            _, gradient = oracle.whole_batch(model, batch, pair_objective(), part, weight)
            for name, parameter in model.named_parameters():
                parameter.grad = gradient[name]
            optim.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@torch.compiler.set_stance("force_eager")  # type: ignore[untyped-decorator]  # torchao would compile its few steps
def by_layout(cell: Cell, seed: int = 0, optim: Kind = "adamw") -> Weights:
    """The same steps through loader and train module, cut as the cell says. All its ranks call this together."""
    dtype = getattr(torch, cell.dtype)
    module, trainer = build_module(cell, reference(cell.architecture, dtype, seed), seed=seed)
    module.optim = build_optimizer(
        optim, module.model, lr=LR, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, seed=seed, compute_dtype=dtype
    )
    loader = ExampleLoader(
        ExampleTable.from_tokens(pairs()),
        batch_size=BATCH_SIZE,
        budget={"pair": Budget(cell.rows, 4096, 1), "tokens": Budget(cell.rows, 100)}.get(
            cell.cut, Budget(cell.rows, 4096)
        ),
        weighting=cell.weighting,
        seed=SEED,
        work_dir=".",
        dp_rank=dist.get_rank(data_group(module.model)) if cell.ranks > 1 else 0,
        dp_world_size=cell.shares,
    )
    for epoch in range(1, EPOCHS + 1):
        loader.reshuffle(epoch)
        for batch in loader:
            trainer.global_step += 1
            module.train_batch(batch)
            module.optim_step()
            module.zero_grads()
        loader.reset()  # type: ignore[no-untyped-call]
    names = ((name.removeprefix("module.").removeprefix("model."), p) for name, p in module.model.named_parameters())
    return hf_names(module.model, {name: full(parameter).detach() for name, parameter in names})


def loss_after(weights: Weights, architecture: str = "gpt2", *, seed: int = 0) -> float:
    """Mean loss of the trained weights on the training pairs, in float64."""
    model = tiny_model(architecture, dtype=torch.float64)
    model.load_state_dict(weights, strict=False)
    with torch.no_grad():
        start = oracle.pair_logps(tiny_model(architecture, dtype=torch.float64, seed=seed), pairs())
        return float(np.mean(pair_objective()(oracle.pair_logps(model, pairs()), start).numpy()))
