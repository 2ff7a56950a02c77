"""OLMo-core's Trainer for a run: train module, loader, optimizer, schedule, callbacks."""

import errno
from pathlib import Path
from signal import Signals

import torch
from olmo_core.optim import ConstantWithWarmup, CosWithWarmup, LinearWithWarmup
from olmo_core.optim.scheduler import Scheduler
from olmo_core.train import Duration, LoadStrategy, Trainer, TrainerConfig
from olmo_core.train.callbacks import Callback, ConsoleLoggerCallback
from torch import nn

from isopref.build import resolve
from isopref.build.hardware import compute_dtype, rounding_dtype
from isopref.build.held_out import HeldOut
from isopref.build.loggers import logger_callbacks
from isopref.build.run import Run
from isopref.data.table import ExampleTable
from isopref.engine.callbacks.checkpointer import KeepingCheckpointerCallback
from isopref.engine.callbacks.evaluation import EvaluateCallback
from isopref.engine.callbacks.guard import GuardCallback
from isopref.engine.callbacks.metrics_file import MetricsFileCallback
from isopref.engine.callbacks.profile import LEAD, ProfileCallback
from isopref.engine.callbacks.progress import ProgressCallback
from isopref.engine.callbacks.speed import PairSpeedCallback
from isopref.engine.callbacks.watch import WatchCallback
from isopref.engine.checkpoints import (
    UNFINISHED,
    last_saved,
    newest_intact,
    outlook,
    sweep,
)
from isopref.engine.guard import MOST_IN_A_ROW
from isopref.engine.loader import ExampleLoader
from isopref.engine.moving import MovingReference
from isopref.engine.oom_retry import OomRetry
from isopref.engine.optim import build_optimizer
from isopref.engine.restore import restore
from isopref.engine.train_module import DPOTrainModule
from isopref.errors import ConfigError, RunError, chain_of
from isopref.models.flops import UsefulFlops, peak_flops
from isopref.models.parallel import unwrap
from isopref.runs.files import CHECKPOINTS_FOLDER, METRICS_FILE, MICROBATCH_FILE, PROFILE_FOLDER
from isopref.score import TableLogps

FULL_LR = 1e-6  # suits full fine-tuning; an adapter barely moves at it
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)


def build_trainer(
    run: Run,
    model: nn.Module,
    table: ExampleTable,
    reference: TableLogps | MovingReference,
    held_out: HeldOut | None,
    resume: bool,
) -> Trainer:
    """A trainer ready to fit; with `resume`, restored from the last checkpoint in the run folder, if there is one.

    Raises RunError for a checkpoint of different data.
    """
    optim = run.config.optim
    if run.num_shares > optim.batch_size:
        ranks = "ranks" if run.num_shares == run.env.world_size else "groups of ranks"
        run.display.say(
            f"warning: {run.num_shares} {ranks} share {optim.batch_size} {table.unit}s per step; some will be idle"
        )
    if run.config.model.adapter is not None and 0 < optim.lr <= FULL_LR:
        run.display.say(
            f"note: optim.lr: {optim.lr:g} barely trains an adapter, which needs at least ten times the rate of "
            "full fine-tuning. Try: optim.lr=2e-5"
        )
    every, steps = resolve.all_steps(optim, len(table)), resolve.num_steps(optim, len(table))
    part = f" of {every} (optim.max_steps)" if steps < every else ""
    short = f"; optim.max_steps: {optim.max_steps} exceeds the total" if steps < (optim.max_steps or 0) else ""
    run.display.say(
        f"train {_counted(steps, 'step')}{part}: {_counted(len(table), table.unit)}, {optim.batch_size} per step, "
        f"{_counted(optim.epochs, 'epoch')}{short}"
    )
    _check_profile(run, steps)
    config = TrainerConfig(
        save_folder=str(run.folder / CHECKPOINTS_FOLDER),
        save_overwrite=True,
        max_duration=Duration.steps(steps),
        metrics_collect_interval=run.config.run.log_every,
        cancel_check_interval=steps + 1,  # never: ranks would notice at different steps (see checkpointer.py)
        load_strategy=LoadStrategy.never,  # done below, to refuse another run's checkpoint early
        device=str(run.env.device),
        callbacks=_callbacks(run, model, table, held_out),
    )
    module, loader = _train_module(run, model, reference, steps), _loader(run, model, table)
    module.oom_retry = _oom_retry(run, model, loader)
    trainer = config.build(module, loader)
    if resume:
        _resume(run, trainer)
    torch.cuda.empty_cache()  # left over from scoring: other libraries allocate outside torch's cache
    return trainer


