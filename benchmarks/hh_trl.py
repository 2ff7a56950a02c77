"""TRL's part of hh_training.py: its DPO trainer with the same tokens, batches, order, schedule and weights."""

import itertools
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

import torch
from olmo_core.optim import LinearWithWarmup
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from transformers.trainer_callback import PrinterCallback
from trl_peer import own_attention

from isopref.data.schedule import epoch_order
from isopref.data.table import ExampleTable

if TYPE_CHECKING:
    from hh_training import Course, Plan

SEARCH_STEPS, SEARCH_WARMUP = 6, 2


class Pairs(NamedTuple):
    """TRL's data: pairs, the order in which it trains on them (over all epochs), and held-out pairs."""

    train: Any
    order: list[int]
    held_out: Any


class CourseCallback(TrainerCallback):
    """Fills in a Course from what the trainer reports. Losses are logged at every step."""

    def __init__(self, course: "Course") -> None:
        self.course = course

    def on_train_begin(self, *_args: Any, **_kwargs: Any) -> None:
        self.course.start()

    def on_step_end(self, *_args: Any, **_kwargs: Any) -> None:
        self.course.stepped()

    def on_log(self, *_args: Any, **kwargs: Any) -> None:
        logs = kwargs["logs"]
        if "loss" in logs:
            self.course.steps[-1] |= {"loss": logs["loss"], "lr": logs["learning_rate"]}

    def on_evaluate(self, *_args: Any, **kwargs: Any) -> None:
        metrics = kwargs["metrics"]
        self.course.evaluated()
        figures = {"loss": metrics["eval_loss"], "accuracy": metrics["eval_rewards/accuracies"]}
        self.course.evaluations.append({**self.course.steps[-1], **figures})


def train_trl(plan: "Plan", seed: int, begun: float, *, batch: int, liger: bool, cudnn: bool) -> "Course":
    """Train with TRL. `batch`: pairs per microbatch."""
    from hh_training import Course

    course = Course("trl", seed, begun)
    with tempfile.TemporaryDirectory() as scratch:
        tables = plan.tables(seed, Path(scratch))
        assert tables.held_out is not None
        steps = plan.steps(tables.train)
        order = [
            int(index)
            for epoch in range(1, plan.epochs + 1)
            for index in epoch_order(len(tables.train), seed=seed, epoch=epoch)
        ]
        pairs = Pairs(_records(tables.train), order[: steps * plan.batch_size], _records(tables.held_out))
        _fit(plan, scratch, pairs, steps, batch, liger, cudnn, CourseCallback(course))
    return course


def search(plan: "Plan", batches: list[int], liger: bool) -> list[dict[str, Any]]:
    """Pairs per second under each setting, over a few steps on seed 0's first epoch, without evaluation."""
    from hh_training import Course

    found = []
    for batch, cudnn in itertools.product(dict.fromkeys(batches), (False, True)):
        if plan.batch_size % batch:
            continue
        course = Course("trl", 0, time.perf_counter())
        with tempfile.TemporaryDirectory() as scratch:
            table = plan.tables(0, Path(scratch)).train
            steps = min(SEARCH_STEPS, plan.steps(table))
            order = epoch_order(len(table), seed=0, epoch=1)[: steps * plan.batch_size]
            pairs = Pairs(_records(table.select(order)), list(range(len(order))), None)
            one: dict[str, Any] = {"batch": batch, "cudnn": cudnn}
            try:
                _fit(plan, scratch, pairs, steps, batch, liger, cudnn, CourseCallback(course))
                warmup = min(SEARCH_WARMUP, steps - 1)
                timed = course.steps[-1]["seconds"] - course.steps[warmup - 1]["seconds"]
                one["pairs_per_s"] = (steps - warmup) * plan.batch_size / timed
            except torch.cuda.OutOfMemoryError as error:
                one["error"] = str(error)[:200]
            found.append(one)
    return found


def _fit(
    plan: "Plan",
    folder: str,
    pairs: Pairs,
    steps: int,
    batch: int,
    liger: bool,
    cudnn: bool,
    callback: CourseCallback,
) -> None:
    if liger:
        import liger_kernel  # noqa: F401 -- fails early if it is missing
    from trl import DPOTrainer
    from trl.trainer import dpo_trainer

    # TRL hashes all weights to name a cache file, which is not part of training.
    dpo_trainer.hash_module = lambda _model: uuid4().hex
    schedule = LinearWithWarmup(alpha_f=0.0, warmup=max(1, round(plan.warmup * steps)), t_max=steps + 1)

    class Prepared(DPOTrainer):  # type: ignore[misc]
        """Takes tokens in isopref's order, and learning rates from isopref's schedule."""

        def _prepare_dataset(self, dataset: Any, *_args: Any, **_kwargs: Any) -> Any:
            return dataset

        def _get_train_sampler(self, *_args: Any, **_kwargs: Any) -> Any:
            return pairs.order

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            optimizer = self.optimizer if optimizer is None else optimizer
            self.lr_scheduler = LambdaLR(optimizer, lambda done: float(schedule.get_lr(1.0, done + 1, steps)))
            return self.lr_scheduler

    work = Path(plan.work) / "model"
    trainer = Prepared(
        model=AutoModelForCausalLM.from_pretrained(work, dtype=torch.float32),
        args=_arguments(plan, folder, pairs, steps, batch, liger),
        train_dataset=pairs.train,
        eval_dataset=pairs.held_out,
        processing_class=AutoTokenizer.from_pretrained(work),
        callbacks=[callback],
    )
    trainer.remove_callback(PrinterCallback)
    with own_attention():
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        trainer.train()


def _arguments(plan: "Plan", folder: str, pairs: Pairs, steps: int, batch: int, liger: bool) -> Any:
    """TRL's DPOConfig for a plan."""
    from trl import DPOConfig

    cuda = torch.cuda.is_available()
    return DPOConfig(
        output_dir=folder,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=plan.batch_size // batch,
        per_device_eval_batch_size=_divisor(0 if pairs.held_out is None else len(pairs.held_out)),
        max_steps=steps,
        learning_rate=plan.lr,
        beta=plan.beta,
        adam_beta1=plan.betas[0],
        adam_beta2=plan.betas[1],
        weight_decay=0.0,
        max_grad_norm=plan.max_grad_norm,
        optim="adamw_torch_fused" if cuda else "adamw_torch",
        max_length=None,
        gradient_checkpointing=False,
        bf16=cuda,
        use_liger_kernel=liger,
        use_cpu=not cuda,
        precompute_ref_log_probs=True,
        eval_strategy="no" if pairs.held_out is None else "steps",
        eval_steps=plan.eval_every,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )


def _records(table: ExampleTable) -> Any:
    from datasets import Dataset

    records = []
    for index in range(len(table)):
        prompt, chosen, rejected = (part.tolist() for part in table.example(index).parts)
        records.append({"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected})
    return Dataset.from_list(records)


def _divisor(count: int, most: int = 64) -> int:
    """The largest microbatch that divides the held-out pairs: TRL's accuracy is a mean of microbatch means."""
    return next((size for size in range(min(most, count), 0, -1) if count % size == 0), 1)
