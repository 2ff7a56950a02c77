"""Mistakes that every rank must meet alike, before the first step, leaving no rank behind."""

import pytest

from isopref.models import probe
from isopref.testing.cells import Cell
from isopref.testing.exactness import measure
from isopref.testing.ranks import RankDiedError, RankError, Ranks
from support import mistakes


def same_on_all(ranks: Ranks, mistake: str) -> str:
    """The one message all ranks give, after which they still work together."""
    messages = ranks(mistakes.error_of, mistake)
    assert len(set(messages)) == 1, messages
    cell = Cell(ranks=ranks.world_size, parallel="ddp")
    assert ranks(measure, cell)[0].gradient_error <= 1e-10
    return str(messages[0])


def test_hsdp_mesh_that_does_not_divide_the_world(four_ranks: Ranks) -> None:
    message = same_on_all(four_ranks, "hsdp_mesh")
    assert message == (
        "ConfigError: layout.hsdp_shard is 3, which does not divide the number of processes, 4. Use one of 2, 4."
    )


def test_microbatch_smaller_than_the_longest_pair(two_ranks: Ranks) -> None:
    message = same_on_all(two_ranks, "small_budget")
    assert message.startswith("ConfigError: Budget.tokens is 20, but pair ")
    assert "Raise it to at least " in message
    assert "layout." not in message  # nor any other field of a config: this is a script's own loader


def test_padded_batch_wider_than_the_microbatch(two_ranks: Ranks) -> None:
    message = same_on_all(two_ranks, "wide_padded_batch")
    assert message.startswith("ConfigError: rank_microbatch_size is 20 tokens, but one pair of this batch takes ")


@pytest.mark.parametrize(
    ("mistake", "start"),
    [
        ("not_spread", "ConfigError: 2 ranks, but the model is not distributed over them"),
        ("single_on_many", 'ConfigError: parallelize: "single" on 2 ranks would never reduce gradients. Use "ddp".'),
    ],
)
def test_ranks_that_would_never_meet(two_ranks: Ranks, mistake: str, start: str) -> None:
    assert same_on_all(two_ranks, mistake).startswith(start)


def test_a_weight_that_is_not_finite_in_the_shard_of_one_rank(two_ranks: Ranks) -> None:
    message = same_on_all(two_ranks, "nan_on_one_rank")
    assert message.startswith("ModelError: it: the weights contain NaN or Inf, in model.layers.1.mlp.up_proj.weight.")


@pytest.mark.parametrize("mistake", ["zero_microbatch", "foreign_optimizer", "negative_split", "non_tensor"])
def test_before_any_rank_is_needed(mistake: str) -> None:
    expected = {
        "zero_microbatch": "ConfigError: DPOTrainModule: rank_microbatch_size must be a whole number, at least 1; "
        "found 0.",
        "foreign_optimizer": "ConfigError: the optimizer holds parameters that do not belong to the model, "
        "so training would have no effect. Create it from the module that parallelize returns.",
        "negative_split": "ConfigError: split_batch_dpo: num_microbatch_instances is -1; it must be at least 1 pair.",
        "non_tensor": "DataError: split_batch_dpo: batch['source'] is a str, not a tensor, so it cannot be cut. "
        "Remove it, or make it a tensor with one entry per pair.",
    }
    assert mistakes.error_of(mistake) == expected[mistake]


@pytest.mark.parametrize("mode", ["fsdp", "ddp"])
def test_ranks_that_all_refuse_a_model_try_padded_rows(two_ranks: Ranks, mode: str) -> None:
    for message in two_ranks(mistakes.refused_by, [0, 1], mode):
        assert message.endswith("(it is planted). Set layout.rows: padded.")


def test_a_rank_that_refuses_a_sharded_model_alone_does_not_start_another_pass(two_ranks: Ranks) -> None:
    """The other rank would not join, and the run would hang instead of ending with the error."""
    found = two_ranks(mistakes.refused_by, [1], "fsdp")
    assert found[0] == "no error"
    assert found[1].endswith(f"(it is planted). {probe.ALONE}")


def test_a_rank_that_refuses_a_whole_model_alone_does_not_wait(two_ranks: Ranks) -> None:
    found = two_ranks(mistakes.refused_by, [1], "ddp")
    assert found[1].endswith("Set layout.rows: padded.")


def test_a_rank_that_fails_is_named(two_ranks: Ranks) -> None:
    with pytest.raises(RankError, match=r"(?s)rank 1: .*planted"):
        two_ranks(mistakes.fail_on_rank_one)


def test_a_rank_that_dies_is_named_and_started_again(two_ranks: Ranks) -> None:
    with pytest.raises(RankDiedError, match=r"(?s)rank 1: died with exit code -9"):
        two_ranks(mistakes.die_on_rank_one)
    assert same_on_all(two_ranks, "hsdp_mesh").startswith("ConfigError")
