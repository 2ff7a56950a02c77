"""Mistakes of a user, by name, made on every rank alike."""

import os
import signal
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from isopref.batch.packing import Budget
from isopref.batch.rows import build_microbatch
from isopref.data.table import ExampleTable
from isopref.engine.loader import ExampleLoader
from isopref.engine.padded import split_batch_dpo
from isopref.engine.train_module import DPOTrainModule
from isopref.errors import ModelError
from isopref.models import probe, refusals
from isopref.models.conversion import from_hf
from isopref.models.finite import check_finite
from isopref.models.parallel import Parallel, parallelize, split_rows, unwrap
from isopref.models.policy import Policy
from isopref.score import TableLogps
from isopref.testing.cells import Cell, batch
from isopref.testing.exactness import StubTrainer, padded_batch
from isopref.testing.expected import pair_objective
from isopref.testing.models import examples, tiny_model
from support.counting import padded_gradient_error


def _hsdp_mesh() -> None:
    parallelize(
        Policy(tiny_model("gpt2")), "hsdp", device=torch.device("cpu"), world_size=dist.get_world_size(), hsdp_shard=3
    )


def _tensor(mode: Parallel = "fsdp", count: int = 2, native: bool = True) -> None:
    model = tiny_model("llama")
    policy = Policy(from_hf(model) if native else model)
    ranks = dist.get_world_size()
    parallelize(policy, mode, device=torch.device("cpu"), world_size=ranks, tensor_parallel=count)


def _together(**sizes: Any) -> DPOTrainModule:
    policy = Policy(from_hf(tiny_model("llama")))
    model = parallelize(policy, "fsdp", device=torch.device("cpu"), world_size=dist.get_world_size(), **sizes)
    return DPOTrainModule(
        model, torch.optim.SGD(model.parameters(), lr=0.0), objective=pair_objective("simpo"), rank_microbatch_size=4096
    )


def _padded_batch(**sizes: int) -> None:
    _together(**sizes).train_batch(padded_batch([0, 1], 8))


def _context(architecture: str, count: int) -> None:
    split_rows(Policy(tiny_model(architecture)), count, torch.device("cpu"))


def _padded_row_split() -> None:
    _together(context_parallel=2).model(build_microbatch(examples(batch(8)[0]), "padded"))


def _loader_of_all_ranks() -> None:
    module, trainer = _together(context_parallel=2), StubTrainer()
    table = ExampleTable.from_tokens(batch(8)[0])
    trainer.data_loader = ExampleLoader(  # type: ignore[assignment]
        table, batch_size=8, budget=Budget("shared", 4096), weighting="token", seed=0, work_dir="."
    )
    module._attach_trainer(trainer)  # type: ignore[arg-type]


def _small_budget() -> None:
    table = ExampleTable.from_tokens(batch(8)[0])
    ExampleLoader(table, batch_size=8, budget=Budget("shared", 20), weighting="token", seed=0, work_dir=".")


def _wide_padded_batch() -> None:
    padded_gradient_error(Cell(ranks=2, parallel="ddp"), [[0, 1, 2, 3], [4, 5, 6, 7]], 20)


def _zero_microbatch() -> None:
    policy = Policy(tiny_model("gpt2"))
    _module(policy, torch.optim.SGD(policy.parameters()), rank_microbatch_size=0)


def _not_spread() -> None:
    policy = Policy(tiny_model("gpt2"))
    _module(policy, torch.optim.SGD(policy.parameters()))


def _single_on_many() -> None:
    parallelize(Policy(tiny_model("gpt2")), "single", device=torch.device("cpu"), world_size=dist.get_world_size())


def _foreign_optimizer() -> None:
    _module(Policy(tiny_model("gpt2")), torch.optim.SGD(tiny_model("gpt2").parameters()))


def _module(policy: Policy, optim: torch.optim.Optimizer, rank_microbatch_size: int = 100) -> None:
    nothing = torch.zeros(0).double().numpy()
    DPOTrainModule(
        policy,
        optim,
        objective=pair_objective(),
        rank_microbatch_size=rank_microbatch_size,
        reference=TableLogps(nothing),
    )


def _nan_on_one_rank() -> None:
    model = parallelize(
        Policy(tiny_model("llama")), "fsdp", device=torch.device("cpu"), world_size=dist.get_world_size()
    )
    weight: Any = unwrap(model).model.get_parameter("model.layers.1.mlp.up_proj.weight")
    if dist.get_rank() == 1:
        weight.to_local().detach()[-1, -1] = float("nan")
    check_finite(unwrap(model).model, "it")


def _negative_split() -> None:
    split_batch_dpo(padded_batch([0, 1], 8), -1)


def _non_tensor() -> None:
    split_batch_dpo({**padded_batch([0, 1], 8), "source": "a file"}, 1)


MISTAKES: dict[str, Callable[[], Any]] = {
    "hsdp_mesh": _hsdp_mesh,
    "tensor_of_transformers": partial(_tensor, native=False),
    "tensor_with_ddp": partial(_tensor, mode="ddp"),
    "tensor_of_three": partial(_tensor, count=3),
    "padded_batch_in_parts": partial(_padded_batch, tensor_parallel=2),
    "padded_batch_split": partial(_padded_batch, context_parallel=2),
    "padded_row_split": _padded_row_split,
    "context_and_tensor": partial(_together, context_parallel=2, tensor_parallel=2),
    "context_of_three": partial(_context, "gpt2", 3),
    "context_with_states": partial(_context, "mamba", 2),
    "loader_of_all_ranks": _loader_of_all_ranks,
    "small_budget": _small_budget,
    "wide_padded_batch": _wide_padded_batch,
    "not_spread": _not_spread,
    "single_on_many": _single_on_many,
    "foreign_optimizer": _foreign_optimizer,
    "zero_microbatch": _zero_microbatch,
    "nan_on_one_rank": _nan_on_one_rank,
    "negative_split": _negative_split,
    "non_tensor": _non_tensor,
}


def error_of(mistake: str) -> str:
    """What a mistake raises, as text; the rank stays usable."""
    try:
        MISTAKES[mistake]()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def refused_by(refusing: list[int], mode: Parallel) -> str:
    """What the probe raises if these ranks, after all their forward passes, find something they do not support."""
    model = parallelize(Policy(tiny_model("llama")), mode, device=torch.device("cpu"), world_size=dist.get_world_size())
    found = "it is planted" if dist.get_rank() in refusing else None
    with patch.object(probe, "_strange", lambda *_: found), patch.object(refusals, "WAIT_S", 3.0):
        try:
            probe.check_layout(model, "shared")
        except ModelError as error:
            return str(error)
        finally:
            dist.barrier()
    return "no error"


def die_on_rank_one() -> None:
    """End the process of the second rank, as a crash would, while the first one waits for it."""
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def fail_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise RuntimeError("planted")
