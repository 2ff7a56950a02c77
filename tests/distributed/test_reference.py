"""Reference and evaluation over ranks: the same numbers, and what one rank knows all know."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid

from isopref.batch.packing import RowKind
from isopref.evaluate import Evaluation
from isopref.reference.store import records
from isopref.score import TableLogps
from isopref.testing import oracle
from isopref.testing.models import random_pairs, tiny_model
from isopref.testing.ranks import Ranks
from support.filling import (
    NUM_PAIRS,
    evaluate_on_ranks,
    fill_on_ranks,
    fill_pair_by_pair,
    find_kept_on_ranks,
    key_with_other_weights,
    model_key,
    open_store,
    policy,
    table,
)


def all_alike(found: list[tuple[TableLogps, int, list[str]]]) -> tuple[TableLogps, int, list[str]]:
    first = found[0]
    for other in found[1:]:
        assert other[0].chosen.tobytes() == first[0].chosen.tobytes()
        assert other[0].rejected.tobytes() == first[0].rejected.tobytes()
        assert other[1:] == first[1:]
    return first


@pytest.mark.parametrize("architecture", ["gpt2", "llama_tied"])
def test_ranks_share_the_hashing_and_agree(two_ranks: Ranks, architecture: str) -> None:
    assert set(two_ranks(model_key, architecture)) == {model_key(architecture)}


def test_machines_with_other_weights_are_refused(two_ranks: Ranks) -> None:
    for found in two_ranks(key_with_other_weights, "llama"):
        assert found.startswith("the machine of ranks 1 to 1 has different weights than rank 0")


def test_one_folder_for_all_ranks(two_ranks: Ranks, tmp_path: Path) -> None:
    alone, _, _ = fill_pair_by_pair(tmp_path / "alone")
    logps, count, _ = all_alike(two_ranks(fill_on_ranks, [tmp_path, tmp_path], NUM_PAIRS))
    assert count == NUM_PAIRS
    assert logps.chosen == pytest.approx(alone.chosen, rel=1e-10)
    store = open_store(tmp_path)
    assert store.num_answers() == 2 * NUM_PAIRS
    assert len(store.shards()) == 2  # each rank wrote its share, and nobody more
    # Any number of ranks and any rows find it.
    again, count, _ = all_alike(two_ranks(fill_on_ranks, [tmp_path, tmp_path], NUM_PAIRS, "padded"))
    assert (count, again.chosen.tobytes()) == (0, logps.chosen.tobytes())
    again, count, _ = fill_pair_by_pair(tmp_path)
    assert (count, again.chosen.tobytes()) == (0, logps.chosen.tobytes())


def test_a_folder_for_each_machine(two_ranks: Ranks, tmp_path: Path) -> None:
    """What one machine knows the other need not score; in the end each has everything."""
    roots = [tmp_path / "first", tmp_path / "second"]
    known, _, _ = fill_pair_by_pair(roots[1], num_pairs=20)
    logps, count, _ = all_alike(two_ranks(fill_on_ranks, roots, NUM_PAIRS))
    assert count == NUM_PAIRS - 20
    in_both = {pair.tobytes() for pair in table(20).ids} & {pair.tobytes() for pair in table().ids}
    at = [n for n, pair in enumerate(table().ids) if pair.tobytes() in in_both]
    assert len(at) == 20
    assert set(logps.chosen[at].tolist()) == set(known.chosen.tolist())
    assert [open_store(root).num_answers() for root in roots] == [2 * NUM_PAIRS] * 2
    assert all_alike(two_ranks(fill_on_ranks, roots, NUM_PAIRS))[1] == 0


def test_damage_is_told_by_all_ranks(two_ranks: Ranks, tmp_path: Path) -> None:
    before, _, _ = all_alike(two_ranks(fill_on_ranks, [tmp_path, tmp_path], NUM_PAIRS))
    shard = open_store(tmp_path).shards()[0]
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    after, count, damage = all_alike(two_ranks(fill_on_ranks, [tmp_path, tmp_path], NUM_PAIRS))
    assert 0 < count < NUM_PAIRS
    assert [text.split(": ")[0] for text in damage] == [str(shard)]
    assert after.chosen == pytest.approx(before.chosen, rel=1e-10)


def test_what_one_rank_keeps_all_keep(two_ranks: Ranks, tmp_path: Path) -> None:
    """Also where the folder does not show it to another rank yet."""
    kept, unseen, root = (tmp_path / name for name in ("kept", "unseen", "root"))
    ids, tokens = table().answer_ids, table().lengths.answer
    open_store(kept).write(records(ids, np.full(2 * NUM_PAIRS, -5.0), tokens)[:40])
    open_store(root).write(records(ids, np.full(2 * NUM_PAIRS, -4.0), tokens))
    for logps in two_ranks(find_kept_on_ranks, [unseen, kept], root):
        assert logps[:40].tolist() == [-5.0] * 40
        assert logps[40:].tolist() == [-4.0] * 80


# --- evaluation ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", ["shared", "padded"])
def test_evaluation_is_the_oracles_on_any_number_of_ranks(two_ranks: Ranks, rows: RowKind) -> None:
    first, second = two_ranks(evaluate_on_ranks, rows)
    alone = evaluate_on_ranks(rows)
    assert first == second
    check(first)
    check(alone)
    for name, figure in alone.figures().items():
        assert vars(first.figures()[name]) == pytest.approx(vars(figure), rel=1e-9), name


def check(found: Evaluation) -> None:
    """Against the definitions, one sequence at a time."""
    pairs = random_pairs(NUM_PAIRS, seed=5)
    with torch.no_grad(), policy().plain() as reference:
        new = oracle.pair_logps(tiny_model("gpt2", dtype=torch.float64, seed=1), pairs)
        ref = oracle.pair_logps(reference, pairs)
    chosen, rejected = 0.3 * (new.chosen - ref.chosen), 0.3 * (new.rejected - ref.rejected)
    loss = oracle.global_loss(-logsigmoid(chosen - rejected), oracle.weights(pairs, "token"))
    rewards = torch.cat([chosen, rejected]).numpy()
    tokens = [len(pair.chosen) for pair in pairs] + [len(pair.rejected) for pair in pairs]
    per_token = new.chosen / new.num_chosen - new.rejected / new.num_rejected
    assert found.loss.value == pytest.approx(float(loss), rel=1e-9)
    assert found.figures()["accuracy"].value == pytest.approx(float((chosen > rejected).double().mean()))
    assert found.figures()["reward_margin"].value == pytest.approx(float((chosen - rejected).mean()), rel=1e-9)
    assert found.figures()["reward_margin_std"].value == pytest.approx(
        float((chosen - rejected).std(correction=0)), rel=1e-9
    )
    assert found.figures()["logp_accuracy"].value == pytest.approx(float((per_token > 0).double().mean()))
    assert found.length_correlation is not None
    assert found.length_correlation.value == pytest.approx(np.corrcoef(rewards, tokens)[0, 1], rel=1e-8)
    assert not math.isnan(found.length_correlation.low)
    odd = (chosen - rejected)[1::2]
    assert found.by_source["odd"].figures()["reward_margin"].value == pytest.approx(float(odd.mean()), rel=1e-9)
