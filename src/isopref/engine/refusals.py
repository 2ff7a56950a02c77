"""What a train module refuses: invalid arguments and mismatched parts."""

from types import NoneType
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray
from olmo_core.optim.scheduler import Scheduler
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from isopref.data.table import ExampleTable
from isopref.engine.arguments import check_choice, check_count, check_kind, check_policy, check_positive
from isopref.engine.loader import ExampleLoader
from isopref.engine.moving import MovingReference
from isopref.errors import ConfigError, DataError
from isopref.models.parallel import GradSync, reshard, unwrap
from isopref.models.reward import RewardModel
from isopref.normalize import Weighting
from isopref.objectives.loss import Loss
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
    check_kind(WHERE, "objective", objective, Loss, 'what pair_loss returns, as in pair_loss("sigmoid")')
    check_kind(WHERE, "reference", reference, references, "what score_table returns, or None")
    check_kind(WHERE, "scheduler", scheduler, (Scheduler, NoneType), "a scheduler of OLMo-core, or None")
    check_choice(WHERE, "weighting", weighting, get_args(Weighting))
    check_choice(WHERE, "grad_sync", grad_sync, get_args(GradSync))
    if rank_microbatch_size is not None:
        check_count(WHERE, "rank_microbatch_size", rank_microbatch_size)
    if max_grad_norm is not None:
        check_positive(WHERE, "max_grad_norm", max_grad_norm)


def check_model(model: nn.Module, optim: Optimizer, objective: Loss, num_ranks: int) -> None:
    """Refuse setups that would silently train wrong: unsynchronised ranks, an optimizer with other parameters."""
    if num_ranks > 1 and not isinstance(model, (DistributedDataParallel, FSDPModule)):
        raise ConfigError(
            f"{num_ranks} ranks, but the model is not distributed over them, so gradients would never be reduced. "
            'Pass what parallelize(policy, "ddp", ...) or "fsdp" returns.'
        )
    if objective.balance_weight and not unwrap(model).experts_per_token:
        raise ConfigError("balance_weight needs a mixture of experts, but the model has no experts. Remove it.")
    if (objective.readout == "reward") != isinstance(unwrap(model), RewardModel):
        names = ", ".join(one.objective.name for one in objective.summands)
        wanted, found = ("RewardModel", "Policy") if objective.readout == "reward" else ("Policy", "RewardModel")
        raise ConfigError(
            f"{WHERE}: the loss {names} needs a {wanted}, but the model is a {found}. Pass the other kind of model, or "
            "use another loss."
        )
    reshard(model)
    own = {id(parameter) for parameter in model.parameters()}
    if not all(id(parameter) in own for group in optim.param_groups for parameter in group["params"]):
        raise ConfigError(
            "the optimizer holds parameters that do not belong to the model, so training would have no effect. Create "
            "it from the module that parallelize returns."
        )


def check_loader(
    loader: ExampleLoader,
    objective: Loss,
    weighting: Weighting,
    rank_microbatch_size: int | None,
    num_references: int | None,
    num_ranks: int,
) -> None:
    """Refuse a loader with conflicting settings: it alone weights and splits batches."""
    if loader.dp_world_size != num_ranks:
        raise ConfigError(
            f"{WHERE}: the ExampleLoader's dp_world_size is {loader.dp_world_size}, but it must be {num_ranks}: the "
            "number of the model's ranks, or of groups of ranks that compute layers or rows together. Pass "
            f"ExampleLoader(..., dp_rank=..., dp_world_size={num_ranks})."
        )
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
    if loader.loss_kind != objective.kind:
        raise ConfigError(
            f"{WHERE}: the objective is a loss of {objective.kind}, but the ExampleLoader builds batches for a loss of "
            f"{loader.loss_kind}. Pass the same objective to both: ExampleLoader(..., objective=objective)."
        )
    if objective.needs_mismatched and loader.mismatched is None:
        raise ConfigError(
            f"{WHERE}: the objective needs mismatched pairs, which the ExampleLoader does not build. Pass the same "
            "objective to both: ExampleLoader(..., objective=objective)."
        )
    check_table(loader.table, objective)
    if objective.kind != "pairs" and weighting == "gap":
        raise ConfigError(
            f"{WHERE}: weighting 'gap' applies to comparisons of two answers, but the objective is a loss of "
            f"{objective.kind}. Use another weighting."
        )
    if objective.needs.gaps or weighting == "gap":
        check_gaps(loader.table, WHERE)
    num_answers = len(loader.table.lengths.answer)
    if num_references not in (None, num_answers):
        raise ConfigError(
            f"{WHERE}: reference has {num_references} answers, but the ExampleLoader's table has {num_answers}. Score "
            "the training table: score_table(policy, table, ...)."
        )


def check_table(table: ExampleTable, objective: Loss) -> None:
    """Raise DataError if the table lacks what a loss of this kind learns from."""
    names = ", ".join(one.objective.name for one in objective.summands)
    if objective.kind == "labels":
        _check_labels(table, names)
        return
    lonely = table.lengths.num_comparisons == 0
    if lonely.any():
        raise DataError(
            f"{table.origin(int(lonely.argmax()))}: nothing to compare, but {names} is a loss of {objective.kind} "
            f"({int(lonely.sum())} of {len(table)} examples have only labelled answers). Use objective.loss: kto or "
            "bco, or train on pairs."
        )
    if objective.kind == "lists" and np.isnan(table.scores).any():
        first = int(table.lengths.of_answer[np.isnan(table.scores).argmax()])
        raise DataError(
            f"{table.origin(first)}: {names} is a loss of lists and needs a score for every answer, but an answer has "
            "none. Pass scores: Example(prompt, answers, comparisons, scores)."
        )


def _check_labels(table: ExampleTable, names: str) -> None:
    wrong = ~np.isin(table.scores, (0.0, 1.0))
    if wrong.any():
        first = int(wrong.argmax())
        score = table.scores[first]
        found = "an answer has none" if np.isnan(score) else f"an answer has a score of {score:g}"
        raise DataError(
            f"{table.origin(int(table.lengths.of_answer[first]))}: {names} needs a label for every answer, good (1) or "
            f"bad (0), but {found}. Scores of a list are not labels: use a loss of lists, such as plackett_luce, a "
            "loss of pairs, or give every answer a label."
        )


def check_gaps(table: ExampleTable, where: str) -> None:
    """Raise ConfigError unless the data scores the better answer of every comparison above the worse one."""
    unknown, wrong = np.isnan(table.gaps), table.gaps <= 0
    count = f"of {len(table.gaps)} comparisons"
    if unknown.any():
        raise ConfigError(
            f"{where}: {unknown.sum()} {count} have no score gap, but all need one; the first is "
            f"{_origin(table, unknown)}. Add the columns chosen_score and rejected_score, or margin, to pairs, or use "
            "lists with scores."
        )
    if wrong.any():
        raise ConfigError(
            f"{where}: {wrong.sum()} {count} do not score the better answer higher; the first is "
            f"{_origin(table, wrong)}, with a gap of {table.gaps[wrong][0]:g}. Drop them with data.min_gap (above 0) "
            "and data.on_bad: drop."
        )


def _origin(table: ExampleTable, some_M: NDArray[np.bool_]) -> str:
    """Where the first of some comparisons comes from."""
    return table.origin(int(table.lengths.of_comparison[some_M.argmax()]))
