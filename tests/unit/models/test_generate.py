"""Answers to prompts: batched, and drawn without moving any random state."""

import random
from collections import Counter, defaultdict
from typing import Any

import numpy as np
import pytest
import torch

from isopref.models.generate import answers
from isopref.testing.models import byte_tokenizer, tiny_model
from isopref.types import IntArray

DRAWS = 500


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer: Any) -> Any:
    return tiny_model("llama", dtype=torch.float64, vocab_size=len(tokenizer))


@pytest.fixture(scope="module")
def prompts(tokenizer: Any) -> list[IntArray]:
    return [np.array(tokenizer(text)["input_ids"]) for text in ("what?", "a longer question, with a comma", "no")]


def test_greedy_is_the_most_likely_token_each_time(model: Any, tokenizer: Any, prompts: list[IntArray]) -> None:
    found = answers(model, tokenizer, prompts, max_new_tokens=6)
    for prompt, answer in zip(prompts, found, strict=True):
        ids = prompt.tolist()
        for _ in range(6):
            with torch.no_grad():
                ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
            if ids[-1] == tokenizer.eos_token_id:
                break
        assert answer.greedy == tokenizer.decode(ids[len(prompt) :], skip_special_tokens=True).strip()


def test_an_answer_does_not_depend_on_the_others(model: Any, tokenizer: Any, prompts: list[IntArray]) -> None:
    together = answers(model, tokenizer, prompts, max_new_tokens=12, seed=4)
    alone = [answers(model, tokenizer, [one], max_new_tokens=12, seed=4)[0] for one in prompts]
    assert together == alone
    assert together == answers(model, tokenizer, prompts, max_new_tokens=12, seed=4)
    other = answers(model, tokenizer, prompts, max_new_tokens=12, seed=5)
    assert [one.greedy for one in other] == [one.greedy for one in together]
    assert [one.sampled for one in other] != [one.sampled for one in together]
    assert all(one.sampled != one.greedy for one in together)


def test_answers_end_at_the_context_length(tokenizer: Any) -> None:
    """GPT-2 has a table of positions: one more token than it has entries would be out of range."""
    model = tiny_model("gpt2", vocab_size=len(tokenizer), n_positions=8)
    model.generation_config.eos_token_id = None
    (answer,) = answers(model, tokenizer, [np.array(tokenizer("what?")["input_ids"])], max_new_tokens=10**30)
    ids = tokenizer("what?")["input_ids"]
    for _ in range(3):
        with torch.no_grad():
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    assert answer.greedy == tokenizer.decode(ids[5:], skip_special_tokens=True).strip()


def test_random_state_and_mode_stay(model: Any, tokenizer: Any, prompts: list[IntArray]) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    model.train()
    answers(model, tokenizer, prompts, max_new_tokens=4)
    assert model.training
    model.eval()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]  # type: ignore[index]


def test_draws_have_the_models_probabilities(model: Any, tokenizer: Any, prompts: list[IntArray]) -> None:
    """The first token of many draws, against softmax(logits)."""
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(prompts[0])[None]).logits[0, -1]
    expected: dict[str, float] = defaultdict(float)
    for token, probability in enumerate(logits.softmax(dim=-1).tolist()):
        expected[tokenizer.decode([token], skip_special_tokens=True).strip()] += probability
    count: Counter[str] = Counter()
    for seed in range(DRAWS):
        (one,) = answers(model, tokenizer, prompts[:1], max_new_tokens=1, seed=seed)
        count[one.sampled] += 1
    likely = sorted(expected, key=lambda text: -expected[text])[:4]
    for text in likely:
        deviation = (expected[text] * (1 - expected[text]) / DRAWS) ** 0.5
        assert abs(count[text] / DRAWS - expected[text]) < 4 * deviation, text


def test_no_prompts() -> None:
    assert answers(None, None, [], max_new_tokens=3) == []
