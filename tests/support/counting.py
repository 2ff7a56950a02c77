"""Counts of what a step should do rarely: collectives, and waits of the host for the device."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from isopref.batch.packing import Budget, plan_step
from isopref.batch.step import build_step
from isopref.data.table import ExampleTable
from isopref.engine.train_module import DPOTrainModule
from isopref.models.parallel import GradSync, Parallel, data_group, parallelize, reshard
from isopref.models.policy import Policy, full
from isopref.models.probe import check_layout, own_logps
from isopref.score import TableLogps, score_table
from isopref.testing import oracle
from isopref.testing.cells import Cell, batch
from isopref.testing.exactness import StubTrainer, build_module, full_gradient, padded_batch, plan
from isopref.testing.expected import expected, pair_objective
from isopref.testing.models import tiny_model

# Some have another name in another version of torch.
SCATTERS = ("reduce_scatter_tensor", "reduce_scatter_single")
OF_SPLIT_ROWS = ("all_to_all_single", "all_reduce")  # functional ones
COLLECTIVES = ("all_reduce", *SCATTERS, "all_gather_into_tensor", "all_gather_single", "all_gather", "broadcast")


READS = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__float__", "__int__")


class HostReads:
    """Counts what makes Python wait for the device: reads of a tensor's value or shape-by-value."""

    def __enter__(self) -> "HostReads":
        self.count = 0
        self._patches = [patch.object(torch.Tensor, name, self._counting(name)) for name in READS]
        for one in self._patches:
            one.start()
        return self

    def __exit__(self, *_error: object) -> None:
        for one in self._patches:
            one.stop()

    def _counting(self, name: str) -> Any:
        original = getattr(torch.Tensor, name)

        def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return original(tensor, *args, **kwargs)

        return call


