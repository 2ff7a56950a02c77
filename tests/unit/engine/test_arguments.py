"""What a script passes to the train module and its loader: mistakes are refused at once, bad numbers are told of."""

import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from olmo_core.train import Duration, TrainerConfig

from isopref import Budget, DPOTrainModule, ExampleLoader, ExampleTable, Policy, TableLogps, pair_loss
from isopref.engine.guard import MOST_IN_A_ROW
from isopref.errors import ConfigError, DataError, FirstStepError
from isopref.testing.exactness import StubTrainer, padded_batch
from isopref.testing.models import random_pairs, tiny_model

NUM_PAIRS = 8
ZEROS = np.zeros(NUM_PAIRS)
TABLE = ExampleTable.from_tokens(random_pairs(NUM_PAIRS))


def module(**changes: Any) -> DPOTrainModule:
    policy = changes.pop("model", None) or Policy(tiny_model("gpt2"))
    given: dict[str, Any] = {
        "optim": torch.optim.SGD(policy.parameters(), lr=0.1),
        "objective": pair_loss("sigmoid"),
        "rank_microbatch_size": 4096,
        "reference": TableLogps.of_pairs(ZEROS, ZEROS),
        "check_first_step": False,
    }
    return DPOTrainModule(policy, **{**given, **changes})


def loader(**changes: Any) -> ExampleLoader:
    given: dict[str, Any] = {"table": TABLE, "batch_size": 4, "budget": Budget("shared", 4096), "work_dir": "."}
    return ExampleLoader(**{**given, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"grad_sync": "never"}, "grad_sync must be one of last, every; found 'never'."),
        ({"weighting": "tokens"}, "weighting must be one of token, completion, example, gap; found 'tokens'."),
        ({"model": tiny_model("gpt2")}, "model must be a Policy, or what parallelize returns for one; found a GPT2LM"),
        ({"objective": "sigmoid"}, 'objective must be what pair_loss returns, as in pair_loss("sigmoid"); found \'sig'),
        ({"optim": "adamw"}, "optim must be a torch optimizer of the model's parameters; found 'adamw'."),
        ({"rank_microbatch_size": 0}, "rank_microbatch_size must be a whole number, at least 1; found 0."),
        ({"rank_microbatch_size": 0.5}, "rank_microbatch_size must be a whole number, at least 1; found 0.5."),
        ({"reference": (ZEROS, ZEROS)}, "reference must be what score_table returns, or None; found a tuple."),
        ({"max_grad_norm": 0.0}, "max_grad_norm must be a number above 0; found 0.0."),
        ({"max_grad_norm": math.nan}, "max_grad_norm must be a number above 0; found nan."),
        ({"scheduler": "cosine"}, "scheduler must be a scheduler of OLMo-core, or None; found 'cosine'."),
        ({"compute_dtype": torch.int8}, "compute_dtype must be one of torch.float64, torch.float32, "),
    ],
)
def test_arguments_of_the_train_module(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        module(**changes)
    assert str(refusal.value).startswith("DPOTrainModule: ")
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"table": random_pairs(3)},
            "table must be an ExampleTable, as in ExampleTable.from_tokens(pairs); found a list.",
        ),
        ({"table": TABLE.select([])}, "the table has no pairs. Pass a table with at least one."),
        ({"batch_size": 0}, "batch_size must be a whole number, at least 1; found 0."),
        ({"budget": 4096}, 'budget must be a Budget, as in Budget("shared", 8192); found 4096.'),
        ({"weighting": "tokens"}, "weighting must be one of token, completion, example, gap; found 'tokens'."),
        ({"seed": -1}, "seed must be a whole number, at least 0; found -1."),
    ],
)
def test_arguments_of_the_loader(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        loader(**changes)
    assert str(refusal.value) == f"ExampleLoader: {message}"


def test_a_kind_of_rows_that_there_is_not() -> None:
    with pytest.raises(ConfigError, match=r"Budget: kind must be one of shared, packed, .*; found 'share'"):
        Budget("share", 100)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("module_s", "loader_s", "message"),
    [
        (
            {"weighting": "example"},
            {},
            "weighting is 'example', but the ExampleLoader's is 'token'. Pass the same value to both.",
        ),
        (
            {"rank_microbatch_size": 100},
            {},
            "rank_microbatch_size is 100, but the ExampleLoader splits batches by its own ",
        ),
        (
            {"reference": TableLogps.of_pairs(ZEROS[1:], ZEROS[1:])},
            {},
            "reference has 14 answers, but the ExampleLoader's table has 16.",
        ),
    ],
)
def test_a_loader_that_says_otherwise(module_s: dict[str, Any], loader_s: dict[str, Any], message: str) -> None:
    trainer: Any = StubTrainer()
    trainer.data_loader = loader(**loader_s)
    module()._attach_trainer(trainer)  # these agree
    with pytest.raises(ConfigError) as refusal:
        module(**module_s)._attach_trainer(trainer)
    assert message in str(refusal.value)


def test_padded_batches_need_a_size() -> None:
    made = module(rank_microbatch_size=None)
    with pytest.raises(ConfigError, match=r"Pass rank_microbatch_size \(tokens\)"):
        made.train_batch(padded_batch([0, 1], NUM_PAIRS))
    with pytest.raises(ConfigError, match=r"Pass rank_microbatch_size \(tokens\)"):
        _ = made.eval_batch_spec