def _resume(run: Run, trainer: Trainer) -> None:
    """Resume from the last intact checkpoint, if there is one."""
    checkpoint, damaged = newest_intact(Path(trainer.save_folder))
    for path, problem in damaged.items():
        run.display.say(f"resume: skipping {path}: {problem}")
    if checkpoint is not None:
        restore(trainer, checkpoint)
        _check_best(run, trainer)
    elif list(damaged.values()) not in ([], [UNFINISHED]):  # unfinished: the first checkpoint, cut short
        raise RunError(
            f"--resume: no intact checkpoint in {trainer.save_folder}. To start over, remove {run.folder} or set a "
            "different run.folder."
        )
    elif (last := last_saved(Path(trainer.save_folder))) is not None:
        raise RunError(
            f"--resume: {run.folder} had a checkpoint of step {last}, but {trainer.save_folder} has none now, so the "
            f"run would start from the first step. Put the checkpoints back; or, to start over, remove "
            f"{run.folder} or set a different run.folder."
        )
    run.env.barrier()  # before the first rank removes files that others may still read
    if run.env.is_first:
        sweep(Path(trainer.save_folder))
    none_yet = "from the first step: no checkpoint yet"
    run.display.say(f"resume {none_yet if checkpoint is None else f'after step {trainer.global_step}'}")


def _check_best(run: Run, trainer: Trainer) -> None:
    """Forget the best step if its checkpoint is not intact, e.g. if run.keep_best was not set before."""
    keeping = checkpointer(trainer)
    found = keeping.best()
    if found is not None and found[1] is not None:
        run.display.say(
            f"warning: run.keep_best: the lowest eval/loss so far is that of {found[0]}, but {found[1]}. The best "
            "checkpoint from here on will be kept."
        )
        assert keeping.evaluate is not None
        keeping.evaluate.forget_best()


def checkpointer(trainer: Trainer) -> KeepingCheckpointerCallback:
    found = trainer.callbacks["checkpointer"]
    assert isinstance(found, KeepingCheckpointerCallback)
    return found


def train_steps(run: Run, trainer: Trainer) -> Signals | None:
    """Train to the last step, or until a signal stops the run, with a checkpoint. Returns that signal, if any.

    Raises RunError if continuing is pointless or impossible.
    """
    try:
        trainer.fit()
    except Exception as error:
        if isinstance(error, RuntimeError) and "without overflow" in str(error):  # torch's, about an update
            what = f"the update overflows the weights' dtype ({error})"
            raise checkpointer(trainer).refusal(what) from error
        causes = (one for one in chain_of(error) if isinstance(one, OSError))
        cause = next((one for one in causes if _stops_writing(run.folder, one)), None)
        if cause is None:
            raise
        raise RunError(
            f"step {trainer.global_step}: {run.folder} cannot be written ({cause.strerror}). "
            f"{outlook(Path(trainer.save_folder))}"
        ) from error
    done = f"step {trainer.global_step} of {trainer.max_steps}"
    guard, stopped_by = trainer.callbacks["guard"], checkpointer(trainer).stopped_by
    assert isinstance(guard, GuardCallback)
    if guard.gave_up:
        checkpointer(trainer).check_weights()
        raise RunError(
            f"stopped after {done}: the gradients of {MOST_IN_A_ROW} steps in a row were not finite. The checkpoint "
            "has the weights from before them. Check the pairs named above, lower optim.lr, or use a wider model.dtype."
        )
    if stopped_by is None or trainer.global_step == trainer.max_steps:
        return None
    run.display.say(
        f"\nStopped by {stopped_by.name} after {done}; checkpoint saved. To resume, run the same command with --resume."
    )
    return stopped_by


def _stops_writing(folder: Path, error: OSError) -> bool:
    """Whether an error says that a disk is full or failing, or that the folder is read-only or gone."""
    name = error.filename
    return error.errno in DISK or (isinstance(name, str | Path) and Path(name).is_relative_to(folder))


def _train_module(run: Run, model: nn.Module, reference: TableLogps | MovingReference, steps: int) -> DPOTrainModule:
    optim, objective = run.config.optim, run.config.objective
    return DPOTrainModule(
        model,
        _optimizer(run, model),
        objective=run.loss,
        reference=reference,
        weighting=objective.weighting,
        scheduler=_scheduler(run, steps),
        max_grad_norm=optim.max_grad_norm,
        grad_sync=run.grad_sync,
        check_first_step=run.starts_at_reference,
        compute_dtype=rounding_dtype(run),
    )


