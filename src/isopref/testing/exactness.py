"""Measures the promise: gradient, loss and metrics of one global batch in many layouts, compared with the oracle.

`measure` runs a cell (see cells.py) through DPOTrainModule as training does, and returns its distance from the oracle.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from olmo_core.nn.conversion.state_mapping import TemplatePlaceholder
from olmo_core.nn.hf.convert import get_converter_to_hf
from torch import Tensor, nn

from isopref.batch.packing import Budget, Group, plan_step, tokens_alone
from isopref.batch.step import build_mismatched, build_step
from isopref.data.mismatched import Mismatched
from isopref.data.table import ExampleTable
from isopref.engine.padded import DataCollatorForSeq2SeqDPO
from isopref.engine.train_module import DPOTrainModule
from isopref.examples import Lengths
from isopref.models.conversion import from_hf
from isopref.models.parallel import checkpoint_layers, data_group, parallelize, unwrap
from isopref.models.policy import Policy, full
from isopref.models.reward import RewardModel
from isopref.models.tiles import tile_mlps
from isopref.score import TableLogps
from isopref.testing import oracle
from isopref.testing.cells import Cell, Context, examples_of
from isopref.testing.equations import REWARD_CASES
from isopref.testing.expected import changed, changes_of, expected, pair_objective
from isopref.testing.models import tiny_model, tiny_reward_model


@dataclass(frozen=True)
class Found:
    """Distance of one cell from the oracle."""

    gradient_error: float
    loss_error: float
    metric_error: float
    metrics: dict[str, float] = field(default_factory=dict)


class StubTrainer:
    """The parts of a Trainer that a train module needs for one step."""

    def __init__(self, global_step: int = 2):
        self.global_step = global_step
        self.metrics_collect_interval = 1
        self.max_steps = 100
        self.metrics: dict[str, float] = {}
        self.data_loader = None

    def has_callback(self, _kind: type) -> bool:
        return True

    def record_metric(self, name: str, value: Any, **_options: Any) -> None:
        self.metrics[name] = float(value)


def measure(cell: Cell) -> Found:
    """Run a cell on this rank (all ranks of the cell call this together)."""
    loss, gradient, metrics, reference = expected(cell)
    module, trainer = build_module(cell, reference)
    rank = dist.get_rank(data_group(module.model)) if cell.ranks > 1 else 0
    module.train_batch(_collated(cell, module, rank) if cell.collated else _planned(cell, rank))
    found = full_gradient(module.model)
    # The oracle's gradient is zero for unused parameters, such as a vision tower, which may be frozen in the model.
    gradient = {name: one for name, one in gradient.items() if name in found or one.any()}
    worst = max(abs(trainer.metrics[name] - value) / max(1.0, abs(value)) for name, value in metrics.items())
    return Found(
        gradient_error=oracle.relative_error(found, gradient),
        loss_error=abs(trainer.metrics["train/loss"] - loss) / abs(loss),
        metric_error=worst,
        metrics=trainer.metrics,
    )


def _planned(cell: Cell, rank: int) -> dict[str, Any]:
    """A rank's share of the batch, built as ExampleLoader does."""
    examples, own = examples_of(cell)
    table = ExampleTable.from_tokens(examples, own if cell.own_weights else None)
    index = np.arange(len(examples))[:: -1 if cell.reverse else 1].copy()
    cut = plan(cell, table.lengths.select(index))
    loss = pair_objective(cell.objective)
    step = build_step(table, index, cut, cell.rows, cell.weighting, rank=rank, loss_kind=loss.kind)
    if loss.needs_mismatched:
        mismatched = Mismatched(table)
        cut = plan(cell, mismatched.lengths.select(index))
        step = replace(step, mismatched=build_mismatched(mismatched, index, cut, cell.rows, rank=rank))
    return {"step": step}


def _collated(cell: Cell, module: DPOTrainModule, rank: int) -> dict[str, Any]:
    """A rank's share of the batch from a script's collator. The train module cuts it into microbatches."""
    lengths = Lengths.of(examples_of(cell)[0])
    share = [pair for group in plan(cell, lengths)[rank] for pair in group]
    longest = int(tokens_alone(lengths, "padded").max())
    module.rank_microbatch_size = {"pair": longest, "tokens": 180, "whole": 4096}[cell.cut]
    return padded_batch(share, cell.num_pairs, own_weights=cell.own_weights, context=cell.context)


