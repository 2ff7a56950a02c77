"""Progress on the terminal."""

from contextlib import ExitStack
from dataclasses import dataclass, field

from olmo_core.train.callbacks import Callback

from isopref.engine.display import Advance, Display, brief


@dataclass
class ProgressCallback(Callback):
    """A bar on a terminal, one line per logged step elsewhere. `unit` is what to call an example."""

    display: Display = field(default_factory=Display)
    unit: str = "pair"
    _stack: ExitStack = field(default_factory=ExitStack)
    _advance: Advance | None = None
    _shown: int = 0
    _note: str = ""

    def pre_train(self) -> None:
        self._shown = self.step
        self._advance = self._stack.enter_context(
            self.display.bar("train", self.trainer.max_steps, lines=False, below=True)
        )
        self._advance(self.step, "")

    def post_step(self) -> None:
        if self._advance is not None:
            self._advance(self.step - self._shown, self._note)
            self._shown = self.step

    def log_metrics(self, step: int, metrics: dict[str, float]) -> None:
        if "train/loss" not in metrics:  # a checkpoint's part of the step
            return
        self._note = brief(metrics, self.unit)
        if self._advance is not None:
            self._advance(0, self._note)
        if not self.display.console.is_terminal and self._note:
            self.display.say(f"step {step}/{self.trainer.max_steps}  {self._note}")

    def post_train(self) -> None:
        self._stack.close()

    def on_error(self, exc: BaseException) -> None:
        self._stack.close()
