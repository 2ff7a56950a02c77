"""The reference's log-probabilities of a table's answers: looked up if cached, scored otherwise.

Ranks may share one folder or have one per machine; log-probabilities that any rank finds are shared with all.

I: items, which are the answers of a table and, for LD-DPO, heads of them (answers.py).
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from isopref.batch.packing import Budget
from isopref.errors import CacheError
from isopref.ranks import num_ranks
from isopref.reference.answers import Items, Unscored, one_of_each
from isopref.reference.store import Store, as_keys, records
from isopref.score import TableLogps, score_table
from isopref.types import FloatArray, IntArray

SHARD_ANSWERS = 131072  # approximate maximum of answers per shard
SHARD_S = 20.0  # seconds of work that a kill may lose


@dataclass(frozen=True)
class Known:
    """What a store knows of some items, the same on all ranks."""

    logps: FloatArray  # I; NaN if unknown
    missing: IntArray  # items to score, without duplicates
    damage: tuple[str, ...]  # descriptions of damaged shards


def find(store: Store, items: Items, *, device: torch.device, kept: Known | None = None) -> Known:
    """Look up the items of a table; values in `kept` take precedence. All ranks call this together.

    Raises CacheError if the stored values cannot be right.
    """
    known_I, found, damage = store.look_up(items.ids)
    damage = [f"{text}. Its answers will be looked up elsewhere or scored again" for text in damage]
    damage = [*store.repaired, *damage]
    wrong = known_I & (found["num_tokens"] != items.num_tokens)
    if wrong.any():
        first = int(np.flatnonzero(wrong)[0])
        raise CacheError(
            f"{store.folder}: {int(wrong.sum())} of {len(items)} answers differ in token count from the table, "
            f"first in {items.origin(first)}: {found['num_tokens'][first]} stored, {items.num_tokens[first]} in the "
            "table. The store is wrong. Remove the folder."
        )
    logp_I = _known_anywhere(np.where(known_I, found["logp"], -np.inf), device)
    logp_I[~np.isfinite(logp_I)] = np.nan
    if kept is not None:  # after the reduction, in which another rank's stored value could beat a kept one
        logp_I = np.where(np.isnan(kept.logps), logp_I, kept.logps)
    unknown = np.flatnonzero(np.isnan(logp_I))
    return Known(logp_I, one_of_each(items, unknown), tuple(sorted(set(_of_all_ranks(damage)))))


def fill(
    store: Store,
    items: Items,
    known: Known,
    model: nn.Module,
    budget: Budget,
    *,
    device: torch.device,
    progress: Callable[[int], None] | None = None,
    shard_s: float = SHARD_S,
) -> Known:
    """Score missing items and store the results as they come. All ranks call this together; each writes its own.

    `progress` is called with the number of answers done since the last call.
    """
    store.sweep()
    unscored = Unscored(items, known.missing, budget)
    shelf = _Shelf(store, items, unscored.items_in_order, shard_s)
    scored = score_table(model, unscored, budget, device=device, progress=progress, scored=shelf.put)
    shelf.flush()
    keys = as_keys(items.ids[unscored.items_in_order])
    order = np.argsort(keys)
    logp_I = known.logps.copy()
    unknown = np.flatnonzero(np.isnan(logp_I))
    logp_I[unknown] = scored.answers[order[np.searchsorted(keys, as_keys(items.ids[unknown]), sorter=order)]]
    _complete_this_machine(store, items, logp_I)
    return Known(logp_I, known.missing[:0], ())


def proven(known: Known, items: Items) -> TableLogps:
    """The log-probabilities of all answers. Raises CacheError if one is missing or not finite."""
    bad = np.flatnonzero(~np.isfinite(known.logps))
    if len(bad):
        raise CacheError(
            f"the reference gives {len(bad)} of {len(items)} answers no finite log-probability, first in "
            f"{items.origin(int(bad[0]))}: {known.logps[bad[0]]}. Try a different dtype (model.dtype, "
            "model.compute_dtype), or remove the example."
        )
    answers, heads, mismatched = np.split(known.logps, np.cumsum([items.num_answers, items.num_heads]))
    return TableLogps(answers, heads.reshape(2, -1) if items.heads else None, mismatched if items.mismatched else None)


@dataclass
class _Shelf:
    """Collects this rank's scores on the device and stores them from time to time, so that the host rarely waits."""

    store: Store
    items: Items
    order: IntArray  # the items being scored, in scoring order
    shard_s: float
    _parts: list[tuple[IntArray, Tensor]] = field(default_factory=list)
    _since: float = field(default_factory=time.monotonic)

    def put(self, answers: IntArray, logp_A: Tensor) -> None:
        self._parts.append((self.order[answers], logp_A))
        num_answers = sum(len(part) for part, _ in self._parts)
        if num_answers >= SHARD_ANSWERS or time.monotonic() - self._since >= self.shard_s:
            self.flush()

    def flush(self) -> None:
        if self._parts:
            some = np.concatenate([part for part, _ in self._parts])
            _write(self.store, self.items, some, torch.cat([logps for _, logps in self._parts]).cpu().numpy())
        self._parts, self._since = [], time.monotonic()


def _write(store: Store, items: Items, some: IntArray, logp: FloatArray) -> None:
    """Store items, except those with non-finite values."""
    finite = np.isfinite(logp)
    some = some[finite]
    store.write(records(items.ids[some], logp[finite], items.num_tokens[some]))


def complete(store: Store, items: Items, logp_I: FloatArray) -> None:
    """Add the items that a store lacks."""
    some = one_of_each(items, np.flatnonzero(~store.look_up(items.ids)[0]))
    _write(store, items, some, logp_I[some])


def _complete_this_machine(store: Store, items: Items, logp_I: FloatArray) -> None:
    """One rank per machine stores what other machines knew or scored, if its own folder lacks it."""
    if num_ranks() > 1:
        dist.barrier()  # until every rank has written its own
        if os.environ.get("LOCAL_RANK", "0") == "0":
            complete(store, items, logp_I)


def _known_anywhere(logp_I: FloatArray, device: torch.device) -> FloatArray:
    """The log-probabilities that at least one rank knows; -inf where none does."""
    if num_ranks() == 1:
        return logp_I
    values = torch.from_numpy(logp_I).to(device)
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    reduced: NDArray[np.float64] = values.cpu().numpy()
    return reduced


def _of_all_ranks(messages: list[str]) -> list[str]:
    if num_ranks() == 1:
        return messages
    gathered: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, messages)
    return [text for of_rank in gathered for text in of_rank]