def padded_batch(
    share: list[int], num_pairs: int, *, own_weights: bool = False, context: Context = "none"
) -> dict[str, Tensor]:
    """Some pairs of the batch, collated."""
    examples, own = examples_of(Cell(num_pairs=num_pairs, context=context))
    instances = []
    for index in share:
        example = examples[index]
        one: dict[str, Any] = {"index": index}
        sides = zip(("chosen", "rejected"), example.answers, oracle.token_weights(example), strict=True)
        for side, completion, weights in sides:
            labels = [token if weight else -100 for token, weight in zip(completion, weights, strict=True)]
            one[f"{side}_input_ids"] = [*example.prompt, *completion]
            one[f"{side}_labels"] = [*([-100] * len(example.prompt)), *labels]
        if own_weights:
            one["weight"] = own[index]
        instances.append(one)
    return DataCollatorForSeq2SeqDPO()(instances)


def build_module(cell: Cell, reference: TableLogps, *, seed: int = 0) -> tuple[DPOTrainModule, StubTrainer]:
    """A train module for the cell's model, distributed over ranks as the cell says."""
    is_reward = cell.objective in REWARD_CASES
    tiny = tiny_reward_model if is_reward else tiny_model
    made = tiny(cell.architecture, dtype=getattr(torch, cell.dtype), seed=seed)
    hf_model = changed(made, changes_of(cell))
    policy = RewardModel(hf_model) if is_reward else Policy(from_hf(hf_model) if cell.native else hf_model)
    if cell.checkpointing:  # one layer recomputes, the other does not
        checkpoint_layers(policy, 1, offloaded=int(cell.offload_activations))
    tile_mlps(policy, cell.mlp_tile_tokens)
    shard = 2 if cell.parallel == "hsdp" else None
    model = parallelize(
        policy,
        cell.parallel,
        device=torch.device("cpu"),
        world_size=cell.ranks,
        hsdp_shard=shard,
        offload=cell.offload,
        tensor_parallel=cell.tensor_parallel,
        context_parallel=cell.context_parallel,
    )
    module = DPOTrainModule(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        objective=pair_objective(
            cell.objective,
            nll_weight=cell.nll_weight,
            ld_alpha=cell.ld_alpha,
            wpo=cell.wpo,
            balance_weight=cell.balance_weight,
        ),
        rank_microbatch_size=4096,
        reference=reference,
        weighting=cell.weighting,
        grad_sync=cell.grad_sync,
        check_first_step=False,
    )
    trainer = StubTrainer()
    module._attach_trainer(trainer)  # type: ignore[arg-type]
    return module, trainer


def plan(cell: Cell, lengths: Lengths) -> list[list[Group]]:
    """The cell's cut: by the planner, or forced to be unfair to some ranks."""
    budgets = {
        "pair": Budget(cell.rows, 4096, 1),
        "tokens": Budget(cell.rows, 300 if cell.trees else 180),
        "whole": Budget(cell.rows, 4096),
    }
    if cell.split == "plan":
        return plan_step(lengths, budgets[cell.cut], num_ranks=cell.shares)
    everyone = list(range(len(lengths)))
    if cell.split == "idle":  # the last rank has no pairs
        busy = cell.shares - 1
        return [*([everyone[rank::busy]] for rank in range(busy)), [[]]]
    first = [everyone[:1], everyone[1:3]]  # three pairs on the first rank, the others spread over the rest
    rest = [[everyone[3 + rank :: cell.shares - 1], []] for rank in range(cell.shares - 1)]
    return [first, *rest]


def full_gradient(model: nn.Module) -> dict[str, Tensor]:
    """The full gradient by the Hugging Face model's names, gathered if it is sharded. Frozen parameters have none."""
    found = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            assert parameter.grad is None, name
            continue
        assert parameter.grad is not None, name
        found[name.removeprefix("module.").removeprefix("model.")] = full(parameter.grad).detach()
    return hf_names(model, found)


def hf_names(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by the Hugging Face model's names. Only the renaming of OLMo-core's conversion applies to gradients."""
    native = unwrap(model).native
    if native is None:
        return tensors
    named = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    layers = {TemplatePlaceholder.LAYER: native.config.num_hidden_layers}
    converted: dict[str, Tensor] = get_converter_to_hf(native.config.model_type).convert(named, layers)
    return converted
