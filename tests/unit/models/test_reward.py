"""Reward models: the new head, what is refused, and the token that pads."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from isopref.errors import ModelError
from isopref.models import reward
from isopref.models.reward import RewardModel, load_narrow, load_reward_model, set_padding, with_new_head
from isopref.testing.models import byte_tokenizer, tiny_folder, tiny_model, tiny_reward_model


def head_weight(model: Any) -> Tensor:
    weight: Tensor = model.score.weight
    return weight


def test_a_new_head_keeps_the_decoder_and_begins_as_transformers_begins_it() -> None:
    language = tiny_model("llama", hidden_size=512, head_dim=128, initializer_range=0.05)
    decoder = language.base_model
    model = with_new_head(language, seed=3)
    assert model.base_model is decoder
    assert type(model).__name__ == "LlamaForSequenceClassification"
    assert not any("lm_head" in name for name, _ in model.named_parameters())
    head = head_weight(model)
    assert head.shape == (1, 512)
    assert float(head.std()) == pytest.approx(0.05, rel=0.2)
    assert abs(float(head.mean())) < 0.01
    again = with_new_head(tiny_model("llama", hidden_size=512, head_dim=128, initializer_range=0.05), seed=3)
    assert torch.equal(head_weight(again), head)


def test_a_head_is_the_same_in_every_number_type() -> None:
    heads = [
        head_weight(with_new_head(tiny_model("llama", dtype=dtype), seed=0)).float()
        for dtype in (torch.float32, torch.bfloat16)
    ]
    assert torch.equal(heads[0].bfloat16().float(), heads[1])


def test_a_narrow_model_has_its_head_in_float32(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "half", dtype=torch.bfloat16)
    narrow = load_narrow(str(folder), seed=0, trust_remote_code=False, setting="model.path")
    assert narrow is not None
    assert head_weight(narrow).dtype == torch.float32
    policy = RewardModel(narrow, narrow=True)
    policy.move_to(torch.device("cpu"))
    whole = load_reward_model(str(folder), dtype=torch.float32, seed=0)
    for (name, found), (_, expected) in zip(policy.model.named_parameters(), whole.named_parameters(), strict=True):
        assert torch.equal(found, expected), name


def test_what_cannot_be_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no model for sequence classification of type granite"):
        with_new_head(tiny_model("granite"), seed=0)
    classifier = tiny_reward_model("llama")
    classifier.config.num_labels = 3
    classifier.save_pretrained(tmp_path)
    assert reward.is_reward_model(str(tmp_path))
    with pytest.raises(ModelError, match="has 3 labels"):
        load_reward_model(str(tmp_path), dtype="auto")


def test_the_padding_token_ends_no_answer() -> None:
    model, tokenizer = tiny_reward_model("llama"), byte_tokenizer()
    assert set_padding(model, tokenizer, ())
    assert (tokenizer.pad_token, model.config.pad_token_id) == ("<pad>", 0)
    tokenizer.pad_token = tokenizer.eos_token  # as many tokenizers have it
    assert set_padding(model, tokenizer, ())
    assert model.config.pad_token_id == tokenizer.pad_token_id != tokenizer.eos_token_id
    every = tokenizer.all_special_ids + [
        number for number, one in tokenizer.added_tokens_decoder.items() if one.special
    ]
    assert not set_padding(model, tokenizer, every)
    assert model.config.pad_token_id is None
