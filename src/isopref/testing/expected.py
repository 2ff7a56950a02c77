"""What the oracle expects of a cell: loss, gradient, metrics, and the log-probabilities of the reference.

The layout changes none of these, so cells that differ only in their layout share one result. Set ISOPREF_EXPECTED to a
folder to share results between processes: one rank then computes a result while the others wait for it.
"""

import hashlib
import os
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from isopref.examples import Example
from isopref.locks import FileLock
from isopref.models.adapter import Kind, quantize_nf4
from isopref.models.float8 import compute_in_float8
from isopref.models.head import head_of
from isopref.objectives.loss import Loss, pair_loss
from isopref.score import TableLogps
from isopref.testing import labels, oracle
from isopref.testing.answer import Answer
from isopref.testing.cells import Cell, Context, examples_of
from isopref.testing.equations import ALL_CASES, LABEL_CASES, REWARD_CASES, answers, batch_loss, reward
from isopref.testing.list_equations import LIST_CASES, lists_loss
from isopref.testing.models import tiny_model, tiny_reward_model, with_adapter
from isopref.types import PairLogps

FOLDER = "ISOPREF_EXPECTED"
REFERENCE_OF_LABELS = 4  # a model with which KTO's KL term is positive
LAYOUT = (
    *("native", "rows", "cut", "ranks", "tensor_parallel", "context_parallel", "parallel", "grad_sync"),
    *("checkpointing", "reverse", "split", "offload", "collated"),
)


class Changes(NamedTuple):
    """Changes to a model before it is trained; see Cell."""

    adapter: Kind | None = None
    quantize: bool = False
    float8: bool = False


Expected = tuple[float, dict[str, Tensor], dict[str, float], TableLogps]


def expected(cell: Cell) -> Expected:
    """The oracle's loss, gradient and metrics, and the log-probabilities of the reference, another model."""
    default = Cell()
    return _remembered(replace(cell, **{name: getattr(default, name) for name in LAYOUT}))


@cache
def _remembered(cell: Cell) -> Expected:
    folder = os.environ.get(FOLDER)
    if folder is None:
        return _computed(cell)
    path = Path(folder) / f"{hashlib.blake2b(repr(cell).encode(), digest_size=16).hexdigest()}.pt"
    with path.with_suffix(".lock").open("w") as file:
        FileLock(file.fileno()).wait()  # the ranks of a cell ask at the same time
        if not path.exists():
            _save(_computed(cell), path)
    loss, gradient, metrics, reference = torch.load(path, weights_only=True)
    return loss, gradient, metrics, TableLogps(**reference)


def _save(found: Expected, path: Path) -> None:
    *figures, reference = found
    tensors = {name: None if one is None else torch.from_numpy(one) for name, one in vars(reference).items()}
    part = path.with_suffix(".part")
    torch.save((*figures, tensors), part)
    part.replace(path)  # a process that is killed leaves no half-written result


def _computed(cell: Cell) -> Expected:
    examples, own = examples_of(cell)
    own = own if cell.own_weights else [1.0] * len(own)
    if cell.objective in LABEL_CASES:
        return labels.expected(
            *_models(cell.architecture, cell.dtype, changes_of(cell), reference_seed=REFERENCE_OF_LABELS),
            examples,
            own,
            case=cell.objective,
            weighting=cell.weighting,
            nll_weight=cell.nll_weight,
            balance_weight=cell.balance_weight,
        )
    is_reward = cell.objective in REWARD_CASES
    model, whole, policy, ref, reference = _scored(
        *(cell.architecture, cell.dtype, cell.num_pairs, cell.trees, cell.at_start, cell.context),
        *(cell.ld_alpha, changes_of(cell), is_reward),
    )
    pairs = oracle.comparisons(examples)
    told = [own[n] for n, one in enumerate(examples) for _ in one.comparisons]
    count = [len(one.comparisons) for one in examples for _ in one.comparisons]
    shared = [
        weight / number if cell.weighting == "example" else weight for weight, number in zip(told, count, strict=True)
    ]
    gaps = [gap for one in examples for gap in one.gaps]
    nll = oracle.token_nll(whole, told)
    factors = oracle.wpo_weights(model, pairs) if cell.wpo else None
    if cell.objective in LIST_CASES:
        weights = oracle.list_weights(examples, cell.weighting, own)
        loss = lists_loss(cell.objective, _ranked(model, examples, reference, is_reward), weights)
    else:
        sizes = oracle.weights(pairs, cell.weighting, shared, gaps)
        loss = batch_loss(cell.objective, policy, ref, sizes, factors)
    loss = loss + cell.nll_weight * nll
    metrics = _metrics(policy, ref, cell.objective)
    if not is_reward:
        metrics["train/nll"] = float(nll.detach())
    if cell.at_start:  # every comparison is a tie that rounding decides
        del metrics["train/accuracy"]
    if cell.balance_weight:
        balance = oracle.balance(model, examples)
        loss = loss + cell.balance_weight * balance
        metrics["train/balance"] = float(balance.detach())
    return (
        float(loss.detach()),
        oracle.gradient(model, loss, again=True),
        metrics,
        reference,
    )


