"""The checks fail when they should: each planted bug moves what they measure far over the bound."""

import pytest
import torch

from isopref.testing import matrix
from isopref.testing.cells import Cell
from isopref.testing.equations import REWARD_CASES
from isopref.testing.exactness import measure
from isopref.testing.list_equations import LIST_CASES
from isopref.testing.oracle import relative_error
from isopref.testing.ranks import Ranks
from support import mutations, splitting_mutations, trajectory

VISIBLE = 1e-3  # relative; the bounds are 1e-5 and less


@pytest.mark.parametrize("name", [name for name in mutations.GRADIENT if name != "rank_local_denominator"])
def test_one_rank(name: str) -> None:
    cell = Cell(nll_weight=0.5)
    assert measure(cell).gradient_error <= matrix.bound(cell)
    assert mutations.mutated(name, measure, cell).gradient_error > VISIBLE


@pytest.mark.parametrize("name", mutations.GRADIENT)
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks(two_ranks: Ranks, name: str, parallel: str) -> None:
    cell = Cell(ranks=2, parallel=parallel, split="uneven", nll_weight=0.5)  # type: ignore[arg-type]
    assert two_ranks(measure, cell)[0].gradient_error <= matrix.bound(cell)
    assert two_ranks(mutations.mutated, name, measure, cell)[0].gradient_error > VISIBLE


@pytest.mark.parametrize("name", mutations.TREES)
def test_trees(name: str) -> None:
    cell = Cell(trees=True)
    assert measure(cell).gradient_error <= matrix.bound(cell)
    assert mutations.mutated(name, measure, cell).gradient_error > VISIBLE


@pytest.mark.parametrize("name", mutations.CONTEXT)
@pytest.mark.parametrize("trees", [False, True])
def test_context(name: str, trees: bool) -> None:
    cell = Cell(context="weights", trees=trees, objective="simpo")
    assert measure(cell).gradient_error <= matrix.bound(cell)
    assert mutations.mutated(name, measure, cell).gradient_error > VISIBLE


@pytest.mark.parametrize("name", [name for name in mutations.STATES if name != "recurrent_state_of_a_sibling"])
@pytest.mark.parametrize("trees", [False, True])
@pytest.mark.parametrize("architecture", ["olmo_hybrid", "lfm2", "bamba", "mamba"])
def test_states(name: str, trees: bool, architecture: str) -> None:
    cell = Cell(architecture=architecture, dtype="float32", trees=trees)
    assert measure(cell).gradient_error <= matrix.bound(cell)
    assert mutations.mutated(name, measure, cell).gradient_error > VISIBLE


@pytest.mark.parametrize("trees", [False, True])
@pytest.mark.parametrize("architecture", ["olmo_hybrid", "bamba"])
def test_recurrent_states(trees: bool, architecture: str) -> None:
    """The state alone, in layers that have a convolution too."""
    cell = Cell(architecture=architecture, dtype="float32", trees=trees)
    assert measure(cell).gradient_error <= matrix.bound(cell)
    assert mutations.mutated("recurrent_state_of_a_sibling", measure, cell).gradient_error > VISIBLE


@pytest.mark.parametrize("name", mutations.LISTS)
@pytest.mark.parametrize("objective", [case for case in LIST_CASES if case not in REWARD_CASES])
def test_lists(name: str, objective: str) -> None:
    cell = Cell(trees=True, objective=objective)
    assert measure(cell).gradient_error <= matrix.bound(cell)
    assert mutations.mutated(name, measure, cell).gradient_error > VISIBLE


@pytest.mark.parametrize("name", mutations.REWARDS)
@pytest.mark.parametrize("objective", REWARD_CASES)
def test_rewards(name: str, objective: str) -> None:
    cell = Cell(trees=True, objective=objective)
    assert measure(cell).gradient_error <= matrix.bound(cell)
    assert mutations.mutated(name, measure, cell).gradient_error > VISIBLE


@pytest.mark.parametrize("name", [name for name in mutations.KTO if name != "kl_of_one_rank"])
def test_kto(name: str) -> None:
    cell = Cell(trees=True, objective="kto", cut="pair")
    assert measure(cell).gradient_error <= matrix.bound(cell)
    assert mutations.mutated(name, measure, cell).gradient_error > VISIBLE


