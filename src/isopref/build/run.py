"""What all parts of a run share, and the folder it lives in."""

import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from transformers.utils import logging as transformers_logging

from isopref.build.lock import NAME as LOCK
from isopref.build.lock import locked
from isopref.config.load import dump_config, load_config, to_yaml
from isopref.config.schema import Config, run_id
from isopref.data.packing import Budget
from isopref.engine.display import Display
from isopref.engine.environment import Environment
from isopref.engine.memory import FILE as MEMORY_FILE
from isopref.errors import RunError, StartAgainError, UserError
from isopref.models.parallel import GradSync
from isopref.objectives.loss import PairLoss, pair_loss
from isopref.places import write_whole
from isopref.report.read import CONFIG_FILE, METRICS_FILE, MODEL_FOLDER, STARTS_FILE

SCORE_TOKENS = 16384
CHECKPOINTS_FOLDER = "checkpoints"
LOG_FILE = "engine.log"
MODELS_FILE = "reference.json"  # see beginning.py
VALUES_FOLDER = "reference"

# What a start that fails, or is killed, leaves before `claim_folder`: the folder is still free.
LEFTOVERS = (LOCK, LOG_FILE, MODELS_FILE, VALUES_FOLDER, MEMORY_FILE, ".seen-*", "*.json.*.tmp", "*.yaml.*.tmp")
# What systems and tools put into folders that are empty to their owner.
SYSTEM_FILES = (".DS_Store", ".localized", "Thumbs.db", "desktop.ini", "lost+found", ".nfs*", ".gitkeep")

Resume = Literal["no", "must", "auto"]  # auto: if the folder holds a run


@dataclass(frozen=True)
class Run:
    """A run's config with the things all its parts need."""

    config: Config
    folder: Path
    env: Environment
    display: Display
    longest: int = 0  # tokens of the longest pair, as a microbatch of its own
    # What the layout's autos have become, once the model is there (fit_layout).
    microbatch_tokens: int | None = None
    grad_sync: GradSync = "last"

    @property
    def model_folder(self) -> Path:
        return self.folder / MODEL_FOLDER

    @property
    def best_folder(self) -> Path:
        return self.folder / "model_best"

    @property
    def native_folder(self) -> Path:
        return self.folder / "olmo_core"

    @property
    def num_shares(self) -> int:
        """How many ways a batch is shared out: ranks that compute layers together work on the same pairs."""
        return self.env.world_size // self.config.layout.tensor_parallel

    @property
    def train_budget(self) -> Budget:
        layout = self.config.layout
        assert self.microbatch_tokens is not None, "fit_layout comes first"
        return Budget(layout.rows, self.microbatch_tokens, layout.microbatch_pairs)

    @property
    def score_budget(self) -> Budget:
        """Scoring keeps no activations, so its rows may be larger."""
        layout = self.config.layout
        if layout.microbatch_tokens != "auto":
            default = 2 * layout.microbatch_tokens
        else:  # what was fitted knows the training pairs alone
            fitted = SCORE_TOKENS if self.microbatch_tokens is None else 2 * self.microbatch_tokens
            default = max(fitted, self.longest)
        return Budget(layout.rows, layout.score_tokens or default)

    @property
    def score_setting(self) -> str:
        """What the score budget comes from."""
        layout = self.config.layout
        own = layout.score_tokens is not None or layout.microbatch_tokens == "auto"
        return "layout.score_tokens" if own else "twice layout.microbatch_tokens, for scoring,"

    @property
    def starts_at_reference(self) -> bool:
        """Whether the policy is its own reference before the first step."""
        return self.config.model.reference is None and self.loss.needs_reference

    @property
    def compute_dtype(self) -> str:
        """What forward and backward compute in."""
        return self.config.model.compute_dtype or self.config.model.dtype

    @property
    def loss(self) -> PairLoss:
        return loss_of(self.config)


def run_folder(config: Config, name: str) -> Path:
    """Where a run of a config lives. `name` is the config file's, for the default. Raises RunError."""
    short = name.encode()[:200].decode(errors="ignore")  # a file name has at most 255 bytes
    folder = Path(config.run.folder or f"runs/{short}-{run_id(config)}").expanduser()
    try:
        folder.exists()
    except OSError as error:  # in a folder that may not be entered
        raise RunError(f"run.folder: cannot use {folder} ({error.strerror}). Set run.folder to another.") from error
    return folder


def loss_of(config: Config) -> PairLoss:
    objective = config.objective
    return pair_loss(
        objective.loss,
        nll_weight=objective.nll_weight,
        ld_alpha=objective.ld_alpha,
        wpo=objective.wpo,
        balance_weight=objective.balance_weight,
        **objective.params,
    )


def goes_on(run: Run, resume: Resume) -> bool:
    """Whether a run begins with a checkpoint rather than anew. A process that its launcher started again goes on."""
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0 or StartAgainError.variable in os.environ
    if resume == "must":
        return True
    return (resume == "auto" or restarted) and holds_run(run.folder)


def holds_run(folder: Path) -> bool:
    """Whether a run has begun in a folder. A config.yaml alone may be anybody's."""
    begun = any((folder / name).exists() for name in (STARTS_FILE, METRICS_FILE, MODELS_FILE))
    return begun and (folder / CONFIG_FILE).exists()


