"""State shared by all parts of a run."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from transformers.utils import logging as transformers_logging

from isopref.batch.packing import Budget, check_budget, tokens_alone
from isopref.config.schema import Config
from isopref.data.memory import MemoryData
from isopref.data.table import ExampleTable
from isopref.engine.display import Display
from isopref.engine.environment import Environment, environment
from isopref.engine.refusals import check_gaps, check_table
from isopref.errors import RunError
from isopref.models.parallel import GradSync
from isopref.objectives.loss import Loss, pair_loss
from isopref.objectives.registry import weights
from isopref.ops.memory import ran_out
from isopref.runs.files import BEST_FOLDER, MODEL_FOLDER, NATIVE_FOLDER
from isopref.runs.folder import run_folder

SCORE_TOKENS = 16384


@dataclass(frozen=True)
class Run:
    """A run's config and what all its parts need."""

    config: Config
    folder: Path
    env: Environment
    display: Display
    longest: int = 0  # tokens of the longest pair, alone in its microbatch
    # What `auto` in the layout resolved to, once the model is loaded (settle_layout).
    microbatch_tokens: int | None = None
    grad_sync: GradSync = "last"
    memory: Mapping[str, MemoryData] = field(default_factory=dict)  # data passed by a script, by its name in config

    @property
    def model_folder(self) -> Path:
        return self.folder / MODEL_FOLDER

    @property
    def best_folder(self) -> Path:
        return self.folder / BEST_FOLDER

    @property
    def native_folder(self) -> Path:
        return self.folder / NATIVE_FOLDER

    @property
    def num_shares(self) -> int:
        """How many ways a batch is split: groups of ranks that compute the same pairs count as one."""
        return self.env.world_size // self.config.layout.ranks_together

    @property
    def train_budget(self) -> Budget:
        assert self.microbatch_tokens is not None, "settle_layout comes first"
        return Budget(self.config.layout.rows, self.microbatch_tokens)

    @property
    def score_budget(self) -> Budget:
        """Scoring keeps no activations, so its rows may be larger."""
        layout = self.config.layout
        if layout.microbatch_tokens != "auto":
            default = 2 * layout.microbatch_tokens
        else:  # the fitted size accounts only for training pairs
            fitted = SCORE_TOKENS if self.microbatch_tokens is None else 2 * self.microbatch_tokens
            default = max(fitted, self.longest)
        return Budget(layout.rows, layout.score_tokens or default)

    @property
    def score_setting(self) -> str:
        """The setting that determines the score budget."""
        layout = self.config.layout
        own = layout.score_tokens is not None or layout.microbatch_tokens == "auto"
        return "layout.score_tokens" if own else "twice layout.microbatch_tokens, for scoring,"

    @property
    def starts_at_reference(self) -> bool:
        """Whether the policy is its own reference before the first step."""
        return self.config.model.reference is None and self.loss.needs_reference

    @property
    def compute_dtype(self) -> str:
        """The dtype of the forward and backward pass, or float8 if products are computed in it."""
        return self.config.model.compute_dtype or self.config.model.dtype

    @property
    def loss(self) -> Loss:
        return loss_of(self.config)


@contextmanager
def opened_run(config: Config, name: str) -> Iterator[Run]:
    """A run over this process and the others. `name` is the config file's. Raises RunError if memory runs out."""
    group = config.only_fsdp_for is not None or config.layout.parallel in ("ddp", "fsdp", "hsdp")
    with environment(device=config.run.device, seed=config.optim.seed, process_group=group) as env:
        folder = run_folder(config, name)
        display = Display(quiet=not env.is_first)
        say_trust(config, display)
        try:
            yield Run(config, folder, env, display)
        except RuntimeError as error:
            if not ran_out(error):
                raise
            what = ". ".join(str(error).split(". ")[:2])  # with the amount; the rest is about torch's allocator
            raise RunError(
                f"{what}. It ran out of memory outside a training step (model, optimizer or scoring), so smaller "
                "microbatches won't help. Try: more GPUs with layout.parallel: fsdp, layout.offload: true, four bits "
                "(model.adapter.quantize: nf4), or a smaller layout.score_tokens. isopref plan shows what fits."
            ) from error


def with_longest(run: Run, tables: Sequence[ExampleTable]) -> Run:
    """The run with the length of its longest pair, once the tables are known."""
    alone = [tokens_alone(table.lengths, run.config.layout.rows).max() for table in tables]
    return replace(run, longest=int(max(alone)))


def check_score_budget(run: Run, table: ExampleTable) -> None:
    """Raise ConfigError if a pair is longer than a scoring microbatch."""
    check_budget(table.lengths, run.score_budget, setting=run.score_setting, name=table.origin)


def check_scores(config: Config, tables: Sequence[ExampleTable]) -> None:
    """Raise DataError or ConfigError if the loss or its weighting needs something the data lacks."""
    objective, loss = config.objective, loss_of(config)
    for table in tables:
        check_table(table, loss)
        if loss.needs.gaps:
            check_gaps(table, f"objective.loss: {', '.join(weights(objective.loss))}")
        if objective.weighting == "gap":
            check_gaps(table, "objective.weighting: gap")


def loss_of(config: Config) -> Loss:
    objective = config.objective
    return pair_loss(
        objective.loss,
        nll_weight=objective.nll_weight,
        ld_alpha=objective.ld_alpha,
        wpo=objective.wpo,
        balance_weight=objective.balance_weight,
        **objective.params,
    )


def say_trust(config: Config, display: Display) -> None:
    """Warn that code shipped with the model will run."""
    if config.model.trust_remote_code:
        named = " and ".join(filter(None, (config.model.path, config.model.reference)))
        display.say(f"warning: model.trust_remote_code: code from {named} will run with your permissions")


def quiet_libraries() -> None:
    """Keep library warnings and progress bars off the terminal."""
    logging.captureWarnings(True)
    transformers_logging.disable_progress_bar()
    # From tensor parallelism: hints about faster gathers, and about how CPUs exchange tokens.
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
