"""What all parts of a run share, and the folder it lives in."""

import logging
from dataclasses import dataclass
from pathlib import Path

from transformers.utils import logging as transformers_logging

from isopref.config.load import dump_config
from isopref.config.schema import Config, run_id
from isopref.data.packing import Budget
from isopref.engine.display import Display
from isopref.engine.environment import Environment
from isopref.errors import RunError
from isopref.losses import PairLoss, pair_loss


@dataclass(frozen=True)
class Run:
    """A run's config with the things all its parts need."""

    config: Config
    folder: Path
    env: Environment
    display: Display

    @property
    def model_folder(self) -> Path:
        return self.folder / "model"

    @property
    def train_budget(self) -> Budget:
        layout = self.config.layout
        return Budget(layout.rows, layout.microbatch_tokens, layout.microbatch_pairs)

    @property
    def score_budget(self) -> Budget:
        """Scoring keeps no activations, so its rows may be larger."""
        layout = self.config.layout
        return Budget(layout.rows, layout.score_tokens or 2 * layout.microbatch_tokens)

    @property
    def loss(self) -> PairLoss:
        objective = self.config.objective
        return pair_loss(objective.loss, beta=objective.beta, label_smoothing=objective.label_smoothing)


def open_folder(run: Run, resume: bool) -> None:
    """Make the run's folder, or refuse one that holds another run; send the engine's log into it."""
    has_run = (run.folder / "config.yaml").exists()
    run.env.barrier()
    if has_run and not resume:
        raise RunError(
            f"{run.folder} holds a run already. Go on with it: --resume. Or start another: set run.folder, or remove "
            "that one."
        )
    if resume and not has_run:
        raise RunError(f"--resume: {run.folder} holds no run. Start it without --resume, or check run.folder.")
    if run.env.is_first:
        try:
            run.folder.mkdir(parents=True, exist_ok=True)
            (run.folder / "config.yaml").write_text(dump_config(run.config), encoding="utf-8")
            handler = logging.FileHandler(run.folder / "engine.log")
        except OSError as error:
            raise RunError(f"run.folder: cannot write to {run.folder} ({error}). Choose another.") from error
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logging.getLogger().addHandler(handler)
        logging.getLogger("olmo_core").setLevel(logging.INFO)
    logging.captureWarnings(True)
    transformers_logging.disable_progress_bar()
    run.env.barrier()
    ranks = f"{run.env.world_size} x {run.env.device.type}"
    run.display.say(f"run   {run.folder} (math {run_id(run.config)}, {ranks})")
