"""From a table of pairs to the reference's log-probabilities: looked up where they are known, scored where not.

Ranks may see one folder or one for each machine; what any of them knows, all know.

N: pairs of a table, M: pairs of it that are to be scored, P: pairs of a part of those.
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

from isopref.data.packing import Budget
from isopref.data.table import PairTable
from isopref.errors import CacheError
from isopref.ranks import num_ranks
from isopref.reference.store import Store, as_keys, records
from isopref.score import TableLogps, score_table
from isopref.types import CHOSEN, FloatArray, IntArray

SHARD_PAIRS = 65536  # most pairs of a shard, about
SHARD_S = 20.0  # seconds of work that a kill may cost


@dataclass(frozen=True)
class Known:
    """What a store knows of a table, the same on all ranks."""

    logps: FloatArray  # N, 2; NaN where it is not known
    missing: IntArray  # M: pairs to score; of equal pairs, one
    damage: tuple[str, ...]  # what was found damaged, in words


def find(store: Store, table: PairTable, *, device: torch.device, kept: Known | None = None) -> Known:
    """Look a table up; what is `kept` stays. All ranks call this together.

    Raises CacheError where what is stored cannot be right.
    """
    known_N, found, damage = store.look_up(table.ids)
    damage = [f"{text}. Its pairs are looked up elsewhere, or scored again" for text in damage]
    damage = [*(f"{text}. Rewritten" for text in store.repaired), *damage]
    wrong = known_N & (found["num_tokens"] != table.lengths[:, CHOSEN:]).any(axis=1)
    if wrong.any():
        first = int(np.flatnonzero(wrong)[0])
        raise CacheError(
            f"{store.folder}: {int(wrong.sum())} of {len(table)} pairs have other token counts than in the table, the "
            f"first one {table.origin(first)}: {found['num_tokens'][first].tolist()}, not "
            f"{table.lengths[first, CHOSEN:].tolist()}. Remove that folder."
        )
    logp_N2 = _known_anywhere(np.where(known_N[:, None], found["logp"], -np.inf), device)
    logp_N2[~np.isfinite(logp_N2)] = np.nan
    if kept is not None:  # only now: a rank that does not see what another one keeps may not bring the store's
        logp_N2 = np.where(np.isnan(kept.logps), logp_N2, kept.logps)
    unknown = np.flatnonzero(np.isnan(logp_N2).any(axis=1))
    return Known(logp_N2, _one_of_each(table, unknown), tuple(sorted(set(_of_all_ranks(damage)))))


def fill(
    store: Store,
    table: PairTable,
    known: Known,
    model: nn.Module,
    budget: Budget,
    *,
    device: torch.device,
    ld_alpha: float = 1.0,
    progress: Callable[[int], None] | None = None,
    shard_s: float = SHARD_S,
) -> Known:
    """Score what is missing, and store it as it comes. All ranks call this together, each writes what it scored."""
    store.sweep()
    missing = table.select(known.missing)
    shelf = _Shelf(store, missing, shard_s)
    scored = score_table(model, missing, budget, device=device, ld_alpha=ld_alpha, progress=progress, scored=shelf.put)
    shelf.flush()
    logp_M2 = np.stack([scored.chosen, scored.rejected], axis=1)
    keys = as_keys(missing.ids)
    order = np.argsort(keys)
    logp_N2 = known.logps.copy()
    rows = np.flatnonzero(np.isnan(logp_N2).any(axis=1))
    logp_N2[rows] = logp_M2[order[np.searchsorted(keys, as_keys(table.ids[rows]), sorter=order)]]
    _complete_this_machine(store, table, logp_N2)
    return Known(logp_N2, known.missing[:0], ())


def proven(known: Known, table: PairTable) -> TableLogps:
    """The log-probabilities of all pairs. Raises CacheError where one is not there, or not a number."""
    bad = np.flatnonzero(~np.isfinite(known.logps).all(axis=1))
    if len(bad):
        raise CacheError(
            f"the reference gives {len(bad)} of {len(table)} pairs no finite log-probability, the first one "
            f"{table.origin(int(bad[0]))}: {known.logps[bad[0]].tolist()}. Use another number type "
            "(model.dtype, model.compute_dtype), or leave the pair out."
        )
    chosen, rejected = known.logps.T.copy()
    return TableLogps(chosen, rejected)


@dataclass
class _Shelf:
    """Collects what this rank scores, on the device, and stores it every so often: only then the host waits."""

    store: Store
    table: PairTable
    shard_s: float
    _parts: list[tuple[IntArray, Tensor]] = field(default_factory=list)
    _since: float = field(default_factory=time.monotonic)

    def put(self, index: IntArray, logps_2P: Tensor) -> None:
        self._parts.append((index, logps_2P))
        num_pairs = sum(len(part) for part, _ in self._parts)
        if num_pairs >= SHARD_PAIRS or time.monotonic() - self._since >= self.shard_s:
            self.flush()

    def flush(self) -> None:
        if self._parts:
            index = np.concatenate([part for part, _ in self._parts])
            logp_P2 = torch.cat([logps for _, logps in self._parts], dim=1).T.cpu().numpy()
            _write(self.store, self.table, index, logp_P2)
        self._parts, self._since = [], time.monotonic()


def _write(store: Store, table: PairTable, index: IntArray, logp_P2: FloatArray) -> None:
    """Store some pairs of a table; what is not finite is not stored."""
    finite = np.isfinite(logp_P2).all(axis=1)
    index = index[finite]
    store.write(records(table.ids[index], logp_P2[finite], table.lengths[index, CHOSEN:]))


def complete(store: Store, table: PairTable, logp_N2: FloatArray) -> None:
    """Add the pairs of a table that a store does not have."""
    rows = _one_of_each(table, np.flatnonzero(~store.look_up(table.ids)[0]))
    _write(store, table, rows, logp_N2[rows])


def _complete_this_machine(store: Store, table: PairTable, logp_N2: FloatArray) -> None:
    """One rank of each machine stores what is known or was scored elsewhere, where its folder does not show that."""
    if num_ranks() > 1:
        dist.barrier()  # until everyone has written its share
        if os.environ.get("LOCAL_RANK", "0") == "0":
            complete(store, table, logp_N2)


def _one_of_each(table: PairTable, rows: IntArray) -> IntArray:
    """Of rows whose pairs are equal, the first."""
    _, first = np.unique(as_keys(table.ids[rows]), return_index=True)
    return rows[np.sort(first)]


def _known_anywhere(logp_N2: FloatArray, device: torch.device) -> FloatArray:
    """What at least one rank knows (-inf: it does not)."""
    if num_ranks() == 1:
        return logp_N2
    values = torch.from_numpy(logp_N2).to(device)
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    reduced: NDArray[np.float64] = values.cpu().numpy()
    return reduced


def _of_all_ranks(messages: list[str]) -> list[str]:
    if num_ranks() == 1:
        return messages
    gathered: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, messages)
    return [text for of_rank in gathered for text in of_rank]
