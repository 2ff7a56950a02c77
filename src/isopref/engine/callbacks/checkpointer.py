"""When checkpoints are saved and which are kept. Weights with NaN or Inf are never saved.

engine/checkpoints.py seals and verifies them.
"""

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from olmo_core.train.callbacks import CheckpointerCallback

from isopref.engine.callbacks.evaluation import EvaluateCallback
from isopref.engine.checkpoints import LAST_FILE, SEAL, damage, from_first, numbered, outlook, refusing, remove, seal
from isopref.engine.together import Together
from isopref.errors import RunError, StartAgainError, is_echo
from isopref.models.finite import bad_weights, some_of
from isopref.models.parallel import unwrap
from isopref.places import write_whole
from isopref.ranks import own_rank


@dataclass
class KeepingCheckpointerCallback(CheckpointerCallback):
    """Saves at regular steps or minutes, at the best evaluation, and when a signal asks the run to stop.

    Replaces the engine's callback (3.0.0), which saves before the metrics of a step are complete, deletes an old
    checkpoint only one step after writing a new one, forgets what an earlier process wrote, and lets ranks notice a
    signal at different steps. Saving is synchronous: the engine's asynchronous saving can deadlock.

    :param minutes: also save after this many minutes without a checkpoint, by the first rank's clock.
    :param evaluate: also keep the checkpoint of its best step.
    """

    minutes: float | None = None
    evaluate: EvaluateCallback | None = None
    stopped_by: signal.Signals | None = None  # agreed on by all ranks
    together: Together = field(default_factory=Together)
    clock: Callable[[], float] = time.monotonic  # monotonic: wall-clock time may jump
    _saved_at: float = 0.0
    _asked: signal.Signals | None = None  # received by this process
    _on_hangup: Any = signal.SIG_DFL

    def pre_train(self) -> None:
        for signum in (signal.SIGTERM, signal.SIGINT):  # the engine restores the old handlers
            signal.signal(signum, self._note)
        self._on_hangup = signal.getsignal(signal.SIGHUP)
        if self._on_hangup is not signal.SIG_IGN:  # as under nohup
            signal.signal(signal.SIGHUP, self._note)
        self._saved_at = self.clock()
        found = [(number, path) for number, path in numbered(Path(self.save_folder)) if number <= self.step]
        self._checkpoints = [str(path) for _, path in found]
        self._latest_checkpoint_step = found[-1][0] if found else -1

    def _note(self, signum: int, _frame: FrameType | None) -> None:
        if self._asked is not None:  # already saving
            return
        self._asked = signal.Signals(signum)
        if own_rank() == 0:
            os.write(2, f"\n{self._asked.name}: finishing this step and saving a checkpoint\n".encode())

    def post_train_batch(self) -> None:
        """Do nothing yet: evaluation and metrics of the step come first."""

    def post_step(self) -> None:
        late = self.minutes is not None and self.clock() - self._saved_at >= 60 * self.minutes
        stop, is_late = self.together.most(self._asked or 0, late and own_rank() == 0)
        best = self.evaluate is not None and self.evaluate.best_step == self.step
        every = self.save_interval is not None and self.step % self.save_interval == 0
        if is_late or best or every or stop:  # a second signal is still only recorded
            self._save()
        if stop:
            self.stopped_by = signal.Signals(stop)
            self.trainer.cancel_run(f"{self.stopped_by.name} received", no_sync=True)

    def post_train(self) -> None:
        signal.signal(signal.SIGHUP, self._on_hangup)
        if self.step > max(0, self._latest_checkpoint_step):
            self._save()

    def on_error(self, exc: BaseException) -> None:
        signal.signal(signal.SIGHUP, self._on_hangup)
        if self._asked and isinstance(exc, StartAgainError):
            exc.at_once = False
        if is_echo(exc):  # another rank is gone, so there is no step to finish when torchrun ends this one
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if self._asked == signal.SIGTERM:
                os.kill(os.getpid(), signal.SIGTERM)

    def best(self) -> tuple[Path, str | None] | None:
        """The checkpoint of the best step, and what is wrong with it, if anything. All ranks call this together."""
        if self.evaluate is None or self.evaluate.best_step is None:
            return None
        path = Path(self.save_folder) / f"step{self.evaluate.best_step}"
        return path, damage(path)

    def check_weights(self) -> None:
        """Raise RunError if a trained weight is NaN or Inf. All ranks call this together."""
        module: Any = self.trainer.train_module
        bad = bad_weights(unwrap(module.model).model, trained_only=True)
        if bad:
            raise self.refusal(f"the weights contain NaN or Inf ({some_of(bad)})")

    def refusal(self, problem: str) -> RunError:
        """The error for weights that must not be saved."""
        earlier = [path for number, path in numbered(Path(self.save_folder)) if number < self.step]
        sealed = [path for path in earlier if (path / SEAL).exists()]
        last = f"The last finite checkpoint is {sealed[-1]}." if sealed else "There is no earlier checkpoint."
        return RunError(
            f"step {self.step}: {problem}, so no checkpoint was written. {last} Start again in a new run.folder with a "
            "lower optim.lr or optim.weight_decay, or a wider model.dtype."
        )

    def _save(self) -> None:
        self.check_weights()
        folder = Path(self.save_folder)
        if not from_first(Path.exists, folder.parent):  # the engine would recreate it
            raise RunError(f"the checkpoint of step {self.step} cannot be written: {outlook(folder)}")
        with refusing(folder, self.step):
            path = Path(self._save_checkpoint(save_async=False))
            seal(path)
            if own_rank() == 0:
                write_whole(folder.parent / LAST_FILE, json.dumps({"step": self.step}).encode())
        self._checkpoints.append(str(path))
        self._saved_at = self.clock()
        best = f"step{self.evaluate.best_step}" if self.evaluate is not None else None
        others = [old for old in self._checkpoints if Path(old).name != best]
        for old in others[: -(self.max_checkpoints or len(others))]:
            self._checkpoints.remove(old)
            if own_rank() == 0:
                remove(Path(old))
