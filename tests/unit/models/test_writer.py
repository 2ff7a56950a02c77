"""Answers written in slots: those of the model alone, whatever is written beside them."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from isopref.errors import ModelError
from isopref.models import slots
from isopref.models.draw import draw, noise
from isopref.models.policy import Policy
from isopref.models.slots import check_slots
from isopref.models.writer import Answer, Choice, Request, write, write_batches
from isopref.testing.models import tiny_model

END = 2
GREEDY, DRAWN, NUCLEUS = Choice(0.0, 1.0, (END,)), Choice(1.0, 1.0, (END, 5)), Choice(0.8, 0.7, (END,))
# Grouped heads; learnt positions; sliding windows, soft caps, sinks with experts; dropped arguments.
IN_SLOTS = ("llama", "gpt2", "gemma2", "gemma3", "gpt_oss", "stablelm", "qwen3_moe")
NOT_IN_SLOTS = ("bamba", "mpt")


def policy_of(architecture: str, dtype: torch.dtype = torch.float32) -> Policy:
    return Policy(tiny_model(architecture, dtype=dtype)).eval()


def requests(seed: int = 0) -> list[Request]:
    """Prompts and answers of different lengths, one prompt of a single token."""
    rng = np.random.default_rng(seed)
    sizes = ((5, (9, 3)), (17, (20, 1)), (1, (4, 4)), (30, (12, 15)), (8, (1, 7)))
    return [
        Request(rng.integers(6, 90, length).astype(np.int32), (10 * n, 10 * n + 1), limits)
        for n, (length, limits) in enumerate(sizes)
    ]


def by_place(answers: Any) -> dict[tuple[int, int], Answer]:
    found = list(answers)
    assert len({one[:2] for one in found}) == len(found)
    return {one[:2]: one for one in found}


@torch.no_grad()
def alone(policy: Policy, request: Request, number: int, choice: Choice) -> list[int]:
    """One answer, from the definition: all tokens so far through the model, one draw, and again."""
    ids: list[int] = request.prompt.tolist()
    uniform = noise(request.seeds[number], request.limits[number])
    for u in uniform:
        logits = policy.own_logits(torch.tensor([ids]))[0, -1]
        if choice.temperature == 0:
            token = int(logits.argmax())
        else:
            probability = (logits.double() / choice.temperature).softmax(-1).tolist()
            token = by_hand(probability, choice.top_p, u)
        if token in choice.stops:
            break
        ids.append(token)
    return ids[len(request.prompt) :]


def by_hand(probability: list[float], top_p: float, u: float) -> int:
    order = list(range(len(probability)))
    if top_p < 1:
        order.sort(key=lambda token: -probability[token])
        kept, total = [], 0.0
        for token in order:
            if total >= top_p:
                break
            kept.append(token)
            total += probability[token]
        order = kept
    target = u * sum(probability[token] for token in order)
    total = 0.0
    for token in order:
        total += probability[token]
        if total > target:
            return token
    raise AssertionError


@pytest.mark.parametrize("architecture", IN_SLOTS)
def test_answers_are_those_of_the_model_alone(architecture: str) -> None:
    policy, asked = policy_of(architecture), requests()
    check_slots(policy)
    for choice in (GREEDY, DRAWN, NUCLEUS):
        found = by_place(write(policy, asked, choice, rows=3))
        for n, request in enumerate(asked):
            for number in range(2):
                answer = found[n, number]
                assert answer.tokens == alone(policy, request, number, choice), (choice, n, number)
                assert answer.ended == (len(answer.tokens) < request.limits[number])


@pytest.mark.parametrize("choice", [GREEDY, DRAWN, NUCLEUS])
def test_answers_do_not_depend_on_the_batch(choice: Choice) -> None:
    policy, asked = policy_of("gpt2", torch.float64), requests()
    every = by_place(write(policy, asked, choice, rows=100))
    for rows in (1, 4, 7):
        assert by_place(write(policy, asked, choice, rows=rows)) == every
    assert by_place(write_batches(policy, asked, choice, rows=3)) == every
    one = by_place(write(policy, asked[3:4], choice, rows=2))
    assert [one[0, n][2:] for n in range(2)] == [every[3, n][2:] for n in range(2)]
    other = [Request(one.prompt, tuple(seed + 1000 for seed in one.seeds), one.limits) for one in asked]
    assert (by_place(write(policy, other, choice, rows=100)) == every) == (choice is GREEDY)


def test_a_prompt_is_computed_once_for_all_its_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []
    policy = policy_of("llama")
    add = slots.Slots.add_prompts

    def counted(self: Any, prompts: Any, places: Any) -> None:
        computed.extend(len(prompt) for prompt in prompts)
        add(self, prompts, places)

    monkeypatch.setattr(slots.Slots, "add_prompts", counted)
    asked = [Request(np.arange(6, 16, dtype=np.int32) + n, tuple(range(4)), (6,) * 4) for n in range(3)]
    assert len(by_place(write(policy, asked, DRAWN, rows=8))) == 12
    assert computed == [9, 9, 9]  # the last token of a prompt is the first that its slots are fed


@pytest.mark.parametrize("architecture", NOT_IN_SLOTS)
def test_models_that_cannot_write_in_slots(architecture: str) -> None:
    policy, asked = policy_of(architecture), requests()
    with pytest.raises(ModelError):
        check_slots(policy)
    found = by_place(write_batches(policy, asked, GREEDY, rows=3))
    for n, request in enumerate(asked):
        assert found[n, 1].tokens == alone(policy, request, 1, GREEDY)


def test_batches_draw_as_asked_whatever_the_model_suggests() -> None:
    """transformers would apply what the model's generation_config.json says besides temperature and top_p."""
    policy, asked = policy_of("gpt2", torch.float64), requests()
    expected = by_place(write(policy, asked, DRAWN, rows=3))
    suggested = policy.model.generation_config
    assert suggested is not None
    suggested.update(repetition_penalty=1.8, min_new_tokens=4, suppress_tokens=[7, 8, 9], temperature=0.3, top_k=2)
    assert by_place(write(policy, asked, DRAWN, rows=3)) == expected
    assert by_place(write_batches(policy, asked, DRAWN, rows=3)) == expected
    assert policy.model.generation_config is suggested


