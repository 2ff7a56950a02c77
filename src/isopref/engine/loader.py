"""ExampleLoader: global batches of a table for OLMo-core's Trainer, each rank's share planned and built.

The schedule decides which examples form a batch, whatever the layout. So the loader's state is only a position in the
schedule, and it resumes on any number of ranks.
"""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from types import NoneType
from typing import Any, get_args

import numpy as np
import torch
from olmo_core.data import DataLoaderBase

from isopref.batch.packing import Budget, Group, check_budget, plan_step, tokens_alone
from isopref.batch.step import Step, build_mismatched, build_step
from isopref.data import schedule
from isopref.data.mismatched import Mismatched
from isopref.data.table import ExampleTable
from isopref.engine.arguments import check_choice, check_count, check_kind
from isopref.errors import ConfigError, RunError
from isopref.examples import Lengths
from isopref.normalize import Weighting
from isopref.objectives.loss import Loss
from isopref.ranks import num_ranks, own_rank
from isopref.types import IntArray, Kind

WHERE = "ExampleLoader"
STEPS_AHEAD = 2


class ExampleLoader(DataLoaderBase):
    """Yields {"step": Step}: this rank's share of each global batch, in packed or padded rows.

    :param table: the pairs. The reference is scored for the same table.
    :param batch_size: examples (pairs) per step, over all ranks. The last batch of an epoch may have fewer.
    :param budget: the kind of rows, and how many tokens a microbatch of one rank may have. The gradient does not depend
        on it.
    :param weighting: the weight of a pair in the loss: "token", "completion", "example" or "gap".
    :param objective: the train module's objective, for whose terms batches are built. None: a loss of pairs.
    :param seed: of the order of the pairs, which differs from epoch to epoch.
    :param work_dir: the Trainer's working folder.
    :param dp_rank: which of the `dp_world_size` shares this process takes. None: its rank. With tensor or context
        parallelism, all ranks of a group take the same share.
    :param attention_share: the relative cost of attention (see `plan_step`), used to balance the work of ranks.
    :param pin_memory: build steps in pinned memory, for asynchronous copies to a GPU. None: if there is a GPU.

    A thread plans and builds a few steps ahead. Raises ConfigError.
    """

    def __init__(
        self,
        table: ExampleTable,
        *,
        batch_size: int,
        budget: Budget,
        work_dir: str,
        weighting: Weighting = "token",
        objective: Loss | None = None,
        seed: int = 0,
        dp_rank: int | None = None,
        dp_world_size: int | None = None,
        attention_share: float = 0.0,
        pin_memory: bool | None = None,
    ):
        check_kind(WHERE, "table", table, ExampleTable, "an ExampleTable, as in ExampleTable.from_tokens(pairs)")
        check_kind(WHERE, "budget", budget, Budget, 'a Budget, as in Budget("shared", 8192)')
        check_count(WHERE, "batch_size", batch_size)
        check_count(WHERE, "seed", seed, least=0)
        check_choice(WHERE, "weighting", weighting, get_args(Weighting))
        check_kind(WHERE, "objective", objective, (Loss, NoneType), 'what pair_loss returns, as in pair_loss("kto")')
        if not len(table):
            raise ConfigError(f"{WHERE}: the table has no pairs. Pass a table with at least one.")
        super().__init__(
            work_dir=work_dir,
            global_batch_size=batch_size,
            dp_world_size=num_ranks() if dp_world_size is None else dp_world_size,
            dp_rank=own_rank() if dp_rank is None else dp_rank,
        )
        check_budget(table.lengths, budget, name=table.origin)
        self.table = table
        self.budget = budget
        self.weighting: Weighting = weighting
        self.loss_kind: Kind = "pairs" if objective is None else objective.kind
        needs_mismatched = objective is not None and objective.needs_mismatched
        self.mismatched = Mismatched(table) if needs_mismatched else None
        self.seed = seed
        self.attention_share = attention_share
        self.pin_memory = torch.cuda.is_available() if pin_memory is None else pin_memory

    @property
    def total_batches(self) -> int:
        return schedule.num_batches(len(self.table), self.global_batch_size)

    def reshuffle(self, epoch: int | None = None, **_kwargs: Any) -> None:
        # This also runs after load_state_dict, so it must keep the position inside the epoch.
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
        """The step that was built ahead, or a new one if the budget has changed since."""
        return step.result() if budget == self.budget else self.step(index)

    def step(self, index: IntArray) -> Step:
        """This rank's share of the global batch `index`."""
        plan = self._plan(self.table.lengths.select(index))
        step = build_step(
            self.table, index, plan, self.budget.kind, self.weighting, rank=self.dp_rank, loss_kind=self.loss_kind
        )
        if self.mismatched is not None:
            plan = self._plan(self.mismatched.lengths.select(index))
            work = build_mismatched(self.mismatched, index, plan, self.budget.kind, rank=self.dp_rank)
            step = replace(step, mismatched=work)
        return step.pinned() if self.pin_memory else step

    def _plan(self, lengths: Lengths) -> list[list[Group]]:
        return plan_step(lengths, self.budget, num_ranks=self.dp_world_size, attention_share=self.attention_share)

    def get_mock_batch(self) -> dict[str, Any]:
        """The longest pairs that fill one microbatch on every rank, so that running out of memory happens early.

        On a CPU, one pair.
        """
        tokens = tokens_alone(self.table.lengths, self.budget.kind)
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
            if name not in state_dict:
                raise RunError(
                    f"the checkpoint has no {name}: another version of isopref wrote it. Finish the run with that "
                    "version, or start a new run in another folder."
                )
            if state_dict[name] != value:
                raise RunError(
                    f"the checkpoint was trained with {name} {state_dict[name]}, this run has {value}. "
                    "Resume with the data and settings of the first run, or start a new run in another folder."
                )
        self._epoch = state_dict["epoch"]
        self.batches_processed = state_dict["batches_processed"]

    def _identity(self) -> dict[str, Any]:
        return {
            "pairs": len(self.table),
            "data": self.table.digest,
            "batch_size": self.global_batch_size,
            "seed": self.seed,
        }
