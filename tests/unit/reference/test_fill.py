"""Filling a store: what is missing is scored, once; kills and damage change nothing but the time it takes."""

import itertools
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from isopref.batch.packing import Budget
from isopref.data.table import ExampleTable
from isopref.errors import CacheError, ConfigError
from isopref.reference.answers import Items
from isopref.reference.fill import Known, fill, find, proven
from isopref.reference.store import Store, records
from isopref.score import TableLogps
from isopref.testing import oracle
from isopref.testing.models import random_pairs, with_context
from support.filling import CPU, NUM_PAIRS, fill_pair_by_pair, open_store, policy, table, write_and_die
from support.forked import server

BUDGET = Budget("shared", 4096)


def same_bits(a: TableLogps, b: TableLogps) -> bool:
    return a.chosen.tobytes() == b.chosen.tobytes() and a.rejected.tobytes() == b.rejected.tobytes()


class Counted(torch.nn.Module):
    """The policy, counting the answers it scores."""

    def __init__(self) -> None:
        super().__init__()
        self.policy, self.num_answers = policy(), 0

    def forward(self, microbatch: Any, *needs: Any) -> Any:
        self.num_answers += microbatch.num_answers
        return self.policy(microbatch, *needs)


def filled(store: Store, pairs: ExampleTable, budget: Budget = BUDGET) -> tuple[TableLogps, int]:
    """Looked up or scored; and how many answers went through the model."""
    model, items = Counted(), Items(pairs)
    known = find(store, items, device=CPU)
    if len(known.missing):
        known = fill(store, items, known, model, budget, device=CPU)
    return proven(known, items), model.num_answers


# --- what is scored --------------------------------------------------------------------------------


def test_the_values_are_the_oracles(tmp_path: Path) -> None:
    found, count = filled(open_store(tmp_path), table())
    with torch.no_grad(), policy().plain():
        expected = oracle.pair_logps(policy().model, random_pairs(NUM_PAIRS, seed=5))
    assert count == 2 * NUM_PAIRS
    assert found.chosen == pytest.approx(expected.chosen.numpy(), rel=1e-10)
    assert found.rejected == pytest.approx(expected.rejected.numpy(), rel=1e-10)


@pytest.mark.parametrize("fractions", [False, True])
def test_answers_with_context_and_their_heads_are_the_oracles(tmp_path: Path, fractions: bool) -> None:
    plain = [pair.example for pair in random_pairs(20, seed=5)]
    examples = with_context(plain, fractions=fractions)
    store = open_store(tmp_path)
    filled(store, ExampleTable.from_tokens(plain))  # the same tokens, all trained: other answers
    items = Items(ExampleTable.from_tokens(examples), heads=True)
    known = find(store, items, device=CPU)
    found = proven(fill(store, items, known, policy(), BUDGET, device=CPU), items)
    compared = oracle.comparisons(examples)
    with torch.no_grad(), policy().plain():
        whole, heads = (oracle.pair_logps(policy().model, compared, alpha) for alpha in (1.0, 0.0))
    assert found.chosen == pytest.approx(whole.chosen.numpy(), rel=1e-10)
    assert found.rejected == pytest.approx(whole.rejected.numpy(), rel=1e-10)
    assert found.heads is not None
    assert found.heads[0] == pytest.approx(heads.chosen.numpy(), rel=1e-10)
    assert found.heads[1] == pytest.approx(heads.rejected.numpy(), rel=1e-10)


@pytest.mark.parametrize("kind", ["shared", "packed", "padded", "padded_separate"])
def test_the_second_time_nothing_is_scored(tmp_path: Path, kind: Any) -> None:
    first, _ = filled(open_store(tmp_path), table())
    again, count = filled(open_store(tmp_path), table(), Budget(kind, 200))
    assert count == 0
    assert same_bits(first, again)


def test_a_table_that_grows_costs_the_new_pairs_only(tmp_path: Path) -> None:
    everything = table()
    small, count = filled(open_store(tmp_path), everything.select(range(40)))
    assert count == 80
    whole, count = filled(open_store(tmp_path), everything)
    assert count == 2 * NUM_PAIRS - 80
    assert whole.chosen[:40].tobytes() == small.chosen.tobytes()
    some, count = filled(open_store(tmp_path), everything.select([59, 3, 41]))
    assert count == 0
    assert some.rejected.tolist() == whole.rejected[[59, 3, 41]].tolist()


def test_pairs_that_are_there_twice_are_scored_once(tmp_path: Path) -> None:
    pairs = table().select([0, 1, 0, 2, 1, 0])
    found, count = filled(open_store(tmp_path), pairs)
    assert count == 6
    alone, _ = filled(open_store(tmp_path), table().select([0, 1, 2]))
    assert found.chosen.tolist() == alone.chosen[[0, 1, 0, 2, 1, 0]].tolist()