def test_a_pair_without_a_reference() -> None:
    made = module()
    made._attach_trainer(StubTrainer())  # type: ignore[arg-type]
    batch = padded_batch([0, 1], NUM_PAIRS)
    batch["index"][1] = NUM_PAIRS
    with pytest.raises(DataError, match=r"batch\['index'\] has 8; .* \(0 to 7\)"):
        made.train_batch(batch)


def test_another_reference_is_told_in_the_words_of_a_script() -> None:
    made = module(check_first_step=True)
    made._attach_trainer(StubTrainer(global_step=1))  # type: ignore[arg-type]
    with pytest.raises(FirstStepError) as refusal:
        made.train_batch(padded_batch([0, 1], NUM_PAIRS))
    assert "pass check_first_step=False" in str(refusal.value)
    assert "layout." not in str(refusal.value)


# --- a table of the reference ------------------------------------------------------------------------


def test_a_table_is_made_of_tensors_too() -> None:
    values = torch.tensor([-1.5, -2.5], requires_grad=True)
    table = TableLogps.of_pairs(values, values.detach().bfloat16())
    for array in (table.chosen, table.rejected, TableLogps(values, torch.zeros(2, 1)).heads):
        assert isinstance(array, np.ndarray)
        assert array.dtype == np.float64
    assert table.chosen.tolist() == table.rejected.tolist() == [-1.5, -2.5]


@pytest.mark.parametrize(("chosen", "rejected"), [((3,), (4,)), ((2, 2), (2, 2)), ((), ())])
def test_a_table_has_one_value_for_every_pair(chosen: tuple[int, ...], rejected: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"TableLogps\.of_pairs: each needs one value for every pair; the shapes are"):
        TableLogps.of_pairs(np.zeros(chosen), torch.zeros(rejected))


def test_two_arrays_are_no_table_of_answers() -> None:
    """What made a table of pairs before must not be taken for answers and their heads."""
    with pytest.raises(ConfigError, match=r"use TableLogps\.of_pairs\(chosen, rejected\)"):
        TableLogps(np.zeros(3), np.zeros(3))


# --- numbers that are not finite ---------------------------------------------------------------------


@pytest.mark.parametrize("packed", [True, False])
def test_a_pair_whose_loss_is_not_finite_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, packed: bool
) -> None:
    """Once, with the step and the pair; the weights are as they were."""
    chosen = ZEROS.copy()
    chosen[3] = math.nan
    made = module(reference=TableLogps.of_pairs(chosen, ZEROS), rank_microbatch_size=None if packed else 4096)
    before = [parameter.detach().clone() for parameter in made.model.parameters()]
    batches: Any = loader(batch_size=NUM_PAIRS, work_dir=str(tmp_path))
    if not packed:
        batches._iter_batches = lambda: iter([padded_batch(list(range(NUM_PAIRS)), NUM_PAIRS)])
        batches.global_num_tokens_in_batch = lambda batch: int(batch["token_count"].sum())
        batches.get_mock_batch = lambda: padded_batch([0], NUM_PAIRS)
    config = TrainerConfig(save_folder=str(tmp_path), max_duration=Duration.steps(1), device="cpu", no_checkpoints=True)
    with caplog.at_level(logging.WARNING, "isopref"):
        config.build(made, batches).fit()
    told = [record.message for record in caplog.records if record.name.startswith("isopref")]
    assert told == ["step 1 was skipped: the loss of pair 3 is not finite. The weights are unchanged."]
    assert all(map(torch.equal, before, made.model.parameters()))


def test_a_script_without_one_finite_step_is_stopped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = module(reference=TableLogps.of_pairs(ZEROS * math.nan, ZEROS), rank_microbatch_size=None)
    config = TrainerConfig(
        save_folder=str(tmp_path), max_duration=Duration.epochs(1), device="cpu", no_checkpoints=True,
        metrics_collect_interval=1,
    )  # fmt: skip
    trainer = config.build(made, loader(batch_size=1, work_dir=str(tmp_path)))
    with caplog.at_level(logging.WARNING):
        trainer.fit()
    assert trainer.global_step == MOST_IN_A_ROW < NUM_PAIRS
    assert "5 steps in a row were skipped" in caplog.text


def test_a_script_whose_weights_are_not_finite_is_stopped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = module(rank_microbatch_size=None)
    with torch.no_grad():
        dict(made.model.named_parameters())["model.transformer.ln_f.weight"][0] = math.inf
    config = TrainerConfig(
        save_folder=str(tmp_path), max_duration=Duration.epochs(1), device="cpu", no_checkpoints=True,
        metrics_collect_interval=1,
    )  # fmt: skip
    trainer = config.build(made, loader(batch_size=2, work_dir=str(tmp_path)))
    with caplog.at_level(logging.WARNING):
        trainer.fit()
    assert trainer.global_step == 1
    told = [record.message for record in caplog.records if record.name.startswith("isopref")]
    assert told == ["step 1 was skipped: the weights contain NaN or Inf (transformer.ln_f.weight)."]