def others_in(folder: Path) -> list[str]:
    """What is in a folder that neither a failed start nor the system left there: by name, in order."""
    if not folder.is_dir():
        return []
    passed = (*LEFTOVERS, *SYSTEM_FILES)
    found = [path for path in folder.iterdir() if not any(path.match(pattern) for pattern in passed)]
    # The engine makes the folder of checkpoints ahead of time.
    return sorted(path.name for path in found if path.name != CHECKPOINTS_FOLDER or any(path.iterdir()))


def is_finished(run: Run) -> bool:
    """Whether the folder holds the result of the run already. Raises RunError where it is that of another."""
    if not (run.config.run.export and run.model_folder.exists() and holds_run(run.folder)):
        return False
    _refuse_other_math(run, ("model", "data", "objective", "optim"))
    return True


@contextmanager
def open_folder(run: Run, resume: bool) -> Iterator[None]:
    """Make the run's folder, or refuse one that holds anything else; hold it, and send the engine's log into it.

    What makes a folder a run is its config.yaml, which `claim_folder` writes. A run that is refused before that leaves
    no folder behind.
    """
    _refuse_folder(run, resume)
    made = run.env.is_first and not run.folder.exists()
    run.env.barrier()
    try:
        with _held_folder(run):
            yield
    except UserError:
        if made and not others_in(run.folder):
            shutil.rmtree(run.folder, ignore_errors=True)
        raise


@contextmanager
def _held_folder(run: Run) -> Iterator[None]:
    with ExitStack() as stack:
        if run.env.is_first:
            try:
                run.folder.mkdir(parents=True, exist_ok=True)
                stack.enter_context(locked(run.folder))
                stack.enter_context(_engine_log(run.folder / LOG_FILE))
            except OSError as error:
                raise RunError(f"run.folder: cannot write to {run.folder} ({error}). Choose another.") from error
        quiet_libraries()
        run.env.barrier()
        if apart := run.env.ranks_without(run.folder):
            raise RunError(
                f"run.folder: rank {apart[0]} does not see what rank 0 writes to {run.folder.absolute()}. Checkpoints "
                "have parts from every rank: set run.folder to a folder that all machines share."
            )
        ranks = f"{run.env.world_size} x {run.env.device.type}"
        run.display.say(f"run   {run.folder} (run id {run_id(run.config)}, {ranks})")
        yield


@contextmanager
def _engine_log(path: Path) -> Iterator[None]:
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger().addHandler(handler)
    for name in ("olmo_core", "isopref"):
        logging.getLogger(name).setLevel(logging.INFO)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        handler.close()


def say_trust(config: Config, display: Display) -> None:
    """Say aloud that code of the model's authors runs here."""
    if config.model.trust_remote_code:
        named = " and ".join(filter(None, (config.model.path, config.model.reference)))
        display.say(f"warning: model.trust_remote_code: code that comes with {named} runs here, with your rights")


def quiet_libraries() -> None:
    """Keep warnings and bars of libraries off the terminal."""
    logging.captureWarnings(True)
    transformers_logging.disable_progress_bar()
    # Of tensor parallelism: how a gather could be faster, and that CPUs exchange tokens in another way.
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)


def claim_folder(run: Run) -> None:
    """Write the resolved config: the folder holds this run from here on.

    Comes after all that can be wrong with config, data and model, so that a start that fails leaves the folder free,
    and a resume that is refused leaves it as it was.
    """
    if run.env.is_first:
        write_whole(run.folder / CONFIG_FILE, dump_config(run.config).encode())


def _refuse_folder(run: Run, resume: bool) -> None:
    """Raise RunError where the folder's content and `resume` do not go together."""
    has_run = holds_run(run.folder)
    if has_run and run.config.run.export and run.model_folder.exists():
        raise RunError(
            f"{run.folder} holds a finished run. Start in another folder: set run.folder, or remove that one."
        )
    if has_run and not resume:
        raise RunError(
            f"{run.folder} holds a run already. Go on with it: --resume. Or start another: set run.folder, or remove "
            "that one."
        )
    if resume and not has_run:
        named = " Its name has the run id, which changes with the math." if run.config.run.folder is None else ""
        raise RunError(f"--resume: {run.folder} holds no run.{named} Start it without --resume, or check run.folder.")
    if resume:
        _refuse_other_math(run)
    elif others := others_in(run.folder):
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        raise RunError(
            f"run.folder: {run.folder} holds no run of isopref, but other files: {', '.join(others[:3])}{more}. Choose "
            "a folder that is new or empty."
        )


def _refuse_other_math(run: Run, sections: Sequence[str] = ("model", "objective", "optim")) -> None:
    """Raise RunError where the run in the folder has another model, objective or optimizer.

    Data may have moved: a run that goes on compares the pairs themselves (PairLoader).
    """
    before, now = (one.model_dump(mode="json") for one in (load_config(run.folder / CONFIG_FILE), run.config))
    changed = [
        f"{section}.{name} was {to_yaml(before[section].get(name))}, is {to_yaml(now[section].get(name))}"
        for section in sections
        for name in {**before[section], **now[section]}  # another loss may take other parameters
        if before[section].get(name) != now[section].get(name)
    ]
    if changed:
        raise RunError(
            f"--resume: the run in {run.folder} had another config: {'; '.join(changed)}. Only layout and run may "
            "change. Use the first values, or start anew in another run.folder."
        )
