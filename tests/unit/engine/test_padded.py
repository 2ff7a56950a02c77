"""Padded batches in OLMo-core's form: collated and cut by hand, refused when damaged, the same Step as from a plan."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from isopref.batch.packing import Budget, plan_step
from isopref.batch.step import Step, build_step
from isopref.data.table import ExampleTable
from isopref.engine.padded import DataCollatorForSeq2SeqDPO, padded_to_step, split_batch_dpo
from isopref.errors import ConfigError, DataError
from isopref.examples import PairTokens
from isopref.normalize import Weighting
from isopref.testing import oracle
from isopref.testing.models import byte_tokenizer, random_pairs, tiny_model

CPU = torch.device("cpu")
IGNORE = -100


def instance(pair: PairTokens, index: int) -> dict[str, Any]:
    sides = {"chosen": pair.chosen, "rejected": pair.rejected}
    ids = {f"{side}_input_ids": [*pair.prompt, *answer] for side, answer in sides.items()}
    labels = {f"{side}_labels": [IGNORE] * len(pair.prompt) + [*answer] for side, answer in sides.items()}
    return {**ids, **labels, "index": index}


def collated(pairs: list[PairTokens], **options: Any) -> dict[str, Tensor]:
    return DataCollatorForSeq2SeqDPO(**options)([instance(pair, n) for n, pair in enumerate(pairs)])


def tiny() -> dict[str, Tensor]:
    """Two pairs: prompts (5, 6) and (7), answers (8, 9), (4) and (3), (2, 1)."""
    first = PairTokens(*(np.array(part) for part in ([5, 6], [8, 9], [4])))
    second = PairTokens(*(np.array(part) for part in ([7], [3], [2, 1])))
    return collated([first, second])


@pytest.mark.parametrize(
    ("options", "pad", "width"), [({}, 0, 4), ({"pad_token_id": 9, "pad_to_multiple_of": 3}, 9, 6)]
)
def test_the_collator_by_hand(options: dict[str, Any], pad: int, width: int) -> None:
    pairs = [
        {"chosen_input_ids": [5, 6, 8, 9], "rejected_input_ids": [5, 6, 4], "index": 41}
        | {"chosen_labels": [IGNORE, IGNORE, 8, 9], "rejected_labels": [IGNORE, IGNORE, 4]},
        {"chosen_input_ids": np.array([7, 3]), "rejected_input_ids": torch.tensor([7, 2, 1]), "index": 7}
        | {"chosen_labels": np.array([IGNORE, 3]), "rejected_labels": torch.tensor([IGNORE, 2, 1])},
    ]
    more = width - 4
    expected = {
        "chosen_input_ids": [[5, 6, 8, 9] + [pad] * more, [7, 3, pad, pad] + [pad] * more],
        "rejected_input_ids": [[5, 6, 4, pad] + [pad] * more, [7, 2, 1, pad] + [pad] * more],
        "chosen_attention_mask": [[1, 1, 1, 1] + [0] * more, [1, 1, 0, 0] + [0] * more],
        "rejected_attention_mask": [[1, 1, 1, 0] + [0] * more, [1, 1, 1, 0] + [0] * more],
        "chosen_labels": [[IGNORE, IGNORE, 8, 9] + [IGNORE] * more, [IGNORE, 3, IGNORE, IGNORE] + [IGNORE] * more],
        "rejected_labels": [[IGNORE, IGNORE, 4, IGNORE] + [IGNORE] * more, [IGNORE, 2, 1, IGNORE] + [IGNORE] * more],
        "token_count": [4 + 3, 2 + 3],
        "index": [41, 7],
    }
    batch = DataCollatorForSeq2SeqDPO(**options)(pairs)
    assert {key: value.tolist() for key, value in batch.items()} == expected


def test_no_pairs_make_an_empty_batch() -> None:
    """What a rank without pairs has; the other ranks wait for it."""
    batch = DataCollatorForSeq2SeqDPO()([])
    assert {len(value) for value in batch.values()} == {0}
    with pytest.raises(DataError, match="no pairs on any rank"):
        padded_to_step(batch, 100, "token", device=CPU)


@pytest.mark.parametrize(("size", "sizes"), [(1, [1] * 5), (2, [2, 2, 1]), (5, [5]), (99, [5])])
def test_split_keeps_order_and_every_key(size: int, sizes: list[int]) -> None:
    batch = collated(random_pairs(5))
    pieces = split_batch_dpo(batch, size)
    assert [len(piece["index"]) for piece in pieces] == sizes
    for key, value in batch.items():
        assert torch.equal(torch.cat([piece[key] for piece in pieces]), value)


@pytest.mark.parametrize("size", [0, -3])
def test_split_wants_a_positive_size(size: int) -> None:
    with pytest.raises(ConfigError, match=f"num_microbatch_instances is {size}; it must be at least 1"):
        split_batch_dpo(tiny(), size)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source": ["a", "b"]}, r"batch\['source'\] is a list, not a tensor"),
        ({"index": np.arange(2)}, r"batch\['index'\] is a ndarray, not a tensor"),
        ({"index": torch.arange(3)}, r"differ in their number of pairs.*'index': 3"),
        pytest.param(
            {"step": torch.tensor(1)},
            r"batch\['step'\]",
        ),
    ],
)
def test_split_says_what_it_cannot_cut(change: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        split_batch_dpo({**tiny(), **change}, 1)


def shares(step: Step) -> dict[int, tuple[float, float]]:
    """What each pair counts for, by its index."""
    found: dict[int, tuple[float, float]] = {}
    for work in step.work:
        for index, *share in zip(
            work.index.tolist(), work.loss_share.tolist(), work.side_share[2].tolist(), strict=True
        ):
            assert index not in found
            found[index] = (share[0], share[1])
    return found


@pytest.mark.parametrize("weighting", ["token", "completion", "example"])
@pytest.mark.parametrize("num_microbatches", [1, 3, 7])
def test_a_padded_batch_and_a_plan_give_the_same_shares(weighting: Weighting, num_microbatches: int) -> None:
    pairs = random_pairs(7, seed=3)
    batch = collated(pairs)
    per_microbatch = -(-7 // num_microbatches)
    size = 2 * batch["chosen_input_ids"].shape[1] * per_microbatch
    step = padded_to_step(batch, size, weighting, device=CPU)
    assert len(step.work) == num_microbatches
    table = ExampleTable.from_tokens(pairs)
    plan = plan_step(table.lengths, Budget("shared", 50))
    planned = build_step(table, np.arange(7), plan, "shared", weighting)
    weights = oracle.weights(pairs, weighting)
    expected = {n: pytest.approx((w / sum(weights), 1 / 7), rel=1e-14) for n, w in enumerate(weights)}
    assert shares(step) == expected
    assert shares(planned) == expected
    num_tokens = sum(2 * len(pair.prompt) + len(pair.chosen) + len(pair.rejected) for pair in pairs)
    assert (step.num_comparisons, step.num_tokens) == (planned.num_comparisons, planned.num_tokens) == (7, num_tokens)


def test_the_microbatches_hold_the_pairs_tokens() -> None:
    pairs = random_pairs(5, seed=4)
    batch = collated(pairs)
    step = padded_to_step(batch, 4 * batch["chosen_input_ids"].shape[1], "token", device=CPU)
    for work in step.work:
        (one,) = work.microbatch.passes
        for side, name in enumerate(("chosen", "rejected")):
            for p, index in enumerate(work.index.tolist()):
                prompt, answer = pairs[index].prompt, getattr(pairs[index], name)
                row = one.input_ids[side * work.microbatch.num_comparisons + p].tolist()
                end = len(prompt) + len(answer)
                assert row == [*prompt, *answer] + [0] * (len(row) - end)
                assert one.target[one.answer == side * work.microbatch.num_comparisons + p].tolist() == answer.tolist()


def test_padding_is_what_the_microbatches_hold() -> None:
    pairs = [PairTokens(*(np.full(n, 5) for n in lengths)) for lengths in ((20, 9, 9), (1, 1, 1))]
    step = padded_to_step(collated(pairs), 58, "token", device=CPU)
    slots = sum(one.input_ids.numel() for work in step.work for one in work.microbatch.passes)
    assert step.padding_fraction == pytest.approx(1 - step.num_tokens / slots)


@pytest.mark.parametrize("size", [0, 7])
def test_a_budget_below_one_pair_is_refused(size: int) -> None:
    with pytest.raises(ConfigError, match=rf"rank_microbatch_size is {size} tokens.*takes 8.*at least 8"):
        padded_to_step(tiny(), size, "token", device=CPU)


# Row 0 of the chosen side is [5, 6, 8, 9], all real, with labels [-, -, 8, 9]; row 1 is [7, 3, 0, 0] with [-, 3, -, -].
@pytest.mark.parametrize(
    ("key", "row", "values"),
    [
        ("chosen_attention_mask", 1, [0, 0, 1, 1]),  # padded on the left
        ("chosen_attention_mask", 0, [1, 0, 1, 1]),  # a hole
        ("chosen_attention_mask", 0, [1, 1, 1, 0]),  # labels go on into the padding
        ("chosen_attention_mask", 0, [0, 0, 0, 0]),  # nothing real
        ("chosen_labels", 0, [5, 6, 8, 9]),  # no prompt
        ("chosen_labels", 0, [IGNORE] * 4),  # no completion
        ("chosen_labels", 0, [IGNORE, IGNORE, 8, 1]),  # not what the input says
        ("chosen_labels", 0, [IGNORE, IGNORE, 8, IGNORE]),  # ends early, as where padding is EOS and masked
        ("chosen_labels", 0, [IGNORE, IGNORE, IGNORE, 1]),  # not what the input says, after context
        ("chosen_labels", 1, [IGNORE, IGNORE, IGNORE, 0]),  # begins in the padding
        ("rejected_labels", 1, [IGNORE, 1, 2, IGNORE]),  # the other side too
    ],
)
def test_bad_masks_and_labels_are_refused(key: str, row: int, values: list[int]) -> None:
    batch = tiny()
    batch[key][row] = torch.tensor(values)
    with pytest.raises(DataError, match=f"'{key.split('_')[0]}' must be right-padded.*labels"):
        padded_to_step(batch, 100, "token", device=CPU)


def test_labels_that_pause_inside_an_answer_are_context() -> None:
    pair = PairTokens(*(np.array(part) for part in ([5, 6], [8, 9, 3, 4], [4])))
    batch = collated([pair])
    batch["chosen_labels"][0, 3:5] = IGNORE  # as the tokens 9 and 3 of a tool
    step = padded_to_step(batch, 100, "completion", device=CPU)
    microbatch = step.work[0].microbatch
    assert microbatch.num_tokens.tolist() == [2, 1]
    assert microbatch.passes[0].target.tolist() == [8, 4, 4]
    assert microbatch.passes[0].predict_index.tolist() == [1, 4, 7]
    assert microbatch.passes[0].place.tolist() == [0, 1, 0]
    assert step.num_tokens == 6 + 3


def test_two_prompts_are_refused() -> None:
    batch = tiny()
    batch["rejected_input_ids"][0, 0] = 1
    with pytest.raises(DataError, match="different prompts"):
        padded_to_step(batch, 100, "token", device=CPU)


@pytest.mark.parametrize("key", ["index", "token_count", "chosen_labels"])
def test_a_missing_key_is_named(key: str) -> None:
    batch = tiny()
    del batch[key]
    with pytest.raises(DataError, match=key):
        padded_to_step(batch, 100, "token", device=CPU)


def test_a_batch_without_pairs_is_refused() -> None:
    """On one process. A rank of several without pairs would want fillers: the same line fails there."""
    empty = {key: value[:0] for key, value in tiny().items()}
    with pytest.raises(DataError, match="no pairs"):
        padded_to_step(empty, 100, "token", device=CPU)


def test_weights_keep_their_precision() -> None:
    """A table has them in float64, where a third is not what it is in float32."""
    pairs = [{**instance(pair, n), "weight": 1 / 3} for n, pair in enumerate(random_pairs(2))]
    del pairs[1]["weight"]
    assert DataCollatorForSeq2SeqDPO()(pairs)["weight"].tolist() == [1 / 3, 1.0]


# --- how the collator is made ------------------------------------------------------------------------


def test_a_tokenizer_pads_with_its_own_token() -> None:
    """As scripts for OLMo-core and transformers write it."""
    pairs = [instance(pair, n) for n, pair in enumerate(random_pairs(3))]
    tokenizer = SimpleNamespace(pad_token_id=7)
    expected = DataCollatorForSeq2SeqDPO(pad_token_id=7)(pairs)
    for made in (
        DataCollatorForSeq2SeqDPO(tokenizer=tokenizer, model=None, padding="longest"),
        DataCollatorForSeq2SeqDPO(tokenizer),
        DataCollatorForSeq2SeqDPO(SimpleNamespace(pad_token_id=3), pad_token_id=7),
    ):
        batch = made(pairs)
        assert batch.keys() == expected.keys()
        assert all(torch.equal(batch[key], expected[key]) for key in expected)
    without = DataCollatorForSeq2SeqDPO(SimpleNamespace(pad_token_id=None))(pairs)
    assert torch.equal(without["chosen_input_ids"], DataCollatorForSeq2SeqDPO()(pairs)["chosen_input_ids"])


def test_a_real_tokenizer_is_one() -> None:
    tokenizer = byte_tokenizer()
    batch = DataCollatorForSeq2SeqDPO(tokenizer=tokenizer, model=tiny_model("gpt2"), padding="longest")(
        [instance(pair, n) for n, pair in enumerate(random_pairs(3))]
    )
    assert set(batch["chosen_input_ids"][batch["chosen_attention_mask"] == 0].tolist()) == {tokenizer.pad_token_id}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"padding": "max_length"}, "padding='max_length' is not supported. Use True or 'longest', or leave it out."),
        ({"padding": False}, "padding=False is not supported."),
        ({"max_length": 512}, "max_length=512 is not supported. Use None, or leave it out."),
        ({"label_pad_token_id": 0}, "label_pad_token_id=0 is not supported. Use -100, or leave it out."),
        ({"return_tensors": "np"}, "return_tensors='np' is not supported. Use 'pt', or leave it out."),
        ({"pad_to_multiple_of": 0}, "pad_to_multiple_of must be a whole number, at least 1; found 0."),
        ({"pad_token_id": -1}, "pad_token_id must be a whole number, at least 0; found -1."),
        ({"tokenizer": 0}, "tokenizer is 0. Write pad_token_id=0."),
        (
            {"tokenizer": "gpt2"},
            "tokenizer is a str, not a tokenizer. Pass what AutoTokenizer.from_pretrained returns.",
        ),
        ({"model": SimpleNamespace(prepare_decoder_input_ids_from_labels=len)}, "isopref trains causal models."),
    ],
)
def test_settings_that_would_do_nothing_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        DataCollatorForSeq2SeqDPO(**options)
    assert str(refusal.value).startswith("DataCollatorForSeq2SeqDPO: ")
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chosen_labels": [IGNORE, 8]}, "chosen_input_ids has 3 tokens, chosen_labels 2."),
        (
            {"rejected_input_ids": [5.0, 4.0]},
            "rejected_input_ids must be a non-empty list of whole numbers; found (2,) ",
        ),
        ({"rejected_input_ids": []}, "rejected_input_ids must be a non-empty list of whole numbers"),
        ({"rejected_input_ids": [[5, 4]]}, "found (1, 2) of torch.int64."),
        ({"rejected_input_ids": "54"}, "rejected_input_ids is not a list of tokens"),
        ({"rejected_input_ids": [5, -100]}, "rejected_input_ids has a token -100; only labels may be negative."),
        ({"index": -1}, "index is -1; it is the pair's row in the reference's table, from 0."),
        ({"index": 0.5}, "index must be a whole number"),
        ({"weight": math.inf}, "weight is inf; it must be positive and finite."),
        ({"weight": math.nan}, "weight is nan; it must be positive and finite."),
        ({"weight": 0.0}, "weight is 0.0; it must be positive and finite."),
        ({"weight": "heavy"}, "weight a number"),
    ],
)
def test_a_malformed_instance_is_named(change: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"chosen_input_ids": [5, 6, 8], "rejected_input_ids": [5, 4], "index": 1}
    good |= {"chosen_labels": [IGNORE, IGNORE, 8], "rejected_labels": [IGNORE, 4]}
    DataCollatorForSeq2SeqDPO()([good])
    with pytest.raises(DataError) as refusal:
        DataCollatorForSeq2SeqDPO()([good, {**good, **change}])
    assert str(refusal.value).startswith("DataCollatorForSeq2SeqDPO: instance 1")
    assert message in str(refusal.value)


def test_an_instance_without_a_key_is_named() -> None:
    with pytest.raises(DataError, match=r"instance 0 has no chosen_labels, rejected_labels\. It has .*index"):
        DataCollatorForSeq2SeqDPO()([{"chosen_input_ids": [1, 2], "rejected_input_ids": [1, 3], "index": 0}])


# --- batches that no collator made -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"index": torch.tensor([0, -1])}, r"batch\['index'\] has -1; .* \(0 to 1\)"),
        ({"index": torch.tensor([0, 2])}, r"batch\['index'\] has 2; .* \(0 to 1\)"),
        (
            {"index": torch.tensor([0.0, 1.0])},
            r"batch\['index'\] must be a tensor of whole numbers; found torch.float32",
        ),
        ({"index": [0, 1]}, r"batch\['index'\] must be a tensor of whole numbers; found list"),
        ({"weight": torch.tensor([1.0, math.inf])}, r"batch\['weight'\] must be positive and finite; found inf"),
        ({"weight": torch.tensor([-1.0, 1.0])}, r"batch\['weight'\] must be positive and finite; found -1.0"),
        ({"chosen_input_ids": torch.ones(2, 4)}, r"batch\['chosen_input_ids'\] must be a tensor of whole numbers"),
        ({"chosen_labels": torch.ones(2, 3).long()}, "the tensors of 'chosen' must have one shape"),
    ],
)
def test_a_malformed_batch_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        padded_to_step({**tiny(), **change}, 100, "token", device=CPU, num_references=2)