def _ranked(
    model: nn.Module, examples: list[Example], reference: TableLogps, is_reward: bool
) -> list[list[tuple[Answer, float]]]:
    """The answers of each example with their scores, in the form that the equations take."""
    of = oracle.sequence_reward if is_reward else oracle.sequence_logp
    ref = iter(torch.from_numpy(reference.answers))
    return [
        [
            (Answer(of(model, one.prompt, answer, weights).double(), next(ref), oracle.num_trained(weights)), score)
            for answer, weights, score in zip(one.answers, oracle.token_weights(one), one.scores, strict=True)
        ]
        for one in examples
    ]


@cache
def _scored(
    architecture: str,
    dtype: str,
    num_pairs: int,
    trees: bool,
    at_start: bool,
    context: Context,
    ld_alpha: float,
    changes: Changes,
    is_reward: bool,
) -> tuple[nn.Module, PairLogps, PairLogps, PairLogps, TableLogps]:
    """A model; its log-probabilities of the comparisons, plain and with LD-DPO's discount, both with their graph; the
    reference's; and the reference's log-probabilities as a table.
    """
    examples, _ = examples_of(Cell(num_pairs=num_pairs, trees=trees, context=context))
    pairs = oracle.comparisons(examples)
    gap = torch.tensor([gap for one in examples for gap in one.gaps], dtype=torch.float64)
    if is_reward:
        judge = changed(tiny_reward_model(architecture, dtype=getattr(torch, dtype)), changes)
        policy = replace(oracle.pair_rewards(judge, pairs), gap=gap)
        nothing = torch.zeros_like(policy.chosen.detach())
        none = TableLogps(torch.zeros(sum(len(one.answers) for one in examples)))
        return judge, policy, policy, replace(policy, chosen=nothing, rejected=nothing), none
    model, other = _models(architecture, dtype, changes, reference_seed=0 if at_start else 1)
    with torch.no_grad():
        ref = oracle.pair_logps(other, pairs, ld_alpha)
        answers = [
            oracle.sequence_logp(other, one.prompt, answer, weights)
            for one in examples
            for answer, weights in zip(one.answers, oracle.token_weights(one), strict=True)
        ]
        heads = oracle.pair_logps(other, pairs, 0.0)  # 0.0: tokens beyond the shorter answer's length do not count
    reference = TableLogps(torch.stack(answers), torch.stack([heads.chosen, heads.rejected]))
    whole = replace(oracle.pair_logps(model, pairs), gap=gap)
    policy = replace(oracle.pair_logps(model, pairs, ld_alpha), gap=gap) if ld_alpha != 1 else whole
    return model, whole, policy, ref, reference


def _models(architecture: str, dtype: str, changes: Changes, *, reference_seed: int = 1) -> tuple[nn.Module, nn.Module]:
    """The policy and the reference."""
    model, other = (tiny_model(architecture, dtype=getattr(torch, dtype), seed=seed) for seed in (0, reference_seed))
    # The reference computes in the same precision.
    return changed(model, changes), changed(other, Changes(float8=changes.float8))


def pair_objective(case: str = "sigmoid", **settings: Any) -> Loss:
    """The objective of a cell."""
    name, params = ALL_CASES[case]
    return pair_loss(name, **settings, **params)


def _metrics(policy: PairLogps, ref: PairLogps, objective: str) -> dict[str, float]:
    """Means over pairs, by their definitions."""
    loss, params = ALL_CASES[objective]
    name = loss if isinstance(loss, str) else next(iter(loss))  # rewards are those of the first
    rewards = [(reward(name, c, params), reward(name, r, params)) for c, r in answers(policy, ref)]
    chosen, rejected = (torch.stack(side) for side in zip(*rewards, strict=True))
    values = {
        "logps_chosen": policy.chosen,
        "logps_rejected": policy.rejected,
        "rewards_chosen": chosen,
        "rewards_rejected": rejected,
        "margin": (chosen - rejected) / params.get("beta", 1.0),
        "accuracy": (chosen > rejected).double(),
    }
    if objective in REWARD_CASES:
        del values["logps_chosen"], values["logps_rejected"]
    return {f"train/{name}": float(value.detach().double().mean()) for name, value in values.items()}


def changes_of(cell: Cell) -> Changes:
    return Changes(cell.adapter, cell.quantize, cell.float8)


def changed(model: PreTrainedModel, changes: Changes) -> PreTrainedModel:
    if changes.quantize:
        quantize_nf4(model, torch.device("cpu"), head=head_of(model))
    model = model if changes.adapter is None else with_adapter(model, changes.adapter)
    if changes.float8:
        compute_in_float8(model, emulate=True)
    return model