def _oom_retry(run: Run, model: nn.Module, loader: ExampleLoader) -> OomRetry:
    layout = run.config.layout.model_dump(mode="json", exclude={"score_tokens"})
    asked = {**layout, "ranks": run.env.world_size}
    meets = run.loss.first_pass or run.grad_sync == "every" or run.config.layout.context_parallel > 1
    return OomRetry(model, loader, meets=meets, asked=asked, file=run.folder / MICROBATCH_FILE, say=run.display.say)


def _loader(run: Run, model: nn.Module, table: ExampleTable) -> ExampleLoader:
    width, layout = unwrap(model).model.config.get_text_config().hidden_size, run.config.layout
    return ExampleLoader(
        table,
        batch_size=run.config.optim.batch_size,
        budget=run.train_budget,
        weighting=run.config.objective.weighting,
        objective=run.loss,
        seed=run.config.optim.seed,
        work_dir=str(run.folder),
        dp_rank=run.env.rank // layout.ranks_together,
        dp_world_size=run.num_shares,
        attention_share=resolve.attention_share(width),
        pin_memory=run.env.device.type == "cuda",
    )


def _callbacks(run: Run, model: nn.Module, table: ExampleTable, held_out: HeldOut | None) -> dict[str, Callback]:
    settings = run.config.run
    callbacks: dict[str, Callback] = {
        "guard": GuardCallback(display=run.display, origin=table.origin),
        "watch": WatchCallback(display=run.display),
        "console": ConsoleLoggerCallback(),
        "speed": _speed(run, model),
        "progress": ProgressCallback(display=run.display, unit=table.unit),
    }
    if run.env.is_first:
        callbacks["metrics"] = MetricsFileCallback(path=run.folder / METRICS_FILE, display=run.display)
        if settings.profile is not None:
            folder = run.folder / PROFILE_FOLDER
            callbacks["profile"] = ProfileCallback(folder=folder, steps=settings.profile, display=run.display)
    callbacks |= logger_callbacks(run)
    evaluate = None
    if held_out is not None:
        evaluate = EvaluateCallback(
            every=settings.eval_every, evaluate=lambda step: held_out.of(held_out.logps_at(step, model)).as_metrics()
        )
        callbacks["evaluate"] = evaluate
    callbacks["checkpointer"] = KeepingCheckpointerCallback(
        save_interval=settings.save_every,
        max_checkpoints=settings.keep,
        minutes=settings.save_minutes,
        evaluate=evaluate if settings.keep_best else None,
    )
    return callbacks


def _check_profile(run: Run, steps: int) -> None:
    """Raise ConfigError if the run has fewer steps than run.profile traces."""
    wanted = run.config.run.profile
    if wanted is not None and steps < wanted + LEAD:
        way_out = f"Set it to {steps - LEAD} or less" if steps > LEAD else "Remove it"
        raise ConfigError(
            f"run.profile: {wanted} steps are traced after the first {LEAD}, but the run has "
            f"{_counted(steps, 'step')}. {way_out}, or train for longer."
        )


def _speed(run: Run, model: nn.Module) -> PairSpeedCallback:
    dtype = compute_dtype(run) or getattr(torch, run.config.model.dtype)
    rate = peak_flops(run.env.device, dtype)
    if rate is None:  # without a peak there is no MFU
        return PairSpeedCallback()
    return PairSpeedCallback(flops=UsefulFlops(unwrap(model)), peak_flops=rate * run.env.world_size)


def _optimizer(run: Run, model: nn.Module) -> torch.optim.Optimizer:
    optim = run.config.optim
    return build_optimizer(
        optim.kind,
        model,
        lr=optim.lr,
        betas=optim.betas,
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        seed=optim.seed,
        compute_dtype=getattr(torch, run.config.model.pass_dtype),
    )


def _scheduler(run: Run, steps: int) -> Scheduler | None:
    """Warm up to the peak, reached at the last warmup step (without warmup, the first step), then decay.

    The rate reaches 0 one step after the last, so every step trains.
    """
    optim = run.config.optim
    warmup = max(1, round(optim.warmup * steps))
    if optim.lr == 0:  # the engine's warmup rejects it, and it needs no schedule
        return None
    match optim.schedule:
        case "linear":
            return LinearWithWarmup(alpha_f=0.0, warmup=warmup, t_max=steps + 1)
        case "cosine":
            return CosWithWarmup(alpha_f=0.0, warmup=warmup, t_max=steps + 1)
        case "constant":
            return ConstantWithWarmup(warmup=warmup)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
