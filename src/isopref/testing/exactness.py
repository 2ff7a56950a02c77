"""The promise, measured: gradient, loss and metrics of one global batch under many layouts, against the oracle.

A `Cell` is one layout of one batch. `measure` runs it through DPOTrainModule as training does and returns how far it is
from the oracle. matrix.py says which cells there are.
"""

from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal, get_args

import numpy as np
import torch
import torch.distributed as dist
from olmo_core.nn.conversion.state_mapping import TemplatePlaceholder
from olmo_core.nn.hf.convert import get_converter_to_hf
from torch import Tensor, nn
from transformers import PreTrainedModel

from isopref.batch.packing import Budget, Group, RowKind, plan_step, tokens_alone
from isopref.batch.step import build_mismatched, build_step
from isopref.data.mismatched import Mismatched
from isopref.data.table import ExampleTable
from isopref.engine.padded import DataCollatorForSeq2SeqDPO
from isopref.engine.train_module import DPOTrainModule
from isopref.examples import Example, Lengths, PairTokens
from isopref.models.adapter import Kind, quantize_nf4
from isopref.models.conversion import from_hf
from isopref.models.head import head_of
from isopref.models.parallel import GradSync, Parallel, checkpoint_layers, data_group, parallelize, unwrap
from isopref.models.policy import Policy, full
from isopref.models.reward import RewardModel
from isopref.normalize import Weighting
from isopref.objectives.loss import Loss, pair_loss
from isopref.score import TableLogps
from isopref.testing import labels, oracle
from isopref.testing.equations import (
    ALL_CASES,
    LABEL_CASES,
    LIST_CASES,
    REWARD_CASES,
    Answer,
    answers,
    batch_loss,
    lists_loss,
    reward,
)
from isopref.testing.models import (
    labelled_trees,
    random_pairs,
    tiny_model,
    tiny_reward_model,
    tree_examples,
    with_adapter,
    with_context,
)
from isopref.types import PairLogps

REFERENCE_OF_LABELS = 4  # a model with which KTO's KL term is positive

Cut = Literal["pair", "tokens", "whole"]
Split = Literal["plan", "uneven", "idle"]
Context = Literal["none", "turns", "weights"]


@dataclass(frozen=True)
class Cell:
    """One layout of a global batch: of `num_pairs` pairs, or of examples with other numbers of answers."""

    architecture: str = "gpt2"
    native: bool = False  # computed by OLMo-core's modules
    dtype: str = "float64"
    rows: RowKind = "shared"
    cut: Cut = "tokens"
    ranks: int = 1
    tensor_parallel: int = 1
    parallel: Parallel = "single"
    weighting: Weighting = "token"
    grad_sync: GradSync = "last"
    checkpointing: bool = False
    own_weights: bool = False
    reverse: bool = False  # the batch's pairs in the opposite order
    split: Split = "plan"
    num_pairs: int = 8
    trees: bool = False  # examples of 1, 2, 3, 5 and 8 answers, in place of pairs; labelled for a loss of labels
    at_start: bool = False  # the policy is its own reference, so that what they differ by is rounding
    context: Context = "none"  # turns of answers that are not trained; or turns with any weights
    objective: str = "sigmoid"  # of equations.ALL_CASES
    nll_weight: float = 0.0
    ld_alpha: float = 1.0
    wpo: bool = False
    adapter: Kind | None = None
    balance_weight: float = 0.0
    quantize: bool = False  # the base in four bits
    offload: bool = False
    collated: bool = False  # the batch comes from a script's collator, which makes rows: padded

    def __str__(self) -> str:
        default = Cell()
        told = {name: value for name, value in vars(self).items() if value != getattr(default, name)}
        told.pop("ranks", None)
        return f"{self.ranks} rank(s) " + " ".join(f"{name}={value}" for name, value in told.items())


@dataclass(frozen=True)
class Found:
    """Distance of one cell from the oracle."""

    gradient_error: float
    loss_error: float
    metric_error: float
    metrics: dict[str, float] = field(default_factory=dict)


class StubTrainer:
    """As much of a Trainer as a train module needs for one step."""

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


@cache
def batch(num_pairs: int) -> tuple[list[PairTokens], list[float]]:
    """Pairs of very different lengths, up to 35 tokens a part, and weights of their own."""
    pairs = random_pairs(num_pairs, seed=3, longest=36)
    return pairs, np.random.default_rng(4).uniform(0.2, 3.0, num_pairs).tolist()


@cache
def tree_batch() -> tuple[list[Example], list[float]]:
    """Examples with any number of answers, and weights of their own."""
    examples = _with_gaps(tree_examples(seed=5))
    return examples, np.random.default_rng(4).uniform(0.2, 3.0, len(examples)).tolist()


