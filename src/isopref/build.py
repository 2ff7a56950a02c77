"""From a config to a run: the only place that knows both. Everything below takes plain arguments.

`train` is the whole story: data, policy, reference, trainer, result.
"""

import json
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from olmo_core.optim import ConstantWithWarmup, CosWithWarmup, LinearWithWarmup
from olmo_core.optim.scheduler import Scheduler
from olmo_core.train import Duration, LoadStrategy, Trainer, TrainerConfig
from olmo_core.train.callbacks import Callback, CheckpointerCallback, ConsoleLoggerCallback
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from isopref.config.load import dump_config
from isopref.config.schema import Config, run_id
from isopref.data.chat import TokenizeOptions
from isopref.data.packing import Budget, check_budget
from isopref.data.pairs import build_table
from isopref.data.schedule import num_batches
from isopref.data.sources import SourceSpec
from isopref.data.table import PairTable
from isopref.engine.callbacks import (
    EvaluateCallback,
    MetricsFileCallback,
    PairSpeedCallback,
    ProgressCallback,
)
from isopref.engine.display import Display
from isopref.engine.environment import Environment, environment
from isopref.engine.loader import PairLoader
from isopref.engine.train_module import DPOTrainModule
from isopref.errors import RunError
from isopref.evaluate import Evaluation, evaluate
from isopref.losses import PairLoss, pair_loss
from isopref.models import hf
from isopref.models.generate import answers
from isopref.models.parallel import GradSync, Parallel, parallelize, unwrap
from isopref.models.policy import Policy
from isopref.models.probe import check_layout
from isopref.score import TableLogps, score_table

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """A run's config with the things all its parts need."""

    config: Config
    folder: Path
    env: Environment
    display: Display

    @property
    def train_budget(self) -> Budget:
        layout = self.config.layout
        return Budget(layout.rows, layout.microbatch_tokens, layout.microbatch_pairs)

    @property
    def score_budget(self) -> Budget:
        layout = self.config.layout
        return Budget(layout.rows, layout.score_tokens or 2 * layout.microbatch_tokens)

    @property
    def loss(self) -> PairLoss:
        objective = self.config.objective
        return pair_loss(objective.loss, beta=objective.beta, label_smoothing=objective.label_smoothing)


def train(config: Config, *, name: str, resume: bool = False) -> None:
    """Run a config from beginning to end. `name` is the config file's, for the default folder."""
    started = time.perf_counter()
    mixed = config.model.compute_dtype not in (None, config.model.dtype)
    group = mixed or config.layout.parallel in ("fsdp", "hsdp")
    with environment(device=config.run.device, seed=config.optim.seed, process_group=group) as env:
        folder = Path(config.run.folder or f"runs/{name}-{run_id(config)}")
        run = Run(config, folder, env, Display(quiet=not env.is_first))
        _open_folder(run, resume)
        _train(run, resume)
        run.display.say(f"\nDone in {_duration(time.perf_counter() - started)}.")
        _say_next(run)


def _train(run: Run, resume: bool) -> None:
    config = run.config
    tokenizer = hf.load_tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
    train_table = _table(run, tokenizer, config.data.train)
    eval_table = None if config.data.eval is None else _table(run, tokenizer, config.data.eval)
    check_budget(train_table.lengths, run.train_budget)
    policy = _policy(run)
    prompts = _sample_prompts(run, eval_table)
    with policy.plain() as plain:
        before = answers(plain, tokenizer, prompts, max_new_tokens=config.run.sample_tokens) if prompts else []
    model = _spread(run, policy)

    # The reference is scored before a checkpoint can be restored: it is the model as it was given, always.
    reference = _score(run, model, train_table, "reference")
    held_out = None if eval_table is None else HeldOut(run, eval_table, _score(run, model, eval_table, "held-out"))
    trainer = _trainer(run, model, train_table, reference, held_out, resume)
    trainer.fit()

    if held_out is not None:
        _say_effect(run, held_out.at_start, held_out.now(model))
    if config.run.export:
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if run.env.is_first:
            _export(run, policy, state, tokenizer)
            _say_answers(run, tokenizer, prompts, before)
        run.env.barrier()


