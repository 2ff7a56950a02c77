"""Retry a step that runs out of memory with smaller microbatches: the microbatch size is layout, not math.

What is possible depends on where ranks synchronise. A single process can retry at any time. DDP ranks synchronise in
the backward pass of a step's last, smallest microbatch; before it they check that all got that far. FSDP ranks
synchronise in every layer, as do ranks that split rows, and DDP ranks with a coupled loss after its first pass. If one
of these fails, the others are stuck; even on one rank, FSDP cannot recover from a failed pass. In these cases the run
restarts with a size that may fit.
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
from isopref.ops.memory import ran_out
from isopref.places import write_whole

WAYS_OUT = (
    "Try: recompute activations (layout.checkpointing: full), offload them (layout.offload_activations: full), compute "
    "MLPs in tiles (layout.mlp_tile_tokens: 4096), shard the model over more GPUs (layout.parallel: fsdp), or shorten "
    "the pairs"
)

Before = Callable[[int], None]  # called with the number of a microbatch before it runs


class AgainError(Exception):
    """A rank ran out of memory before the ranks synchronised: all of them retry the step with smaller microbatches."""


class OomRetry:
    """Runs steps in microbatches that fit, shrinking them after an out-of-memory error.

    :param loader: plans batches; its budget is what shrinks.
    :param meets: DDP ranks synchronise before a step's last microbatch: gradients are reduced for each microbatch, a
        first pass without gradients comes before (see first_pass.py), or ranks split rows.
    :param asked: the requested layout. The size that fits it is kept in `file` for later starts.
    :param say: prints a message to the user.
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
        self._number: int | None = None  # of the running microbatch
        self._met = False
        self._recall()

    def run(
        self, step: Step, accumulate: Callable[[Step, Before], Tensor], drop: Callable[[], None]
    ) -> tuple[Step, Tensor]:
        """The step, and what `accumulate` returns for it. Out of memory, `drop` the partial result and retry."""
        while True:
            try:
                return step, self._attempt(step, accumulate)
            except AgainError:
                pass
            # Only here has the exception been released, and with it the tensors of the failed step.
            drop()
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            before = self.loader.budget
            self.loader.budget = self._smaller()
            self._keep()
            self.say(
                f"warning: a step ran out of memory with {_words(before)}. Retrying it with "
                f"{_words(self.loader.budget)}, also used from here on. The result does not change."
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
        """Check that all ranks got this far. Raises AgainError if one did not; RunError if one pair does not fit."""
        assert self.together is not None
        any_failed, alone = self.together.most(int(failed), -1 if pair is None else pair)
        self._met = True
        if any_failed:
            self._refuse(None if alone < 0 else alone)
            raise AgainError

    def _refuse(self, pair: int | None) -> None:
        """Raise RunError for a pair that does not fit even alone in a microbatch."""
        if pair is None:
            return
        table, kind = self.loader.table, self.loader.budget.kind
        raise RunError(
            f"{table.origin(pair)} does not fit into memory, even alone in its microbatch: "
            f"{tokens_alone(table.lengths, kind)[pair]} tokens in layout.rows: {kind} ({parts(table.lengths, pair)}). "
            f"{WAYS_OUT}: {shorter_pairs()}"
        )

    def _stop(self, step: Step, pair: int | None, error: Exception) -> NoReturn:
        self._refuse(pair)
        before = self.loader.budget
        self.loader.budget = self._smaller()
        self._keep(always=True)
        raise StartAgainError(
            f"out of memory with {_words(before)}, at a point where the step cannot be retried. The next start resumes "
            f"from the last checkpoint with {_words(self.loader.budget)}. isopref train and torchrun --max-restarts "
            "restart automatically; otherwise run the same command with --resume."
        ) from error

    def _smaller(self) -> Budget:
        """Half the tokens, but at least the longest pair; then one pair at a time. Raises RunError after that."""
        budget, lengths = self.loader.budget, self.loader.table.lengths
        longest = int(tokens_alone(lengths, budget.kind).max())
        if budget.tokens > longest:
            return replace(budget, tokens=max(longest, budget.tokens // 2))
        if budget.examples == 1:
            raise RunError(f"out of memory with {_words(budget)}, the smallest possible. {WAYS_OUT}: {shorter_pairs()}")
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
            self.say(f"layout: {_words(fits)}, because larger ones ran out of memory before ({self.file})")


def _words(budget: Budget) -> str:
    count = budget.examples
    examples = "" if count is None else f" and {count} {'example' if count == 1 else 'examples'}"
    return f"microbatches of {budget.tokens} tokens{examples}"