def test_the_check_sees_slots_that_are_mixed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: every answer reads the positions of the first slot."""
    mask = slots._Tokens.mask
    monkeypatch.setattr(slots._Tokens, "mask", lambda self, window: mask(self, window)[1:2].expand(3, -1, -1, -1))
    with pytest.raises(ModelError, match="off by"):
        check_slots(policy_of("llama"))


def test_draws_have_the_right_probabilities() -> None:
    logits = torch.tensor([2.0, 0.0, 1.0, -1.0])
    count = 4000
    uniform = torch.from_numpy(np.array([noise(seed, 1)[0] for seed in range(count)]))
    for temperature, top_p, kept in ((1.0, 1.0, 4), (0.5, 1.0, 4), (1.0, 0.7, 2)):
        probability = (logits / temperature).softmax(0)
        order = probability.argsort(descending=True)[:kept]
        expected = torch.zeros(4).scatter(0, order, probability[order] / probability[order].sum())
        found = draw(logits.expand(count, 4), uniform, temperature=temperature, top_p=top_p)
        shares = Counter(found.tolist())
        for token in range(4):
            p = float(expected[token])
            assert abs(shares[token] / count - p) <= 4 * (p * (1 - p) / count) ** 0.5


def test_the_ends_of_the_noise() -> None:
    """No draw has probability zero, and none is outside the vocabulary."""
    logits = torch.tensor([[-torch.inf, 0.0, 0.0, -torch.inf]]).expand(2, 4)
    assert draw(logits, torch.tensor([0.0, 1 - 2.0**-23]), temperature=1.0, top_p=1.0).tolist() == [1, 2]
    assert (noise(3, 5) == noise(3, 9)[:5]).all()