def _open_folder(run: Run, resume: bool) -> None:
    """Make the run's folder, or refuse one that holds another run."""
    has_run = (run.folder / "config.yaml").exists()
    run.env.barrier()
    if has_run and not resume:
        raise RunError(
            f"{run.folder} holds a run already. Go on with it: --resume. Or start another: set run.folder, or remove it."
        )
    if resume and not has_run:
        raise RunError(f"--resume: {run.folder} holds no run. Start it without --resume, or check run.folder.")
    if run.env.is_first:
        try:
            run.folder.mkdir(parents=True, exist_ok=True)
            (run.folder / "config.yaml").write_text(dump_config(run.config), encoding="utf-8")
        except OSError as error:
            raise RunError(f"run.folder: cannot write to {run.folder} ({error}). Choose another.") from error
        handler = logging.FileHandler(run.folder / "engine.log")
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logging.getLogger().addHandler(handler)
        logging.getLogger("olmo_core").setLevel(logging.INFO)
        logging.captureWarnings(True)
    transformers_logging.disable_progress_bar()
    run.env.barrier()
    run.display.say(f"run {run.folder} (math {run_id(run.config)}) on {run.env.world_size} x {run.env.device.type}")


# --- data ---


def _table(run: Run, tokenizer: Any, path: str) -> PairTable:
    data = run.config.data
    options = TokenizeOptions(
        template=data.template,
        max_length=data.max_length,
        truncation=data.truncation,
        on_bad=data.on_bad,
    )
    cache = Path(os.environ.get("ISOPREF_CACHE") or Path.home() / ".cache" / "isopref") / "tables"
    workers = 1
    with run.display.bar(f"tokenise {Path(path).name}", None) as advance:
        done = 0

        def progress(count: int, _total: int | None) -> None:
            nonlocal done
            advance(count - done, "")
            done = count

        table = build_table(
            [SourceSpec(path, data.columns)],
            tokenizer,
            folder=cache,
            options=options,
            progress=progress,
            workers=workers,
        )
    stats = table.stats
    dropped = "".join(f", {count} dropped ({reason})" for reason, count in stats.dropped.items())
    shapes = ", ".join(f"{source.format}, {source.shape}" for source in stats.sources)
    run.display.say(f"data  {path}: {len(table)} pairs ({shapes}){dropped}")
    if len(table) == 0:
        raise RunError(f"{path}: no pair is left to use{dropped}. Change data.max_length or data.on_bad.")
    return table


def _sample_prompts(run: Run, table: PairTable | None) -> list[np.ndarray[Any, Any]]:
    """Prompts spread over the held-out pairs, for answers before and after."""
    if table is None or not run.config.run.export:
        return []
    _, first_of_prompt = np.unique(table.prompt_ids, return_index=True)
    return [table.tokens(int(row)).prompt for row in first_of_prompt[: run.config.run.samples]]


# --- model ---


def _policy(run: Run) -> Policy:
    model = run.config.model
    dtype = getattr(torch, model.dtype)
    policy = Policy(hf.load_model(model.path, dtype=dtype, trust_remote_code=model.trust_remote_code))
    policy.to(run.env.device)
    check_layout(policy, run.config.layout.rows)
    if run.config.layout.checkpointing:
        policy.model.gradient_checkpointing_enable({"use_reentrant": False})
    return policy


def _spread(run: Run, policy: Policy) -> nn.Module:
    model, layout = run.config.model, run.config.layout
    return parallelize(
        policy,
        _parallel(run, policy),
        device=run.env.device,
        world_size=run.env.world_size,
        compute_dtype=None if model.compute_dtype is None else getattr(torch, model.compute_dtype),
        hsdp_shard=layout.hsdp_shard,
    )


def _parallel(run: Run, policy: Policy) -> Parallel:
    """What layout.parallel: auto chooses, said aloud."""
    asked = run.config.layout.parallel
    if asked != "auto":
        return asked
    mixed = run.config.model.compute_dtype not in (None, run.config.model.dtype)
    if mixed:
        chosen, why = "fsdp", "mixed precision"
    elif run.env.world_size == 1:
        return "single"
    else:
        need = 4 * sum(p.numel() * p.element_size() for p in policy.parameters())  # weights, gradients, two moments
        room = _memory(run.env.device)
        chosen, why = ("ddp", "all fits on one rank") if need < 0.4 * room else ("fsdp", "it does not fit on one rank")
        why += f": {need / 2**30:.1f} GiB of state, {room / 2**30:.0f} GiB a rank"
    run.display.say(f"layout.parallel: auto is {chosen} ({why})")
    return "fsdp" if chosen == "fsdp" else "ddp"


