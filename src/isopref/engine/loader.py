"""PairLoader: global batches of a pair table for OLMo-core's Trainer, each rank's share planned and built.

Which pairs form a batch is the schedule's business and the same for every layout; the loader's state is therefore only
a place in it, and resumes on any number of ranks.
"""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from olmo_core.data import DataLoaderBase

from isopref.data import schedule
from isopref.data.packing import Budget, check_budget, plan_step
from isopref.data.table import PairTable
from isopref.engine.step import Step, build_step
from isopref.errors import RunError
from isopref.normalize import Weighting
from isopref.types import IntArray

STEPS_AHEAD = 2


class PairLoader(DataLoaderBase):
    """Yields {"step": Step}. The batch size is in pairs, over all ranks.

    A thread plans and builds a few steps ahead. `pin_memory` puts them where a GPU copies from without a wait.
    """

    def __init__(
        self,
        table: PairTable,
        *,
        batch_pairs: int,
        budget: Budget,
        weighting: Weighting,
        seed: int,
        work_dir: str,
        dp_rank: int = 0,
        dp_world_size: int = 1,
        attention_share: float = 0.0,
        pin_memory: bool = False,
    ):
        super().__init__(work_dir=work_dir, global_batch_size=batch_pairs, dp_world_size=dp_world_size, dp_rank=dp_rank)
        check_budget(table.lengths, budget)
        self.table = table
        self.budget = budget
        self.weighting: Weighting = weighting
        self.seed = seed
        self.attention_share = attention_share
        self.pin_memory = pin_memory

    @property
    def total_batches(self) -> int:
        return schedule.num_batches(len(self.table), self.global_batch_size)

    def reshuffle(self, epoch: int | None = None, **_kwargs: Any) -> None:
        # Runs after load_state_dict too: the place inside the epoch stays.
        if epoch is None:
            raise ValueError("the epoch must be given")
        self._epoch = epoch

    def _iter_batches(self) -> Iterator[dict[str, Any]]:
        order = schedule.epoch_order(len(self.table), seed=self.seed, epoch=self.epoch)
        numbers = range(self.batches_processed, self.total_batches)
        with ThreadPoolExecutor(1, "isopref-rows") as worker:
            ahead: deque[tuple[IntArray, Budget, Future[Step]]] = deque()
            try:
                for number in numbers:
                    index = schedule.batch(order, self.global_batch_size, number)
                    ahead.append((index, self.budget, worker.submit(self.step, index)))
                    if len(ahead) > STEPS_AHEAD:
                        yield {"step": self._built(*ahead.popleft())}
                while ahead:
                    yield {"step": self._built(*ahead.popleft())}
            finally:
                worker.shutdown(wait=False, cancel_futures=True)

    def _built(self, index: IntArray, budget: Budget, step: Future[Step]) -> Step:
        """A step that was built ahead; anew, where the budget has changed since."""
        return step.result() if budget == self.budget else self.step(index)

    def step(self, index: IntArray) -> Step:
        """This rank's share of the global batch `index`."""
        plan = plan_step(
            self.table.lengths[index],
            self.budget,
            num_ranks=self.dp_world_size,
            attention_share=self.attention_share,
        )
        step = build_step(self.table, index, plan, self.budget.kind, self.weighting, rank=self.dp_rank)
        return step.pinned() if self.pin_memory else step

    def get_mock_batch(self) -> dict[str, Any]:
        """The longest pairs that fill one microbatch on every rank, to meet a lack of memory early. CPU: one pair."""
        tokens = self.table.lengths.sum(axis=1)
        longest = np.argsort(-tokens, kind="stable")
        wanted = self.budget.tokens * self.dp_world_size if torch.cuda.is_available() else 1
        count = int(np.searchsorted(np.cumsum(tokens[longest]), wanted)) + 1
        return {"step": self.step(longest[:count])}

    def global_num_tokens_in_batch(self, batch: dict[str, Any]) -> int:
        return int(batch["step"].num_tokens)

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "batches_processed": self.batches_processed, **self._identity()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name, value in self._identity().items():
            if state_dict[name] != value:
                raise RunError(
                    f"--resume: the checkpoint was trained with {name} {state_dict[name]}, this run has {value}. Use "
                    "the data and the settings of the first run (its config.yaml), or start anew in another run.folder."
                )
        self._epoch = state_dict["epoch"]
        self.batches_processed = state_dict["batches_processed"]

    def _identity(self) -> dict[str, Any]:
        return {
            "pairs": len(self.table),
            "data": self.table.digest,
            "batch_pairs": self.global_batch_size,
            "seed": self.seed,
        }