@pytest.mark.parametrize("name", mutations.BCO)
def test_bco(name: str) -> None:
    cell = Cell(trees=True, objective="bco")
    assert measure(cell).gradient_error <= matrix.bound(cell)
    assert mutations.mutated(name, measure, cell).gradient_error > VISIBLE


@pytest.mark.parametrize("name", ["kl_of_one_microbatch", "kl_of_one_rank", "mismatch_counted_twice"])
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_kto_on_two_ranks(two_ranks: Ranks, name: str, parallel: str) -> None:
    cell = Cell(ranks=2, parallel=parallel, split="uneven", trees=True, objective="kto")  # type: ignore[arg-type]
    assert two_ranks(measure, cell)[0].gradient_error <= matrix.bound(cell)
    assert two_ranks(mutations.mutated, name, measure, cell)[0].gradient_error > VISIBLE


@pytest.mark.parametrize("name", [name for name in mutations.COLLATED if name != "rank_local_token_mean"])
def test_collated_on_one_rank(name: str) -> None:
    cell = Cell(rows="padded", collated=True, nll_weight=0.5, own_weights=True)
    assert measure(cell).gradient_error <= matrix.bound(cell)
    assert mutations.mutated(name, measure, cell).gradient_error > VISIBLE


@pytest.mark.parametrize("name", mutations.COLLATED)
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_collated_on_two_ranks(two_ranks: Ranks, name: str, parallel: str) -> None:
    cell = Cell(
        ranks=2,
        parallel=parallel,  # type: ignore[arg-type]
        rows="padded",
        collated=True,
        split="uneven",
        nll_weight=0.5,
        own_weights=True,
    )
    assert two_ranks(measure, cell)[0].gradient_error <= matrix.bound(cell)
    assert two_ranks(mutations.mutated, name, measure, cell)[0].gradient_error > VISIBLE


@pytest.mark.parametrize("name", [*splitting_mutations.SPLIT, "leaking_attention"])
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_rows_split_over_ranks(two_ranks: Ranks, name: str, parallel: str) -> None:
    cell = Cell(ranks=2, parallel=parallel, context_parallel=2, nll_weight=0.5)  # type: ignore[arg-type]
    assert two_ranks(measure, cell)[0].gradient_error <= matrix.bound(cell)
    assert two_ranks(mutations.mutated, name, measure, cell)[0].gradient_error > VISIBLE


@pytest.mark.parametrize("name", [*splitting_mutations.SPLIT, *splitting_mutations.OWN_HEADS])
@pytest.mark.parametrize("architecture", ["gpt_oss", "olmo_hybrid", "lfm2", "bamba"])
def test_rows_of_other_layers_split_over_ranks(two_ranks: Ranks, name: str, architecture: str) -> None:
    cell = Cell(architecture=architecture, dtype="float32", ranks=2, parallel="fsdp", context_parallel=2)
    assert two_ranks(measure, cell)[0].gradient_error <= matrix.bound(cell)
    assert two_ranks(mutations.mutated, name, measure, cell)[0].gradient_error > VISIBLE


@pytest.mark.parametrize("name", mutations.SCHEDULE)
def test_schedule(name: str) -> None:
    expected = trajectory.by_oracle()
    assert relative_error(trajectory.by_layout(Cell()), expected) <= 1e-8
    assert relative_error(mutations.mutated(name, trajectory.by_layout, Cell()), expected) > VISIBLE


def test_leak_is_visible_in_the_scores() -> None:
    """The leak is also caught where it happens, before any gradient: by the probe that every run makes."""
    from isopref.errors import ModelError
    from isopref.models.policy import Policy
    from isopref.models.probe import check_layout
    from isopref.testing.models import tiny_model

    policy = Policy(tiny_model("llama", dtype=torch.float32))
    check_layout(policy, "shared")
    with pytest.raises(ModelError, match=r"layout\.rows: padded"), mutations.leaking_attention():
        check_layout(policy, "shared")