def test_an_answer_of_several_pairs_is_scored_once(tmp_path: Path) -> None:
    """One answer against five others, each pair a record of its own; the prompt is computed once for all of them."""
    (first,) = random_pairs(1, seed=8)
    others = [pair.rejected for pair in random_pairs(5, seed=9)]
    pairs = ExampleTable.from_tokens([first._replace(rejected=other) for other in others])
    found, count = filled(open_store(tmp_path), pairs)
    assert count == 6
    assert len(set(found.chosen.tolist())) == 1
    with torch.no_grad(), policy().plain():
        expected = [float(oracle.sequence_logp(policy().model, first.prompt, other)) for other in others]
    assert found.rejected.tolist() == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("kind", ["shared", "packed", "padded", "padded_separate"])
def test_heads_are_those_of_the_shorter_length(tmp_path: Path, kind: Any) -> None:
    pairs = random_pairs(12, seed=5)
    items = Items(ExampleTable.from_tokens(pairs), heads=True)
    store, model = open_store(tmp_path), Counted()
    found = proven(fill(store, items, find(store, items, device=CPU), model, Budget(kind, 300), device=CPU), items)
    with torch.no_grad(), policy().plain():
        expected = oracle.pair_logps(policy().model, pairs, 0.0)
    assert found.heads is not None
    assert found.heads[0].tolist() == pytest.approx(expected.chosen.tolist(), rel=1e-10)
    assert found.heads[1].tolist() == pytest.approx(expected.rejected.tolist(), rel=1e-10)
    assert model.num_answers == 24 + sum(len(pair.chosen) != len(pair.rejected) for pair in pairs)
    assert filled(store, items.table)[1] == 0  # whole answers are there without their heads, too


def test_one_other_token_is_another_answer(tmp_path: Path) -> None:
    pairs = random_pairs(10, seed=8)
    filled(open_store(tmp_path), ExampleTable.from_tokens(pairs))
    for part in range(3):
        changed = [*pairs]
        tokens = changed[4][part].copy()
        tokens[-1] = 3 if tokens[-1] != 3 else 4
        changed[4] = changed[4]._replace(**{("prompt", "chosen", "rejected")[part]: tokens})
        assert filled(open_store(tmp_path), ExampleTable.from_tokens(changed))[1] == (2 if part == 0 else 1)


def test_the_border_between_prompt_and_answer_is_part_of_a_pair(tmp_path: Path) -> None:
    """The same two sequences, but one token of the answers has become the prompt's."""
    (pair,) = random_pairs(1, seed=8)
    first = np.array([7])
    longer = pair._replace(chosen=np.concatenate([first, pair.chosen]), rejected=np.concatenate([first, pair.rejected]))
    shorter = pair._replace(prompt=np.concatenate([pair.prompt, first]))
    filled(open_store(tmp_path), ExampleTable.from_tokens([longer]))
    assert filled(open_store(tmp_path), ExampleTable.from_tokens([shorter]))[1] == 2


def test_what_is_kept_stays(tmp_path: Path) -> None:
    """The rest comes from the store, and what neither has is missing."""
    size = 2 * NUM_PAIRS
    kept = Known(np.full(size, np.nan), np.arange(size), ())
    kept.logps[:20] = -5.0
    store = open_store(tmp_path)
    store.write(records(table().answer_ids[10:40], np.full(30, -4.0), table().lengths.answer[10:40]))
    known = find(store, Items(table()), device=CPU, kept=kept)
    assert known.logps[:20].tolist() == [-5.0] * 20
    assert known.logps[20:40].tolist() == [-4.0] * 20
    assert known.missing.tolist() == list(range(40, size))


def test_a_pair_that_is_too_long_is_named(tmp_path: Path) -> None:
    """Before anything is scored."""
    model, store = Counted(), open_store(tmp_path)
    items, sequence = Items(table()), table().lengths.sequence
    longest = int(table().lengths.of_answer[sequence.argmax()])
    missing = find(store, items, device=CPU)
    budget = Budget("shared", int(sequence.max()) - 1)
    with pytest.raises(ConfigError, match=rf"Budget\.tokens is {budget.tokens}, but pair {longest} takes "):
        fill(store, items, missing, model, budget, device=CPU)
    assert model.num_answers == 0


# --- what may not be used --------------------------------------------------------------------------


def test_a_value_that_is_no_number_is_refused_and_not_stored(tmp_path: Path) -> None:
    class Broken(Counted):
        def forward(self, microbatch: Any, *needs: Any) -> Any:
            readout = super().forward(microbatch, *needs)
            readout.logp[-1] = float("nan")
            return readout

    store = open_store(tmp_path)
    items = Items(table())
    known = fill(store, items, find(store, items, device=CPU), Broken(), Budget("shared", 4096, 30), device=CPU)
    message = r"2 of 120 answers no finite log-probability, first in pair \d+: .*nan"
    with pytest.raises(CacheError, match=message):
        proven(known, items)
    assert store.num_answers() == 2 * NUM_PAIRS - 2


