"""OLMo-core's Trainer for a run: train module, loader, optimizer, schedule, callbacks."""

import torch
from olmo_core.optim import ConstantWithWarmup, CosWithWarmup, LinearWithWarmup
from olmo_core.optim.scheduler import Scheduler
from olmo_core.train import Duration, LoadStrategy, Trainer, TrainerConfig
from olmo_core.train.callbacks import Callback, ConsoleLoggerCallback
from torch import nn

from isopref.build.evaluation import HeldOut
from isopref.build.model import compute_dtype
from isopref.build.run import Run
from isopref.data.schedule import num_batches
from isopref.data.table import PairTable
from isopref.engine.callbacks import (
    EvaluateCallback,
    KeepingCheckpointerCallback,
    MetricsFileCallback,
    PairSpeedCallback,
    ProgressCallback,
)
from isopref.engine.loader import PairLoader
from isopref.engine.moving import MovingReference
from isopref.engine.train_module import DPOTrainModule
from isopref.errors import RunError
from isopref.models.flops import UsefulFlops, peak_flops
from isopref.models.parallel import unwrap
from isopref.score import TableLogps


def build_trainer(
    run: Run,
    model: nn.Module,
    table: PairTable,
    reference: TableLogps | MovingReference,
    held_out: HeldOut | None,
    resume: bool,
) -> Trainer:
    """A trainer that is ready to fit; with `resume`, from the last checkpoint in the run's folder, if there is one.

    Raises RunError for a checkpoint of other data.
    """
    optim = run.config.optim
    if run.env.world_size > optim.batch_pairs:
        run.display.say(f"warning: {run.env.world_size} ranks share {optim.batch_pairs} pairs a step; some stay idle")
    every = optim.epochs * num_batches(len(table), optim.batch_pairs)
    steps = min(every, optim.max_steps or every)
    short = f"; optim.max_steps {optim.max_steps} is more than there are" if steps < (optim.max_steps or 0) else ""
    run.display.say(
        f"train {steps} steps: {len(table)} pairs, {optim.batch_pairs} a step, {optim.epochs} "
        f"{'epoch' if optim.epochs == 1 else 'epochs'}{short}"
    )
    config = TrainerConfig(
        save_folder=str(run.folder / "checkpoints"),
        save_overwrite=True,
        max_duration=Duration.steps(steps),
        metrics_collect_interval=run.config.run.log_every,
        cancel_check_interval=1,  # a signal ends the run after the step it meets
        load_strategy=LoadStrategy.never,  # done below, so that a checkpoint of another run is refused early
        device=str(run.env.device),
        callbacks=_callbacks(run, model, held_out),
    )
    trainer = config.build(_train_module(run, model, reference, steps), _loader(run, model, table))
    if resume:
        found = trainer.maybe_load_checkpoint(trainer.save_folder, load_trainer_state=True, load_optim_state=True)
        place = f"after step {trainer.global_step}" if found else "from the first step: there is no checkpoint yet"
        run.display.say(f"resume {place}")
    return trainer


def fit(trainer: Trainer) -> None:
    """Train to the last step. Raises RunError if a signal ended it before, with a checkpoint of where it was."""
    trainer.fit()
    if trainer.max_steps is not None and trainer.global_step < trainer.max_steps:
        raise RunError(
            f"stopped by a signal after step {trainer.global_step} of {trainer.max_steps}. A checkpoint is saved; go "
            "on with --resume."
        )


def _train_module(run: Run, model: nn.Module, reference: TableLogps | MovingReference, steps: int) -> DPOTrainModule:
    optim, objective = run.config.optim, run.config.objective
    return DPOTrainModule(
        model,
        _optimizer(run, model),
        objective=run.loss,
        rank_microbatch_size=run.train_budget.tokens,
        reference=reference,
        weighting=objective.weighting,
        scheduler=_scheduler(run, steps),
        max_grad_norm=optim.max_grad_norm,
        grad_sync=run.grad_sync,
        check_first_step=run.starts_at_reference,
        compute_dtype=compute_dtype(run),
    )


def _loader(run: Run, model: nn.Module, table: PairTable) -> PairLoader:
    width = unwrap(model).model.config.get_text_config().hidden_size
    return PairLoader(
        table,
        batch_pairs=run.config.optim.batch_pairs,
        budget=run.train_budget,
        weighting=run.config.objective.weighting,
        seed=run.config.optim.seed,
        work_dir=str(run.folder),
        dp_rank=run.env.rank,
        dp_world_size=run.env.world_size,
        # Attending to one token takes 4 D flops of a layer, passing one through its linear maps about 24 D^2.
        attention_share=1 / (6 * width),
        pin_memory=run.env.device.type == "cuda",
    )


def _callbacks(run: Run, model: nn.Module, held_out: HeldOut | None) -> dict[str, Callback]:
    settings = run.config.run
    callbacks: dict[str, Callback] = {
        # Saving before the first step would have Adam take a step of its own; saving asynchronously can deadlock.
        "checkpointer": KeepingCheckpointerCallback(
            save_interval=settings.save_every,
            max_checkpoints=settings.keep,
            pre_train_checkpoint=False,
            save_async=False,
        ),
        "console": ConsoleLoggerCallback(),
        "speed": _speed(run, model),
        "progress": ProgressCallback(display=run.display),
    }
    if run.env.is_first:
        callbacks["metrics"] = MetricsFileCallback(path=run.folder / "metrics.jsonl")
    if held_out is not None:
        callbacks["evaluate"] = EvaluateCallback(
            every=settings.eval_every, evaluate=lambda step: held_out.at_step(step, model).as_metrics()
        )
    return callbacks


def _speed(run: Run, model: nn.Module) -> PairSpeedCallback:
    dtype = compute_dtype(run) or getattr(torch, run.config.model.dtype)
    rate = peak_flops(run.env.device, dtype) * run.env.world_size
    return PairSpeedCallback(flops=UsefulFlops(unwrap(model)), peak_flops=rate)


def _optimizer(run: Run, model: nn.Module) -> torch.optim.Optimizer:
    """AdamW; norms and biases are not decayed."""
    optim = run.config.optim
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": params, "weight_decay": decay}
        for params, decay in (
            ([p for p in trained if p.ndim >= 2], optim.weight_decay),
            ([p for p in trained if p.ndim < 2], 0.0),
        )
        if params
    ]
    fused = run.env.device.type == "cuda"
    return torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=fused)


def _scheduler(run: Run, steps: int) -> Scheduler | None:
    """Up to the peak during warm-up, which its last step reaches (the first step where there is none), then down.

    The end, a rate of 0, is one past the last step, so that every step trains.
    """
    optim = run.config.optim
    warmup = max(1, round(optim.warmup * steps))
    if optim.lr == 0:  # the engine's warm-up refuses it, and it needs no schedule
        return None
    match optim.schedule:
        case "linear":
            return LinearWithWarmup(alpha_f=0.0, warmup=warmup, t_max=steps + 1)
        case "cosine":
            return CosWithWarmup(alpha_f=0.0, warmup=warmup, t_max=steps + 1)
        case "constant":
            return ConstantWithWarmup(warmup=warmup)
