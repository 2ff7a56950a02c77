"""What a train module refuses: invalid arguments and mismatched parts."""

from types import NoneType
from typing import Any, get_args

import numpy as np
from olmo_core.optim.scheduler import Scheduler
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from isopref.engine.arguments import check_choice, check_count, check_kind, check_policy, check_positive
from isopref.engine.loader import ExampleLoader
from isopref.engine.moving import MovingReference
from isopref.errors import ConfigError
from isopref.models.parallel import GradSync, reshard, unwrap
from isopref.normalize import Weighting
from isopref.objectives.loss import PairLoss
from isopref.score import TableLogps

WHERE = "DPOTrainModule"


def check_arguments(
    *,
    model: Any,
    optim: Any,
    objective: Any,
    rank_microbatch_size: Any,
    reference: Any,
    weighting: Any,
    scheduler: Any,
    max_grad_norm: Any,
    grad_sync: Any,
) -> None:
    """Raise ConfigError for an invalid argument."""
    references = (TableLogps, MovingReference, NoneType)
    check_policy(WHERE, model)
    check_kind(WHERE, "optim", optim, Optimizer, "a torch optimizer of the model's parameters")
    check_kind(WHERE, "objective", objective, PairLoss, 'what pair_loss returns, as in pair_loss("sigmoid")')
    check_kind(WHERE, "reference", reference, references, "what score_table returns, or None")
    check_kind(WHERE, "scheduler", scheduler, (Scheduler, NoneType), "a scheduler of OLMo-core, or None")
    check_choice(WHERE, "weighting", weighting, get_args(Weighting))
    check_choice(WHERE, "grad_sync", grad_sync, get_args(GradSync))
    if rank_microbatch_size is not None:
        check_count(WHERE, "rank_microbatch_size", rank_microbatch_size)
    if max_grad_norm is not None:
        check_positive(WHERE, "max_grad_norm", max_grad_norm)


def check_model(model: nn.Module, optim: Optimizer, objective: PairLoss, num_ranks: int) -> None:
    """Refuse setups that would silently train wrong: unsynchronised ranks, an optimizer with other parameters."""
    if num_ranks > 1 and not isinstance(model, (DistributedDataParallel, FSDPModule)):
        raise ConfigError(
            f"{num_ranks} ranks, but the model is not distributed over them, so gradients would never be reduced. "
            'Pass what parallelize(policy, "ddp", ...) or "fsdp" returns.'
        )
    if objective.balance_weight and not unwrap(model).experts_per_token:
        raise ConfigError("balance_weight needs a mixture of experts, but the model has no experts. Remove it.")
    reshard(model)
    own = {id(parameter) for parameter in model.parameters()}
    if not all(id(parameter) in own for group in optim.param_groups for parameter in group["params"]):
        raise ConfigError(
            "the optimizer holds parameters that do not belong to the model, so training would have no effect. Create "
            "it from the module that parallelize returns."
        )


def check_loader(
    loader: ExampleLoader,
    objective: PairLoss,
    weighting: Weighting,
    rank_microbatch_size: int | None,
    num_references: int | None,
) -> None:
    """Refuse a loader with conflicting settings: it alone weights and splits batches."""
    if loader.weighting != weighting:
        raise ConfigError(
            f"{WHERE}: weighting is {weighting!r}, but the ExampleLoader's is {loader.weighting!r}. Pass the same "
            "value to both."
        )
    if rank_microbatch_size not in (None, loader.budget.tokens):
        raise ConfigError(
            f"{WHERE}: rank_microbatch_size is {rank_microbatch_size}, but the ExampleLoader splits batches by its "
            f"own budget of {loader.budget.tokens} tokens. Remove rank_microbatch_size."
        )
    if objective.lists and np.isnan(loader.table.scores).any():
        first = int(loader.table.lengths.of_answer[np.isnan(loader.table.scores).argmax()])
        raise ConfigError(
            f"{WHERE}: a list loss needs scores for all answers, but {loader.table.origin(first)} has none. "
            "Pass Example(prompt, answers, comparisons, scores)."
        )
    num_answers = len(loader.table.lengths.answer)
    if num_references not in (None, num_answers):
        raise ConfigError(
            f"{WHERE}: reference has {num_references} answers, but the ExampleLoader's table has {num_answers}. Score "
            "the training table: score_table(policy, table, ...)."
        )
