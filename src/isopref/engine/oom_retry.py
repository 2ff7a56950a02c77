"""A step that runs out of memory is cut smaller and done again: a microbatch is layout, not math.

What can be done depends on where ranks meet. Alone, a process may try again at any time. Under DDP ranks meet in the
backward pass of a step's last microbatch, the smallest; before it they ask one another whether all came that far. FSDP
has them meet in every layer, and under DDP a coupled loss after its first pass, so the others are stuck when one fails
there; also on one rank FSDP stays amid a pass that failed. The run is then started again, with what may fit.
"""

import gc
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from isopref.batch.packing import Budget, parts, tokens_alone
from isopref.batch.step import Step
from isopref.engine.loader import ExampleLoader
from isopref.engine.together import Together
from isopref.errors import RunError, StartAgainError, shorter_pairs
from isopref.places import write_whole

WAYS_OUT = (
    "Recompute activations (layout.checkpointing: full), spread the model over more GPUs (layout.parallel: fsdp), or "
    "shorten the pairs"
)
SIGNS = ("out of memory", "STATUS_ALLOC_FAILED", "can't allocate memory")

Before = Callable[[int], None]  # is told the number of a microbatch before that runs


def ran_out(error: RuntimeError) -> bool:
    """Whether a device lacked memory. The host, cuBLAS, Triton and NCCL say so each in its own way."""
    return isinstance(error, torch.OutOfMemoryError) or any(sign in str(error) for sign in SIGNS)


class AgainError(Exception):
    """A rank ran out of memory before the ranks met: all of them do the step again, cut smaller."""


class OomRetry:
    """Does steps in microbatches that fit: once one did not, in smaller ones.

    :param loader: plans batches; its budget is what shrinks.
    :param meets: ranks of DDP meet before a step's last microbatch: gradients are reduced for each, or a first pass
        without gradient comes before (see first_pass.py).
    :param asked: what the layout was asked to be. What was found to fit it is kept in `file`, for a later start.
    :param say: tells the user.
    """

    def __init__(
        self,
        model: nn.Module,
        loader: ExampleLoader,
        *,
        meets: bool,
        asked: Mapping[str, Any],
        file: Path,
        say: Callable[[str], None],
    ):
        self.loader, self.asked, self.file, self.say = loader, dict(asked), file, say
        replicated = isinstance(model, DistributedDataParallel)
        self.meets_always = isinstance(model, FSDPModule) or (replicated and meets)
        self.together = Together() if replicated and not meets else None
        self._number: int | None = None  # of the microbatch that runs
        self._met = False
        self._recall()

    def run(
        self, step: Step, accumulate: Callable[[Step, Before], Tensor], drop: Callable[[], None]
    ) -> tuple[Step, Tensor]:
        """The step, and what `accumulate` returns for it. Where that runs out of memory, `drop` what it left; again."""
        while True:
            try:
                return step, self._attempt(step, accumulate)
            except AgainError:
                pass
            # Only here is the exception gone, and with it the tensors of the failed step.
            drop()
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            before = self.loader.budget
            self.loader.budget = self._smaller()
            self._keep()
            self.say(
                f"warning: a step ran out of memory with {_words(before)} and is done again: from here on it is "
                f"{_words(self.loader.budget)}. The result does not depend on it."
            )
            assert step.index is not None
            step = self.loader.step(step.index)

    def _attempt(self, step: Step, accumulate: Callable[[Step, Before], Tensor]) -> Tensor:
        self._met, self._number = False, None

        def before(number: int) -> None:
            self._number = number
            if self.together is not None and number == len(step.work) - 1:
                self._meet(None)

        try:
            return accumulate(step, before)
        except RuntimeError as error:
            if not ran_out(error):
                raise
            index: list[int] = [] if self._number is None else step.work[self._number].index.tolist()
            pair = index[0] if len(index) == 1 else None
            if self.meets_always or self._met:
                self._stop(step, pair, error)
            if self.together is not None:
                self._meet(pair, failed=True)
            self._refuse(pair)
            raise AgainError from error

    def _meet(self, pair: int | None, *, failed: bool = False) -> None:
        """Ask whether all ranks came this far. Raises AgainError where one did not; RunError for a pair too long."""
        assert self.together is not None
        any_failed, alone = self.together.most(int(failed), -1 if pair is None else pair)
        self._met = True
        if any_failed:
            self._refuse(None if alone < 0 else alone)
            raise AgainError

    def _refuse(self, pair: int | None) -> None:
        """Raise RunError for a pair that does not fit though it was alone."""
        if pair is None:
            return
        table, kind = self.loader.table, self.loader.budget.kind
        raise RunError(
            f"{table.origin(pair)} does not fit into memory, though it was alone in its microbatch: "
            f"{tokens_alone(table.lengths, kind)[pair]} tokens in layout.rows: {kind} ({parts(table.lengths, pair)}). "
            f"{WAYS_OUT}: {shorter_pairs()}"
        )

    def _stop(self, step: Step, pair: int | None, error: Exception) -> NoReturn:
        self._refuse(pair)
        before = self.loader.budget
        self.loader.budget = self._smaller()
        self._keep(always=True)
        raise StartAgainError(
            f"out of memory with {_words(before)}, at a point from which a step cannot be done again. The next start "
            f"takes {_words(self.loader.budget)} and goes on from the last checkpoint. isopref train and torchrun "
            "--max-restarts start by themselves; else use the same command with --resume."
        ) from error

    def _smaller(self) -> Budget:
        """Half the tokens, but room for the longest pair; then one pair at a time. Raises RunError after that."""
        budget, lengths = self.loader.budget, self.loader.table.lengths
        longest = int(tokens_alone(lengths, budget.kind).max())
        if budget.tokens > longest:
            return replace(budget, tokens=max(longest, budget.tokens // 2))
        if budget.examples == 1:
            raise RunError(
                f"out of memory with {_words(budget)}, the smallest there are. {WAYS_OUT}: {shorter_pairs()}"
            )
        return replace(budget, examples=1)

    def _keep(self, *, always: bool = False) -> None:
        if always or self.loader.dp_rank == 0:
            kept = {"asked": self.asked, "fits": asdict(self.loader.budget)}
            write_whole(self.file, json.dumps(kept).encode())

    def _recall(self) -> None:
        try:
            kept = json.loads(self.file.read_bytes())
            fits = Budget(**kept["fits"]) if kept["asked"] == self.asked else None
        except (OSError, ValueError, KeyError, TypeError):
            return
        if fits is not None:
            self.loader.budget = fits
            self.say(f"layout: {_words(fits)}, since more did not fit before ({self.file})")


def _words(budget: Budget) -> str:
    count = budget.examples
    examples = "" if count is None else f" and {count} {'example' if count == 1 else 'examples'}"
    return f"microbatches of {budget.tokens} tokens{examples}"