def _memory(device: torch.device) -> int:
    """Bytes one rank has."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def _score(run: Run, model: nn.Module, table: PairTable, what: str) -> TableLogps:
    model.eval()
    with run.display.bar(f"score {what}", len(table)) as advance:
        return score_table(
            model,
            table,
            run.score_budget,
            device=run.env.device,
            rank=run.env.rank,
            num_ranks=run.env.world_size,
            progress=lambda count: advance(count, ""),
        )


class HeldOut:
    """Held-out pairs with their reference, ready to be evaluated at any time."""

    def __init__(self, run: Run, table: PairTable, reference: TableLogps):
        self.run, self.table, self.reference = run, table, reference
        self.at_start = self._evaluate(reference)

    def now(self, model: nn.Module) -> Evaluation:
        return self._evaluate(_score(self.run, model, self.table, "held-out"))

    def _evaluate(self, policy: TableLogps) -> Evaluation:
        objective = self.run.config.objective
        return evaluate(
            policy,
            self.reference,
            self.table.lengths,
            self.table.weights,
            loss=self.run.loss,
            beta=objective.beta,
            weighting=objective.weighting,
        )


# --- training ---


def _trainer(
    run: Run,
    model: nn.Module,
    table: PairTable,
    reference: TableLogps,
    held_out: HeldOut | None,
    resume: bool,
) -> Trainer:
    optim, objective, layout = run.config.optim, run.config.objective, run.config.layout
    module = DPOTrainModule(
        model,
        _optimizer(run, model),
        objective=run.loss,
        rank_microbatch_size=layout.microbatch_tokens,
        beta=objective.beta,
        reference=reference,
        weighting=objective.weighting,
        scheduler=_scheduler(run),
        max_grad_norm=optim.max_grad_norm,
        grad_sync=_grad_sync(run, model),
    )
    config = unwrap(model).model.config.get_text_config()
    loader = PairLoader(
        table,
        batch_pairs=optim.batch_pairs,
        budget=run.train_budget,
        weighting=objective.weighting,
        seed=optim.seed,
        work_dir=str(run.folder),
        dp_rank=run.env.rank,
        dp_world_size=run.env.world_size,
        # A token meets half its row's keys in attention (4 D flops each) and 24 D^2 flops of linear layers.
        attention_share=1 / (6 * config.hidden_size),
    )
    steps = optim.epochs * num_batches(len(table), optim.batch_pairs)
    if run.env.world_size > optim.batch_pairs:
        run.display.say(
            f"warning: {run.env.world_size} ranks share {optim.batch_pairs} pairs per step, so some are always idle."
        )
    return TrainerConfig(
        save_folder=str(run.folder / "checkpoints"),
        save_overwrite=True,
        max_duration=Duration.steps(min(steps, optim.max_steps or steps)),
        metrics_collect_interval=run.config.run.log_every,
        load_strategy=LoadStrategy.always if resume else LoadStrategy.never,
        device=str(run.env.device),
        callbacks=_callbacks(run, model, held_out),
    ).build(module, loader)


def _callbacks(run: Run, model: nn.Module, held_out: HeldOut | None) -> dict[str, Callback]:
    settings = run.config.run
    callbacks: dict[str, Callback] = {
        # Saving before the first step would have Adam take a step of its own; saving asynchronously can deadlock.
        "checkpointer": CheckpointerCallback(
            save_interval=settings.save_every,
            max_checkpoints=settings.keep,
            pre_train_checkpoint=False,
            save_async=False,
        ),
        "console": ConsoleLoggerCallback(),
        "speed": PairSpeedCallback(),
        "progress": ProgressCallback(display=run.display),
    }
    if run.env.is_first:
        callbacks["metrics"] = MetricsFileCallback(path=run.folder / "metrics.jsonl")
    if held_out is not None and settings.eval_every is not None:
        evaluation = EvaluateCallback(every=settings.eval_every, evaluate=lambda: held_out.now(model).as_metrics())
        callbacks["evaluate"] = evaluation
    return callbacks


def _optimizer(run: Run, model: nn.Module) -> torch.optim.Optimizer:
    """AdamW; norms and biases are not decayed."""
    optim = run.config.optim
    matrices = [p for p in model.parameters() if p.requires_grad and p.ndim >= 2]
    others = [p for p in model.parameters() if p.requires_grad and p.ndim < 2]
    groups = [
        {"params": params, "weight_decay": decay, "initial_lr": optim.lr}
        for params, decay in ((matrices, optim.weight_decay), (others, 0.0))
        if params
    ]
    fused = run.env.device.type == "cuda"
    return torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=fused)


def _scheduler(run: Run) -> Scheduler:
    optim = run.config.optim
    match optim.schedule:
        case "linear":
            return LinearWithWarmup(alpha_f=0.0, warmup_fraction=optim.warmup)
        case "cosine":
            return CosWithWarmup(alpha_f=0.0, warmup_fraction=optim.warmup)
        case "constant":
            return ConstantWithWarmup(warmup_fraction=optim.warmup)


def _grad_sync(run: Run, model: nn.Module) -> GradSync:
    """What layout.grad_sync: auto chooses. Only FSDP holds more memory for `last`: the whole gradient."""
    asked = run.config.layout.grad_sync
    if asked != "auto":
        return asked
    gradient = sum(p.numel() * p.element_size() for p in model.parameters())
    return "last" if gradient < 0.1 * _memory(run.env.device) else "every"


# --- result ---


def _export(run: Run, policy: Policy, state: dict[str, Any], tokenizer: Any) -> None:
    with policy.plain() as model:  # the folder must not name our attention
        prefix = "model."
        hf.export(model, {name.removeprefix(prefix): x for name, x in state.items()}, tokenizer, _model_folder(run))


def _model_folder(run: Run) -> Path:
    return run.folder / "model"


def _say_effect(run: Run, before: Evaluation, after: Evaluation) -> None:
    rows = [
        ("preference accuracy", f"{before.accuracy:.3f}", f"{after.accuracy:.3f}"),
        ("mean reward margin", f"{before.reward_margin:+.3f}", f"{after.reward_margin:+.3f}"),
        ("accuracy by log-prob alone", f"{before.logp_accuracy:.3f}", f"{after.logp_accuracy:.3f}"),
        ("loss", f"{before.loss:.4f}", f"{after.loss:.4f}"),
    ]
    run.display.table(f"{after.pairs} held-out pairs", ("", "before", "after"), rows)
    if run.env.is_first:
        text = json.dumps({"before": asdict(before), "after": asdict(after)}, indent=2)
        (run.folder / "evaluation.json").write_text(text + "\n", encoding="utf-8")


def _say_answers(run: Run, tokenizer: Any, prompts: Sequence[np.ndarray[Any, Any]], before: Sequence[str]) -> None:
    """Answers of the exported model, loaded as a user would load it, beside those from before."""
    if not prompts:
        return
    model = AutoModelForCausalLM.from_pretrained(_model_folder(run)).to(device=run.env.device)
    after = answers(model, tokenizer, prompts, max_new_tokens=run.config.run.sample_tokens)
    questions = [_last_turn(tokenizer.decode(prompt, skip_special_tokens=True)) for prompt in prompts]
    rows = list(zip(questions, before, after, strict=True))
    run.display.table("greedy answers to held-out prompts", ("prompt", "before", "after"), rows)
    lines = [json.dumps(dict(zip(("prompt", "before", "after"), row, strict=True)), ensure_ascii=False) for row in rows]
    (run.folder / "samples.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _last_turn(text: str) -> str:
    """The last line of a prompt that says something, without the name of the role that is to answer."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    return next((line for line in reversed(lines) if line not in ("assistant", "model")), "")


def _say_next(run: Run) -> None:
    if run.config.run.export:
        folder = _model_folder(run)
        run.display.say(
            f"The tuned model is in {folder}: a Hugging Face folder.\n"
            f"  load it:    AutoModelForCausalLM.from_pretrained({str(folder)!r})\n"
            f"  metrics:    {run.folder}/metrics.jsonl, {run.folder}/evaluation.json\n"
            "  your data:  isopref init my.yaml, set model.path and data.train in it, then isopref train my.yaml"
        )


def _duration(seconds: float) -> str:
    return f"{int(seconds) // 60} min {int(seconds) % 60} s"
