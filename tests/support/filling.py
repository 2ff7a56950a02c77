"""A small reference and its store, to be filled, killed and damaged by tests."""

import os
import signal
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from isopref.data.packing import Budget, RowKind
from isopref.data.table import PairTable
from isopref.errors import ModelError
from isopref.evaluate import Evaluation, evaluate
from isopref.models.policy import Policy
from isopref.objectives.loss import pair_loss
from isopref.reference import store as store_module
from isopref.reference.fill import fill, find, proven
from isopref.reference.key import identity, weights_digest
from isopref.reference.store import Store, key_of, records
from isopref.score import TableLogps, score_table
from isopref.testing.models import random_pairs, tiny_model
from isopref.types import FloatArray

CPU = torch.device("cpu")
NUM_PAIRS = 60


@cache
def policy() -> Policy:
    return Policy(tiny_model("gpt2", dtype=torch.float64))


@cache
def table(num_pairs: int = NUM_PAIRS) -> PairTable:
    return PairTable.from_tokens(random_pairs(num_pairs, seed=5))


def open_store(root: Path) -> Store:
    return Store.open(root, identity(policy().model, compute_dtype="float64"), {"reference": "tiny"})


def fill_pair_by_pair(
    root: Path, shard_s: float = 0.0, num_pairs: int = NUM_PAIRS
) -> tuple[TableLogps, int, list[str]]:
    """Look up and score one pair at a time, each of them a shard: so a pair has the same bits whatever else is missing.

    Returns the log-probabilities, how many pairs were scored, and the damage that was met.
    """
    torch.set_num_threads(1)
    store = open_store(root)
    known = find(store, table(num_pairs), device=CPU)
    num_missing = len(known.missing)
    filled = known
    if num_missing:
        budget = Budget("shared", 4096, pairs=1)
        filled = fill(store, table(num_pairs), known, policy(), budget, device=CPU, shard_s=shard_s)
    return proven(filled, table(num_pairs)), num_missing, list(known.damage)


def write_and_die(root: Path, at_line: int) -> None:
    """Add a shard of one pair, and be killed before line number `at_line` of our code on the way."""
    store, count = Store.open(root, {}, {}), 0

    def trace(frame: FrameType, event: str, _value: object) -> Any:
        nonlocal count
        if frame.f_code.co_filename != store_module.__file__:
            return None
        count += event == "line"
        if count == at_line:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)
    store.write(records(np.arange(16, dtype=np.uint8)[None], np.array([[-1.0, -2.0]]), np.array([[3, 4]])))
    sys.settrace(None)


def model_key(architecture: str) -> str:
    """The key of a tiny model; all ranks call this together."""
    return key_of(identity(tiny_model(architecture), compute_dtype="float32"))


def key_with_other_weights(architecture: str) -> str:
    """What comes of it when every rank is a machine of its own, and the second one has other weights in one tensor."""
    model = tiny_model(architecture)
    if dist.get_rank() == 1:
        with torch.no_grad():
            list(model.parameters())[3].flatten()[0] += 1
    with mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "1"}):
        try:
            return weights_digest(model)
        except ModelError as error:
            return str(error)


def fill_on_ranks(roots: Sequence[Path], num_pairs: int, rows: RowKind = "shared") -> tuple[TableLogps, int, list[str]]:
    """Look up and score on all ranks, rank r in the folder roots[r]. Returns what `fill_pair_by_pair` does."""
    rank = dist.get_rank()
    store = open_store(roots[rank])
    with mock.patch.dict(os.environ, {} if roots[0] == roots[rank] else {"LOCAL_RANK": "0"}):
        known = find(store, table(num_pairs), device=CPU)
        filled = known
        if len(known.missing):
            filled = fill(store, table(num_pairs), known, policy(), Budget(rows, 300), device=CPU)
    return proven(filled, table(num_pairs)), len(known.missing), list(known.damage)


def find_kept_on_ranks(kept: Sequence[Path], root: Path) -> FloatArray:
    """Look up in `root` beside what is kept, which rank r sees in kept[r]."""
    found = find(open_store(kept[dist.get_rank()]), table(), device=CPU)
    return find(open_store(root), table(), device=CPU, kept=found).logps


def evaluate_on_ranks(rows: RowKind) -> Evaluation:
    """Another policy against the reference, every pair scored on some rank."""
    other = Policy(tiny_model("gpt2", dtype=torch.float64, seed=1))
    new, old = (score_table(one, table(), Budget(rows, 300), device=CPU) for one in (other, policy()))
    sources = np.arange(NUM_PAIRS) % 2
    return evaluate(
        new,
        old,
        table().lengths,
        table().weights,
        loss=pair_loss("sigmoid", beta=0.3),
        weighting="token",
        sources_N=sources,
        source_names=("even", "odd"),
    )
