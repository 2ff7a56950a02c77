"""DPOTrainModule: preference optimisation as an OLMo-core TrainModule.

`train_batch` neither splits nor divides: microbatches are planned in advance, and each pair carries its coefficient in
the global batch. It accumulates gradients and leaves the optimizer step to the Trainer.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as checkpoint_state
from olmo_core.optim.scheduler import Scheduler
from olmo_core.train.train_module import EvalBatchSpec, TrainModule
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_
from torch.optim import Optimizer

from isopref.batch.step import MismatchedWork, Step, Work
from isopref.batch.terms import TERMS
from isopref.engine.arguments import check_choice
from isopref.engine.callbacks.guard import GuardCallback
from isopref.engine.first_pass import FirstPass
from isopref.engine.first_step import TOLERANCE, check_first_step
from isopref.engine.guard import Guard, poisoned
from isopref.engine.loader import ExampleLoader
from isopref.engine.metrics import SUMS, MetricWindow, is_logged, microbatch_sums, over_ranks
from isopref.engine.moving import MovingReference
from isopref.engine.oom_retry import Before, OomRetry
from isopref.engine.optim import SkippingAdamW
from isopref.engine.padded import padded_to_step
from isopref.engine.references import NoReference, Reference, Scored, StoredReference
from isopref.engine.refusals import WHERE, check_arguments, check_loader, check_model
from isopref.errors import ConfigError, RunError
from isopref.models.parallel import GradSync, data_group, device_of, gradient_sync, reshard, unwrap
from isopref.models.policy import full
from isopref.normalize import Weighting, share_of_loss
from isopref.objectives.loss import Loss
from isopref.ranks import num_ranks
from isopref.score import TableLogps, score
from isopref.types import Logps, Needs


class DPOTrainModule(TrainModule):
    """Trains a policy on pairs under OLMo-core's Trainer.

    :param model: a `Policy`, or what `parallelize` returned for one.
    :param objective: one loss per pair, from `isopref.pair_loss`.
    :param rank_microbatch_size: maximum microbatch size on one rank, in tokens including padding. Required for padded
        batches; an ExampleLoader has its own budget.
    :param weighting: the weight of a pair in the loss: "token", "completion" or "example", as in the loader.
    :param reference: the reference's log-probabilities of all answers, looked up by a batch's `index`, or a moving
        reference (moving.py). None for a reference-free objective.
    :param grad_sync: reduce gradients after the "last" microbatch of a step or after "every" one.
    :param check_first_step: stop if policy and reference differ before the first update (if there is a reference).
    :param compute_dtype: dtype of the forward and backward pass, if it differs from the weights' dtype.

    Raises ConfigError for arguments that cannot work.
    """

    def __init__(
        self,
        model: nn.Module,
        optim: Optimizer,
        *,
        objective: Loss,
        rank_microbatch_size: int | None = None,
        reference: TableLogps | MovingReference | None = None,
        weighting: Weighting = "token",
        scheduler: Scheduler | None = None,
        max_grad_norm: float | None = None,
        grad_sync: GradSync = "last",
        check_first_step: bool = True,
        compute_dtype: torch.dtype | None = None,
    ):
        super().__init__()  # type: ignore[no-untyped-call]
        check_arguments(
            model=model,
            optim=optim,
            objective=objective,
            rank_microbatch_size=rank_microbatch_size,
            reference=reference,
            weighting=weighting,
            scheduler=scheduler,
            max_grad_norm=max_grad_norm,
            grad_sync=grad_sync,
        )
        self.model = model
        self.optim = optim
        for group in optim.param_groups:  # now, since loading a checkpoint restores the rate it was saved with
            group.setdefault("initial_lr", float(group["lr"]))
        self.objective = objective
        self.terms = TERMS[objective.kind]
        self.rank_microbatch_size = rank_microbatch_size
        self.weighting: Weighting = weighting
        self.scheduler = scheduler
        self.max_grad_norm = max_grad_norm
        self.grad_sync: GradSync = grad_sync
        self.check_first_step = check_first_step and objective.needs_reference
        self.compute_dtype = compute_dtype or next(model.parameters()).dtype
        check_choice(WHERE, "compute_dtype", self.compute_dtype, tuple(TOLERANCE))
        self.device = device_of(model)
        self.group = data_group(model)
        self.num_ranks = num_ranks(self.group)
        check_model(model, optim, objective, self.num_ranks)
        self.moving = reference if isinstance(reference, MovingReference) else None
        if self.moving is not None:
            self.moving.check(model)
        self.reference = self._reference(reference)
        self.num_references = len(reference.answers) if isinstance(reference, TableLogps) else None
        self.first_pass = FirstPass(objective, self.device, self.group) if objective.first_pass else None
        self._window = MetricWindow(self.device, self.group)
        self.guard = Guard(self.device)
        self._sums = self._window.sums  # of the last step, on this rank
        self.oom_retry: OomRetry | None = None  # retries a step with smaller microbatches after running out of memory

    def on_attach(self) -> None:
        """Refuse a loader with different settings, and make sure that skipped steps are reported."""
        loader = self.trainer.data_loader
        origin: dict[str, Any] = {}
        if isinstance(loader, ExampleLoader):
            settings = self.weighting, self.rank_microbatch_size, self.num_references, self.num_ranks
            check_loader(loader, self.objective, *settings)
            origin = {"origin": loader.table.origin}
        if not self.trainer.has_callback(GuardCallback):
            self.trainer.add_callback("isopref_guard", GuardCallback(**origin))

    def _reference(self, given: TableLogps | MovingReference | None) -> Reference:
        if isinstance(given, MovingReference) and not self.objective.needs_reference:
            raise ConfigError("a moving reference has no effect, because the objective is reference-free. Remove it.")
        if not self.objective.needs_reference:
            return NoReference()
        if given is None:
            raise ConfigError(
                "the objective needs a reference, but `reference` is None. Pass what score_table returns for the "
                "reference model, or use a reference-free objective, such as pair_loss('simpo')."
            )
        if isinstance(given, MovingReference):
            return given
        if self.objective.needs.heads and given.heads is None:
            raise ConfigError(
                "ld_alpha needs the reference's log-probabilities of the first tokens of every answer too. Pass what "
                "score_table(..., needs=Needs(heads=True)) returns."
            )
        if self.objective.needs_mismatched and given.mismatched is None:
            raise ConfigError(
                "kto needs the reference's log-probabilities of mismatched pairs too. Pass what "
                "score_table(..., mismatched=True) returns."
            )
        return StoredReference(given, self.device)

    @property
    def dp_process_group(self) -> dist.ProcessGroup | None:
        return self.group

    @property
    def eval_batch_spec(self) -> EvalBatchSpec:
        if self.rank_microbatch_size is None:
            raise ConfigError(f"{WHERE}: OLMo-core's evaluators need a batch size. Pass rank_microbatch_size (tokens).")
        return EvalBatchSpec(rank_batch_size=self.rank_microbatch_size)

    def train_batch(self, batch: dict[str, Any], dry_run: bool = False) -> None:
        """Accumulate the gradient of a global batch: {"step": Step}, or a padded batch (see padded.py)."""
        self.model.train()
        step = self._step(batch)
        if self.oom_retry is None:
            sums = self._accumulate(step)
        else:
            step, sums = self.oom_retry.run(step, self._accumulate, self.zero_grads)
        if dry_run:
            self.zero_grads()
            return
        if self.first_pass is not None:
            self.first_pass.keep()
        self._window.add(sums, step.has_sides)
        self._sums = sums
        if self.check_first_step and self.trainer.global_step == 1:
            check_first_step(self._means(sums), self.compute_dtype)
        if self.logs_now():
            self._record(step)

    def _accumulate(self, step: Step, before: Before = lambda _: None) -> Tensor:
        """Forward and backward of all microbatches. Returns what the step adds to the metrics."""
        if self.first_pass is not None:
            step = self.first_pass.prepare(step, self._score, self._mismatched_gain)
            reshard(self.model)
        sums = torch.zeros_like(self._window.sums)
        for n, work in enumerate(step.work):
            before(n)
            with self._train_microbatch_context(n, len(step.work)):
                sums += self._train_microbatch(work.to(self.device))
        return sums

    def _step(self, batch: dict[str, Any]) -> Step:
        if "step" in batch:
            step: Step = batch["step"]
            return step
        if self.group is not None:  # see docs/decisions.md
            raise ConfigError(
                "tensor and context parallelism need packed rows, but the batch is padded. Use isopref.ExampleLoader."
            )
        if self.objective.kind == "labels":
            raise ConfigError(
                f"{WHERE}: a loss of labels needs all labels of a global batch, but a padded batch holds only one "
                "rank's pairs. Use isopref.ExampleLoader."
            )
        if self.objective.needs.gaps or self.weighting == "gap":
            raise ConfigError(
                f"{WHERE}: the objective or the weighting needs the gap between the scores of two answers, but a "
                "padded batch has none. Use isopref.ExampleLoader."
            )
        if self.rank_microbatch_size is None:
            raise ConfigError(f"{WHERE}: padded batches need a microbatch size. Pass rank_microbatch_size (tokens).")
        return padded_to_step(
            batch,
            self.rank_microbatch_size,
            self.weighting,
            device=self.device,
            num_references=None if self.num_references is None else self.num_references // 2,
            loss_kind=self.objective.kind,
        )

    @contextmanager
    def _train_microbatch_context(self, number: int, count: int) -> Iterator[None]:
        with gradient_sync(self.model, self.grad_sync, last=number == count - 1):
            yield

    def _train_microbatch(self, work: Work) -> Tensor:
        """Forward and backward. Returns what the microbatch adds to the metrics."""
        scored = self._score(work)
        if work.linear is None:
            loss = self.objective(scored.policy, scored.ref, anchors=work.anchors)
            share = share_of_loss(loss, work.loss_share, num_ranks=self.num_ranks)
        else:
            loss = work.linear.loss
            share = share_of_loss(self.terms.logps(scored.policy), work.linear.slope, num_ranks=self.num_ranks)
        if self.objective.nll_weight:
            nll = share_of_loss(-scored.policy_readout.logp, work.nll_share, num_ranks=self.num_ranks)
            share = share + self.objective.nll_weight * nll
        routing = scored.policy_readout.routing
        if routing is not None and work.balance_share is not None:
            balance = share_of_loss(routing[1], work.balance_share, num_ranks=self.num_ranks)
            share = share + self.objective.balance_weight * balance
        poisoned(share, loss).backward()
        with torch.no_grad():
            is_alone = work.anchors is None and work.linear is None
            self.guard.look(work.example, loss if is_alone else self._suspect(scored))
            return microbatch_sums(scored, loss, objective=self.objective, work=work)

    def _suspect(self, scored: Scored) -> Tensor:
        """Values that identify the non-finite term if one bad term can spoil the whole batch: T."""
        logps_KT = torch.cat([self.terms.logps(scored.policy), self.terms.logps(scored.ref)])
        return logps_KT.abs().sum(dim=0)

    def _score(self, work: Work) -> Scored:
        """The policy's scores of a microbatch, and the reference's."""
        policy = score(self.model, work.microbatch, self.objective.needs)
        ref = self.reference.logps(work, policy)
        view = self.objective.view
        return Scored(view(policy, work.microbatch), view(ref, work.microbatch), policy, ref)

    def _mismatched_gain(self, work: MismatchedWork) -> Tensor:
        """log(policy / reference) of prompts paired with other examples' answers: E."""
        policy = score(self.model, work.microbatch)
        gain = policy.logp - self.reference.mismatched(work, policy)
        self.guard.look(work.index, gain)
        return gain

    def logs_now(self) -> bool:
        """Whether this step's metrics are logged."""
        step = self.trainer.global_step
        return step % self.trainer.metrics_collect_interval == 0 or step in (1, self.trainer.max_steps)

    def _means(self, sums: Tensor) -> dict[str, float]:
        """The metrics of one step, over all ranks. Waits for the device."""
        window = MetricWindow(self.device, self.group)
        window.add(sums)
        return {name: float(value) for name, value in window.reduce().items()}

    def _record(self, step: Step) -> None:
        for name, mean in self._window.reduce().items():
            if is_logged(name, self.objective):
                self.record_metric(f"train/{name}", mean)
        self.record_metric("train/token_count", step.num_tokens)
        count = "answer_count" if self.objective.kind == "labels" else "pair_count"
        self.record_metric(f"train/{count}", step.num_terms)
        self.record_metric("train/padding_fraction", step.padding_fraction)

    def eval_batch(self, batch: dict[str, Any], labels: Any | None = None) -> list[Logps]:
        """Log-probabilities of a batch, by microbatch, without gradients, in the form the objective takes."""
        self.model.eval()
        needs = Needs(heads=self.objective.needs.heads)
        with torch.no_grad():
            microbatches = [work.to(self.device).microbatch for work in self._step(batch).work]
            scored = [self.objective.view(score(self.model, one, needs), one) for one in microbatches]
        reshard(self.model)
        return scored

    def is_finite(self, step: Step) -> bool:
        """Whether the gradient of a batch is finite; the gradient is discarded. All ranks call this together."""
        self._accumulate(step)
        norm = _total_norm([p.grad for p in self._with_gradient() if p.grad is not None])
        self.zero_grads()
        return bool(torch.isfinite(norm))

    def optim_step(self) -> None:
        """Clip, set the learning rate, and step; a non-finite gradient leaves the weights unchanged."""
        parameters = self._with_gradient()
        if not parameters:
            raise RunError(
                f"step {self.trainer.global_step}: no parameter of the optimizer has a gradient, so the step would "
                "train nothing. In a script, create the optimizer from the module that parallelize returns, and make "
                "sure that every batch has pairs on at least one rank."
            )
        norm = _total_norm([p.grad for p in parameters if p.grad is not None])
        if self.max_grad_norm is not None:
            clip_grads_with_norm_(parameters, self.max_grad_norm, norm)
        if self.scheduler is not None:
            for group in self.optim.param_groups:
                self.scheduler.set_lr(group, self.trainer)
        if self.logs_now():
            self.record_metric("optim/grad_norm", norm)
            self.record_metric("optim/lr", float(self.optim.param_groups[0]["lr"]))
        if isinstance(self.optim, SkippingAdamW):
            self.optim.observe(over_ranks(self._sums, self.group)[SUMS.index("loss")], norm)
        self.guard.step(self.optim, norm, number=self.trainer.global_step)
        if isinstance(self.optim, SkippingAdamW) and self.logs_now():
            self.record_metric("optim/skipped", self.optim.step_skipped)
        if self.moving is not None:
            self.moving.follow(self.model, step=self.trainer.global_step)

    def _with_gradient(self) -> list[nn.Parameter]:
        trained = (parameter for group in self.optim.param_groups for parameter in group["params"])
        return [parameter for parameter in trained if parameter.grad is not None]

    def zero_grads(self) -> None:
        self.optim.zero_grad(set_to_none=True)

    def state_dict(self, *, optim: bool | None = None) -> dict[str, Any]:
        """The trained weights: frozen ones are not part of a checkpoint."""
        options = checkpoint_state.StateDictOptions(cpu_offload=True, ignore_frozen_params=True)
        found = checkpoint_state.get_model_state_dict(self.model, options=options)
        frozen = self._names(trained=False)  # torch left them out, but only under one of the names of a tied weight
        state: dict[str, Any] = {
            "model": {name: value for name, value in found.items() if name not in frozen},
            "metrics": self._window.state_dict(),
        }
        if self.first_pass is not None:
            state["coupling"] = self.first_pass.state_dict()  # the name used in every checkpoint
        if self.moving is not None:
            state["reference"] = self.moving.state_dict()
        if optim is not False:
            state["optim"] = self._optim_state(options)
            if isinstance(self.optim, SkippingAdamW):
                state["skip_history"] = self.optim.history()
        return state

    def _optim_state(self, options: checkpoint_state.StateDictOptions) -> dict[str, Any]:
        """The optimizer's state. Before the first step torch creates it with a step on zeros, which must not count."""
        if not self.optim.state:
            checkpoint_state.get_optimizer_state_dict(self.model, self.optim, options=options)
            for one in self.optim.state.values():
                one["step"].zero_()
        return checkpoint_state.get_optimizer_state_dict(self.model, self.optim, options=options)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if missing := self._names(trained=True) - state_dict["model"].keys():
            fix = "Resume with the model section that it was written with, or start a new run in another folder."
            raise RunError(f"the checkpoint lacks {len(missing)} trained weights, such as {min(missing)}. {fix}")
        options = checkpoint_state.StateDictOptions(strict=not self._names(trained=False))
        checkpoint_state.set_model_state_dict(self.model, state_dict["model"], options=options)
        self._window.load_state_dict(state_dict["metrics"])
        if self.first_pass is not None:
            self.first_pass.load_state_dict(state_dict["coupling"])
        if self.moving is not None:
            self.moving.load_state_dict(state_dict["reference"])
        if "optim" in state_dict:
            checkpoint_state.set_optimizer_state_dict(self.model, self.optim, state_dict["optim"], options=options)
            if isinstance(self.optim, SkippingAdamW):
                self.optim.restore(state_dict["skip_history"])

    def _names(self, *, trained: bool) -> set[str]:
        named = unwrap(self.model).named_parameters(remove_duplicate=False)
        return {name for name, parameter in named if parameter.requires_grad is trained}

    def num_flops_per_token(self, seq_len: int) -> int | None:  # type: ignore[override]  # the base caches an abstract method
        return None

    def global_num_flops_in_batch(self, batch: dict[str, Any]) -> int | None:
        return None


def _total_norm(grads: list[Tensor]) -> Tensor:
    """The gradient norm, summed in float32 or wider: in bfloat16 it would depend on the order of summation."""
    wide = torch.promote_types(grads[0].dtype, torch.float32)
    norms = torch.stack([torch.linalg.vector_norm(grad, dtype=wide) for grad in grads])
    norm: Tensor = torch.linalg.vector_norm(norms)
    return full(norm)