def examples_of(cell: Cell) -> tuple[list[Example], list[float]]:
    """The batch of a cell."""
    if cell.trees:
        examples, own = tree_batch()
        examples = labelled_trees(examples) if cell.objective in LABEL_CASES else examples
    else:
        pairs, own = batch(cell.num_pairs)
        examples = [pair.example for pair in pairs]
        examples = examples if cell.objective in LABEL_CASES else _with_gaps(examples)
    if cell.context != "none":
        examples = with_context(examples, seed=6, fractions=cell.context == "weights")
    return examples, own


def _with_gaps(examples: list[Example]) -> list[Example]:
    """The same with gaps between the scores of compared answers, some below and some above 1."""
    rng = np.random.default_rng(6)
    return [one._replace(gaps=tuple(rng.uniform(0.2, 4.0, len(one.comparisons)).tolist())) for one in examples]


def expected(cell: Cell) -> tuple[float, dict[str, Tensor], dict[str, float], TableLogps]:
    """The oracle's loss, gradient and metrics; and the reference, which is another model of the same shape."""
    return _expected(
        *(cell.architecture, cell.dtype, cell.weighting, cell.own_weights, cell.num_pairs, cell.trees),
        *(cell.at_start, cell.context),
        *(cell.objective, cell.nll_weight, cell.ld_alpha, cell.wpo, cell.balance_weight, cell.adapter, cell.quantize),
    )


@cache
def _expected(
    architecture: str,
    dtype: str,
    weighting: Weighting,
    own_weights: bool,
    num_pairs: int,
    trees: bool,
    at_start: bool,
    context: Context,
    objective: str,
    nll_weight: float,
    ld_alpha: float,
    wpo: bool,
    balance_weight: float,
    adapter: Kind | None,
    quantize: bool,
) -> tuple[float, dict[str, Tensor], dict[str, float], TableLogps]:
    examples, own = examples_of(Cell(num_pairs=num_pairs, trees=trees, context=context, objective=objective))
    if objective in LABEL_CASES:
        return labels.expected(
            *_models(architecture, dtype, adapter, quantize, reference_seed=REFERENCE_OF_LABELS),
            examples,
            own if own_weights else [1.0] * len(own),
            case=objective,
            weighting=weighting,
            nll_weight=nll_weight,
            balance_weight=balance_weight,
        )
    is_reward = objective in REWARD_CASES
    model, whole, policy, ref, reference = _scored(
        *(architecture, dtype, num_pairs, trees, at_start, context, ld_alpha, adapter, quantize, is_reward)
    )
    pairs = oracle.comparisons(examples)
    told = [own[n] if own_weights else 1.0 for n, one in enumerate(examples) for _ in one.comparisons]
    count = [len(one.comparisons) for one in examples for _ in one.comparisons]
    shared = [weight / number if weighting == "example" else weight for weight, number in zip(told, count, strict=True)]
    gaps = [gap for one in examples for gap in one.gaps]
    nll = oracle.token_nll(whole, told)
    factors = oracle.wpo_weights(model, pairs) if wpo else None
    if objective in LIST_CASES:
        weights = oracle.list_weights(examples, weighting, own if own_weights else [1.0] * len(own))
        loss = lists_loss(objective, _ranked(model, examples, reference, is_reward), weights)
    else:
        sizes = oracle.weights(pairs, weighting, shared, gaps)
        loss = batch_loss(objective, policy, ref, sizes, factors)
    loss = loss + nll_weight * nll
    metrics = _metrics(policy, ref, objective)
    if not is_reward:
        metrics["train/nll"] = float(nll.detach())
    if at_start:  # every comparison is a tie that rounding decides
        del metrics["train/accuracy"]
    if balance_weight:
        balance = oracle.balance(model, examples)
        loss = loss + balance_weight * balance
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
    """The answers of each example with their scores, as the equations take them."""
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
    adapter: Kind | None,
    quantize: bool,
    is_reward: bool,
) -> tuple[nn.Module, PairLogps, PairLogps, PairLogps, TableLogps]:
    """A model, its log-probabilities of the comparisons with their graph, those as LD-DPO has them, the reference's.

    And what a table of the reference has: answers, and their heads.
    """
    examples, _ = examples_of(Cell(num_pairs=num_pairs, trees=trees, context=context))
    pairs = oracle.comparisons(examples)
    gap = torch.tensor([gap for one in examples for gap in one.gaps], dtype=torch.float64)
    if is_reward:
        judge = _adapt(tiny_reward_model(architecture, dtype=getattr(torch, dtype)), adapter, quantize)
        policy = replace(oracle.pair_rewards(judge, pairs), gap=gap)
        nothing = torch.zeros_like(policy.chosen.detach())
        none = TableLogps(torch.zeros(sum(len(one.answers) for one in examples)))
        return judge, policy, policy, replace(policy, chosen=nothing, rejected=nothing), none
    model, other = _models(architecture, dtype, adapter, quantize, reference_seed=0 if at_start else 1)
    with torch.no_grad():
        ref = oracle.pair_logps(other, pairs, ld_alpha)
        answers = [
            oracle.sequence_logp(other, one.prompt, answer, weights)
            for one in examples
            for answer, weights in zip(one.answers, oracle.token_weights(one), strict=True)
        ]
        heads = oracle.pair_logps(other, pairs, 0.0)  # what is beyond the shorter answer counts for nothing
    reference = TableLogps(torch.stack(answers), torch.stack([heads.chosen, heads.rejected]))
    whole = replace(oracle.pair_logps(model, pairs), gap=gap)
    policy = replace(oracle.pair_logps(model, pairs, ld_alpha), gap=gap) if ld_alpha != 1 else whole
    return model, whole, policy, ref, reference


