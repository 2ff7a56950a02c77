"""The trainer that `isopref train` builds from a config, ready to fit, but with random weights and made-up pairs."""

import json
import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch
import workload
from olmo_core.train import Trainer
from transformers import PreTrainedModel

from isopref.build.microbatch import settle_layout
from isopref.build.model import add_adapter, score_all, spread
from isopref.build.run import Run
from isopref.build.trainer import build_trainer
from isopref.config.schema import Config
from isopref.data.table import ExampleTable
from isopref.engine.display import Display
from isopref.engine.environment import environment
from isopref.examples import Example
from isopref.models.float8 import compute_in_float8
from isopref.models.policy import Policy
from isopref.models.reward import RewardModel
from isopref.score import TableLogps


@dataclass(frozen=True)
class Cell:
    """One line of the table: a shape, a data set, a loss, a global batch, and how each system cuts it."""

    shape: str
    data: str
    batch_size: int  # examples
    microbatch_tokens: int
    trl_batch: int  # pairs, or labelled answers, of one of TRL's microbatches
    dtype: str = "bfloat16"
    warmup: int = 3
    spare: int = 0  # additional warm-up steps allowed, until a step compiles nothing
    steps: int = 8
    adapter: dict[str, Any] | None = None  # the value of model.adapter
    loss: str = "sigmoid"
    answers: int = 2  # per example

    @property
    def unit(self) -> str:
        """What is counted per second."""
        if self.loss == "kto":
            return "answers"
        return "pairs" if self.answers == 2 else "comparisons"

    @property
    def speed(self) -> str:
        """The name of the figure: "pairs_per_s"."""
        return f"{self.unit}_per_s"

    @property
    def terms_per_step(self) -> int:
        """Comparisons, or labelled answers, of a global batch."""
        of_example = self.answers if self.loss == "kto" else math.comb(self.answers, 2)
        return self.batch_size * of_example

    @property
    def has_made_up_reference(self) -> bool:
        """Whether both systems get `uniform_logp` as reference instead of scoring one, which is not timed anyway."""
        return self.loss == "sigmoid"

    @property
    def is_reward(self) -> bool:
        return self.loss == "bradley_terry"

    @property
    def quantised(self) -> bool:
        return self.adapter is not None and "quantize" in self.adapter

    def examples(self, vocabulary: int) -> list[Example]:
        """The examples of all steps."""
        count = (self.warmup + self.spare + self.steps) * self.batch_size
        labelled = self.loss == "kto" and self.answers == 1
        return workload.examples(self.data, count, answers=self.answers, labelled=labelled, vocabulary=vocabulary)


def uniform_logp(tokens: Any, vocabulary: int) -> Any:
    """The log-probability of answers of so many tokens under a model for which all tokens are equally probable.

    With random weights this is close to the model's own, so margins are small and gradients as large as in training.
    """
    return -tokens * math.log(vocabulary)


@contextmanager
def emulated_float8() -> Iterator[None]:
    """Float8 on a CPU: products of rounded numbers."""
    with mock.patch("isopref.build.hardware.compute_in_float8", partial(compute_in_float8, emulate=True)):
        yield


@dataclass
class Ready:
    """A run just before its first step."""

    run: Run
    policy: Policy
    table: ExampleTable
    trainer: Trainer

    def metrics(self) -> list[dict[str, float]]:
        return [json.loads(line) for line in (self.run.folder / "metrics.jsonl").read_text().splitlines()]


@contextmanager
def ready_trainer(
    cell: Cell,
    *,
    mixed: bool = False,
    float8: bool = False,
    layout: dict[str, Any] | None = None,
    make: Callable[..., PreTrainedModel] = workload.model,
) -> Iterator[Ready]:
    """A run of a cell, just before its first step.

    `mixed`: float32 master weights, bfloat16 compute. `float8`: linear layers multiply in float8. `layout`: overrides
    of the config's section. `make` builds the model.
    """
    precision = {"dtype": "float32", "compute_dtype": "bfloat16"} if mixed else {"dtype": cell.dtype}
    precision |= {"compute_dtype": "float8"} if float8 else {}
    with tempfile.TemporaryDirectory() as folder:
        config = Config.model_validate(
            {
                "model": {"path": "random", **precision, "adapter": cell.adapter},
                "data": {"train": "random"},
                "objective": {"loss": cell.loss},
                "optim": {"batch_size": cell.batch_size},
                "layout": {"microbatch_tokens": cell.microbatch_tokens, "checkpointing": "none", **(layout or {})},
                "run": {"folder": folder, "save_every": 10**6, "export": False},
            }
        )
        with environment(device="auto", seed=0, process_group=config.only_fsdp_for is not None) as env:
            run = Run(config, Path(folder), env, Display())
            frozen = cell.adapter is not None
            dtype = getattr(torch, config.model.pass_dtype if frozen else config.model.dtype)
            made = make(cell.shape, dtype=dtype, device=env.device)
            table = ExampleTable.from_tokens(cell.examples(made.config.vocab_size))
            policy = RewardModel(made) if cell.is_reward else Policy(made)
            add_adapter(run, policy)
            model = spread(run, policy)
            run = settle_layout(run, model, table)
            if cell.has_made_up_reference:
                tokens = torch.as_tensor(table.lengths.answer, dtype=torch.float64)
                reference = TableLogps(uniform_logp(tokens, made.config.vocab_size))
            else:
                reference = score_all(run, model, table, "reference")
            trainer = build_trainer(run, model, table, reference, None, False)
            if cell.has_made_up_reference:
                cast(Any, trainer.train_module).check_first_step = False
            del trainer.callbacks["checkpointer"]  # it would write a checkpoint of many GiB at the end
            yield Ready(run, policy, table, trainer)
            del trainer