def test_a_record_with_other_token_counts_is_refused(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    counts = table().lengths.answer.copy()
    counts[15] += 1
    store.write(records(table().answer_ids, np.zeros(2 * NUM_PAIRS), counts))
    with pytest.raises(CacheError, match=r"1 of 120 answers differ in token count .* pair 7: .*Remove the folder\."):
        find(store, Items(table()), device=CPU)


def test_what_is_missing_is_never_made_up() -> None:
    size = 2 * NUM_PAIRS
    with pytest.raises(CacheError, match="120 of 120 answers"):
        proven(Known(np.full(size, np.nan), np.arange(size), ()), Items(table()))


# --- kills -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> TableLogps:
    logps, count, damage = fill_pair_by_pair(tmp_path_factory.mktemp("undisturbed"))
    assert (count, damage) == (NUM_PAIRS, [])
    return logps


def test_a_fill_that_is_killed_at_any_moment_goes_on_where_it_was(tmp_path: Path, undisturbed: TableLogps) -> None:
    """Ten processes are killed (SIGKILL) at random moments of their work."""
    rng = random.Random(0)
    left = []
    for attempt in range(10):
        root, num_shards = tmp_path / str(attempt), rng.randrange(NUM_PAIRS)
        process = server().Process(target=fill_pair_by_pair, args=(root,), daemon=True)
        process.start()
        while process.exitcode is None and len(list(root.glob("*/*.shard"))) < num_shards:
            time.sleep(0.0005)
        time.sleep(rng.uniform(0, 0.004))
        process.kill()
        process.join()
        store = open_store(root)
        assert store.problems() == []  # what is there is whole
        num_known, rest = divmod(store.num_answers(), 2)
        assert rest == 0  # both of a pair are in one shard
        logps, count, damage = fill_pair_by_pair(root, shard_s=1e9)
        assert damage == []
        assert count == NUM_PAIRS - num_known  # nothing is scored twice
        assert same_bits(logps, undisturbed)
        left.append(count)
    assert len({count for count in left if 0 < count < NUM_PAIRS}) >= 3, left  # it was met in the middle


def test_killed_before_any_line_of_writing_a_shard(tmp_path: Path) -> None:
    """The pair is there whole or not at all, and in the end it is there."""
    known = []
    for line in itertools.count(1):
        process = server().Process(target=write_and_die, args=(tmp_path / str(line), line), daemon=True)
        process.start()
        process.join(60)
        store = Store.open(tmp_path / str(line), {}, {})
        assert store.problems() == []
        known.append(store.num_answers())
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
    assert len(known) > 12
    assert known == sorted(known)
    assert known[0] == 0
    assert known[-2:] == [1, 1]  # once it has its name, nothing can take it away


def test_two_processes_fill_one_store(tmp_path: Path, undisturbed: TableLogps) -> None:
    both = [server().Process(target=fill_pair_by_pair, args=(tmp_path / "one",)) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(60)
        assert process.exitcode == 0
    logps, count, damage = fill_pair_by_pair(tmp_path / "one")
    assert (count, damage) == (0, [])
    assert same_bits(logps, undisturbed)


# --- damage ----------------------------------------------------------------------------------------


def test_200_flipped_bytes(tmp_path: Path, undisturbed: TableLogps) -> None:
    """Every one is met on the next start: named, repaired, and never used."""
    rng = random.Random(1)
    fill_pair_by_pair(tmp_path / "some", shard_s=0.0)
    store = open_store(tmp_path / "some")
    everything = store.read()[0]
    for shard in store.shards():
        shard.unlink()
    for part in np.split(everything, 6):  # shards of ten pairs, as a real one has many
        store.write(part)
    manifests = 0
    for _ in range(200):
        path = rng.choice([*store.shards(), store.manifest_file])
        content = bytearray(path.read_bytes())
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
        broken = store.problems()
        logps, count, damage = fill_pair_by_pair(tmp_path / "some", shard_s=1e9)
        assert same_bits(logps, undisturbed)
        if path == store.manifest_file:
            manifests += 1
            assert count == 0
            assert [text.split(": ")[0] for text in damage] == [str(path)] * len(broken)
        else:
            assert count == 10
            assert [text.split(": ")[0] for text in damage] == [str(path)]
        assert store.problems() == []
    assert 10 < manifests < 60


def test_a_store_that_vanishes_while_it_is_filled(tmp_path: Path, undisturbed: TableLogps) -> None:
    store = open_store(tmp_path)
    items = Items(table())
    known = find(store, items, device=CPU)

    class Vanishing(Counted):
        def forward(self, microbatch: Any, *needs: Any) -> Any:
            if self.num_answers == 60:
                shutil.rmtree(store.folder)
            return super().forward(microbatch, *needs)

    budget = Budget("shared", 4096, examples=1)
    logps = proven(fill(store, items, known, Vanishing(), budget, device=CPU, shard_s=0.0), items)
    assert same_bits(logps, undisturbed)
    assert store.num_answers() == 60
