"""Steps are built ahead by a thread; what comes out, and where it stops, is as if there were none."""

import threading

import numpy as np
import pytest

from isopref.data.packing import Budget
from isopref.data.table import PairTable
from isopref.engine.loader import STEPS_AHEAD, PairLoader
from isopref.engine.step import Step
from isopref.testing.models import random_pairs
from isopref.types import IntArray


def loader(pairs: int = 23) -> PairLoader:
    made = PairLoader(
        PairTable.from_tokens(random_pairs(pairs, seed=0, longest=9)),
        batch_pairs=4,
        budget=Budget("shared", 200),
        weighting="token",
        seed=3,
        work_dir="",
    )
    made.reshuffle(epoch=1)
    return made


def indices(batch: dict[str, Step]) -> list[int]:
    return sorted(int(i) for work in batch["step"].work for i in work.index)


def test_every_pair_comes_once_in_the_order_of_the_schedule() -> None:
    made = loader()
    batches = [indices(batch) for batch in made]
    assert [len(batch) for batch in batches] == [4, 4, 4, 4, 4, 3]
    assert sorted(i for batch in batches for i in batch) == list(range(23))


def test_a_loader_that_goes_on_gives_the_rest() -> None:
    whole = [indices(batch) for batch in loader()]
    made = loader()
    made.batches_processed = 4
    assert [indices(batch) for batch in made] == whole[4:]


def test_no_thread_is_left_when_the_reader_stops_early() -> None:
    before = threading.active_count()
    batches = iter(loader())
    next(batches)
    assert threading.active_count() == before + 1
    batches.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before


def test_it_works_a_few_steps_ahead_and_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    made, built, step = loader(200), [], PairLoader.step

    def count(self: PairLoader, index: IntArray) -> Step:
        built.append(np.asarray(index))
        return step(self, index)

    monkeypatch.setattr(PairLoader, "step", count)
    batches = iter(made)
    for _ in range(5):
        next(batches)
    batches.close()  # type: ignore[attr-defined]
    assert 5 <= len(built) <= 5 + STEPS_AHEAD


def test_a_fault_in_the_thread_reaches_the_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: PairLoader, index: IntArray) -> Step:
        raise RuntimeError("no such pair")

    monkeypatch.setattr(PairLoader, "step", fail)
    with pytest.raises(RuntimeError, match="no such pair"):
        next(iter(loader()))