def _models(
    architecture: str, dtype: str, adapter: Kind | None, quantize: bool, *, reference_seed: int = 1
) -> tuple[nn.Module, nn.Module]:
    """The policy and the reference."""
    model, other = (tiny_model(architecture, dtype=getattr(torch, dtype), seed=seed) for seed in (0, reference_seed))
    return _adapt(model, adapter, quantize), other


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


def measure(cell: Cell) -> Found:
    """Run a cell on this rank (all ranks of the cell call this together)."""
    loss, gradient, metrics, reference = expected(cell)
    module, trainer = build_module(cell, reference)
    rank = dist.get_rank(data_group(module.model)) if cell.ranks > 1 else 0
    module.train_batch(_collated(cell, module, rank) if cell.collated else _planned(cell, rank))
    found = full_gradient(module.model)
    # The oracle has a zero where a parameter takes no part, as all of a vision tower; that may be frozen.
    gradient = {name: one for name, one in gradient.items() if name in found or one.any()}
    worst = max(abs(trainer.metrics[name] - value) / max(1.0, abs(value)) for name, value in metrics.items())
    return Found(
        gradient_error=oracle.relative_error(found, gradient),
        loss_error=abs(trainer.metrics["train/loss"] - loss) / abs(loss),
        metric_error=worst,
        metrics=trainer.metrics,
    )


def _planned(cell: Cell, rank: int) -> dict[str, Any]:
    """A rank's share of the batch as ExampleLoader makes it."""
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
    """A rank's share of the batch as a script's collator makes it. The train module cuts it."""
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
    """A train module on the cell's model, spread as the cell says."""
    is_reward = cell.objective in REWARD_CASES
    tiny = tiny_reward_model if is_reward else tiny_model
    hf_model = _adapt(tiny(cell.architecture, dtype=getattr(torch, cell.dtype), seed=seed), cell.adapter, cell.quantize)
    policy = RewardModel(hf_model) if is_reward else Policy(from_hf(hf_model) if cell.native else hf_model)
    if cell.checkpointing:
        checkpoint_layers(policy, 1)  # one layer recomputes, the other does not
    shard = 2 if cell.parallel == "hsdp" else None
    model = parallelize(
        policy,
        cell.parallel,
        device=torch.device("cpu"),
        world_size=cell.ranks,
        hsdp_shard=shard,
        offload=cell.offload,
        tensor_parallel=cell.tensor_parallel,
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


def _adapt(model: PreTrainedModel, adapter: Kind | None, quantize: bool) -> PreTrainedModel:
    if quantize:
        quantize_nf4(model, torch.device("cpu"), head=head_of(model))
    return model if adapter is None else with_adapter(model, adapter)


def plan(cell: Cell, lengths: Lengths) -> list[list[Group]]:
    """The cell's cut: by the planner, or forced to be unfair to some ranks."""
    budgets = {
        "pair": Budget(cell.rows, 4096, 1),
        "tokens": Budget(cell.rows, 300 if cell.trees else 180),
        "whole": Budget(cell.rows, 4096),
    }
    if cell.split == "plan":
        return plan_step(lengths, budgets[cell.cut], num_ranks=cell.ranks // cell.tensor_parallel)
    everyone = list(range(len(lengths)))
    if cell.split == "idle":  # the last rank has nothing at all
        busy = cell.ranks - 1
        return [*([everyone[rank::busy]] for rank in range(busy)), [[]]]
    first = [everyone[:1], everyone[1:3]]  # three pairs on the first rank, the others spread over the rest
    rest = [[everyone[3 + rank :: cell.ranks - 1], []] for rank in range(cell.ranks - 1)]
    return [first, *rest]


def full_gradient(model: nn.Module) -> dict[str, Tensor]:
    """The whole gradient by the Hugging Face model's names, gathered where it is sharded. What is frozen has none."""
    found = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            assert parameter.grad is None, name
            continue
        assert parameter.grad is not None, name
        found[name.removeprefix("module.").removeprefix("model.")] = full(parameter.grad).detach()
    return hf_names(model, found)


def hf_names(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by the Hugging Face model's names. Of OLMo-core's conversion, only the renaming is for gradients."""
    native = unwrap(model).native
    if native is None:
        return tensors
    named = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    layers = {TemplatePlaceholder.LAYER: native.config.num_hidden_layers}
    converted: dict[str, Tensor] = get_converter_to_hf(native.config.model_type).convert(named, layers)
    return converted


KINDS: tuple[RowKind, ...] = get_args(RowKind)