@contextmanager
def counted(model: torch.nn.Module) -> Iterator[Counter[str]]:
    """Counts collectives called from Python, and the buckets that DDP reduces."""
    counts: Counter[str] = Counter()

    def counting(name: str, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return original(*args, **kwargs)

        return call

    if isinstance(model, DistributedDataParallel):

        def reduce_bucket(bucket: Any) -> Any:
            counts["ddp_buckets"] += 1
            return allreduce_hook(dist.distributed_c10d._get_default_group(), bucket)

        model.register_comm_hook(None, lambda _state, bucket: reduce_bucket(bucket))
    patches = [
        patch.object(dist, name, counting(name, getattr(dist, name))) for name in COLLECTIVES if hasattr(dist, name)
    ]
    for name in OF_SPLIT_ROWS:
        patches.append(patch.object(functional, name, counting(f"{name} of a row", getattr(functional, name))))
    for one in patches:
        one.start()
    try:
        yield counts
    finally:
        for one in patches:
            one.stop()


def count_step(cell: Cell, logs: bool) -> tuple[dict[str, int], int, int]:
    """One training step of a cell: its collectives, host reads and microbatches, on a step that logs or not."""
    module, trainer = build_module(cell, expected(cell)[3])
    trainer.record_metric = lambda *_args, **_kwargs: None  # type: ignore[method-assign]  # ours reads values; the engine waits
    trainer.metrics_collect_interval = 1 if logs else 10
    module.optim = torch.optim.AdamW(module.model.parameters(), lr=0.0, fused=True)  # as on a GPU
    table = ExampleTable.from_tokens(batch(cell.num_pairs)[0])
    rank = dist.get_rank(data_group(module.model)) if cell.ranks > 1 else 0
    index = np.arange(cell.num_pairs)
    step = build_step(table, index, plan(cell, table.lengths), cell.rows, cell.weighting, rank=rank)
    with counted(module.model) as counts, HostReads() as reads:
        module.train_batch({"step": step})
        step_counts = dict(counts)
        module.optim_step()
    return step_counts, reads.count, len(step.work)


def dry_run_traces(cell: Cell) -> list[str]:
    """What a dry run leaves behind; nothing, if all is well."""
    module, trainer = build_module(cell, expected(cell)[3])
    before = [p.detach().clone() for p in module.model.parameters()]
    random = torch.get_rng_state()
    table = ExampleTable.from_tokens(batch(cell.num_pairs)[0])
    step = build_step(table, np.arange(cell.num_pairs), plan(cell, table.lengths), cell.rows, cell.weighting)
    module.train_batch({"step": step}, dry_run=True)
    traces = {
        "gradients": any(p.grad is not None for p in module.model.parameters()),
        "weights": any(not torch.equal(a, b) for a, b in zip(before, module.model.parameters(), strict=True)),
        "metrics": bool(trainer.metrics) or bool(module._window.num_steps.any()),
        "random state": not torch.equal(random, torch.get_rng_state()),
    }
    return [name for name, left in traces.items() if left]


def padded_gradient_error(cell: Cell, shares: list[list[int]], rank_microbatch_size: int) -> float:
    """A padded batch of OLMo-core's form, `shares[rank]` on each rank, against the oracle."""
    loss, gradient, _, reference = expected(cell)
    module, trainer = build_module(cell, reference)
    module.rank_microbatch_size = rank_microbatch_size
    module.train_batch(padded_batch(shares[dist.get_rank() if cell.ranks > 1 else 0], cell.num_pairs))
    assert abs(trainer.metrics["train/loss"] - loss) < 1e-6
    return oracle.relative_error(full_gradient(module.model), gradient)


def one_step(model: PreTrainedModel, device: torch.device) -> Callable[[], None]:
    """A function that runs one training step of several microbatches, optimizer included, and logs nothing."""
    pairs = batch(8)[0]
    table = ExampleTable.from_tokens(pairs)
    policy = Policy(model).to(device)
    module = DPOTrainModule(
        policy,
        torch.optim.AdamW(policy.parameters(), lr=1e-4, fused=True),
        objective=pair_objective(),
        rank_microbatch_size=4096,
        reference=TableLogps(np.zeros(2 * len(pairs))),
        max_grad_norm=1.0,
        check_first_step=False,
    )
    trainer = StubTrainer()
    trainer.metrics_collect_interval = 1000
    module._attach_trainer(trainer)  # type: ignore[arg-type]
    cut = plan(Cell(), table.lengths)
    step = build_step(table, np.arange(len(pairs)), cut, "shared", "token")

    def run() -> None:
        module.train_batch({"step": step})
        module.optim_step()
        module.zero_grads()

    return run


def mixed_accumulation_error(copies: int, grad_sync: GradSync, narrow: bool, offload: bool) -> float:
    """Float32 master weights, bfloat16 compute: `copies` of one pair, one a microbatch, against one on each rank.

    The gradients of the copies are the same bfloat16 numbers, so their mean is exact if they add up in float32. With
    `narrow`, the weights are made float32 after they are sharded.
    """
    pair = batch(8)[0][0]
    gradients = []
    for count in (copies, dist.get_world_size()):
        policy = Policy(tiny_model("llama", dtype=torch.bfloat16 if narrow else torch.float32), narrow=narrow)
        world = dist.get_world_size()
        model = parallelize(
            policy,
            "fsdp",
            device=torch.device("cpu"),
            world_size=world,
            compute_dtype=torch.bfloat16,
            offload=offload,
        )
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        module = DPOTrainModule(
            model,
            torch.optim.SGD(model.parameters(), lr=0.0),
            objective=pair_objective(),
            rank_microbatch_size=4096,
            reference=TableLogps(np.zeros(2 * count)),
            grad_sync=grad_sync,
            check_first_step=False,
            compute_dtype=torch.bfloat16,
        )
        module._attach_trainer(StubTrainer())  # type: ignore[arg-type]
        table = ExampleTable.from_tokens([pair] * count)
        cut = plan_step(table.lengths, Budget("shared", 4096, 1), num_ranks=world)
        step = build_step(table, np.arange(count), cut, "shared", "token", rank=dist.get_rank())
        module.train_batch({"step": step})
        gradients.append(full_gradient(model))
    return oracle.relative_error(gradients[0], gradients[1])


def unchanged_after_scoring(mode: Parallel) -> list[str]:
    """Parameters that did not move in a step, where the optimizer was made after scoring, as users do."""
    model = parallelize(Policy(tiny_model("llama")), mode, device=torch.device("cpu"), world_size=dist.get_world_size())
    table = ExampleTable.from_tokens(batch(8)[0])
    reference = score_table(model, table, Budget("shared", 4096), device=torch.device("cpu"))
    module = DPOTrainModule(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0),
        objective=pair_objective(),
        rank_microbatch_size=4096,
        reference=reference,
        check_first_step=False,
    )
    module._attach_trainer(StubTrainer())  # type: ignore[arg-type]
    before = {name: full(parameter).detach().clone() for name, parameter in model.named_parameters()}
    cut = plan_step(table.lengths, Budget("shared", 4096), num_ranks=dist.get_world_size())
    module.train_batch({"step": build_step(table, np.arange(8), cut, "shared", "token", rank=dist.get_rank())})
    module.optim_step()
    after = {name: full(parameter).detach() for name, parameter in model.named_parameters()}
    return [name for name in before if torch.equal(before[name], after[name])]


def own_answers_moved(mode: Parallel) -> float:
    """How far the model's own log-probabilities are, once it is spread, from those before. Rows are proven by them."""
    policy = Policy(tiny_model("llama"))
    before = own_logps(policy)
    model = parallelize(policy, mode, device=torch.device("cpu"), world_size=dist.get_world_size())
    check_layout(model, "shared")
    after = own_logps(policy)
    reshard(model)
    return float((after - before).abs().max())


def shards_and_wholes(cell: Cell) -> tuple[set[str], set[str]]:
    """The parts of a cell's model that are sharded, and those that are not. All ranks call this together."""
    module, _ = build_module(cell, expected(cell)[3])
    sharded: set[str] = set()
    whole: set[str] = set()
    for name, parameter in module.model.named_parameters():
        (sharded if isinstance(parameter, DTensor) else whole).add(name.split(".")[2])
    dist.barrier()
    return sharded, whole
