"""Generates several answers to each of many prompts: one pass per prompt, and no answer waits for a longer one.

A fixed number of slots (slots.py) is kept busy. When answers end, the next prompts take their slots, longest prompts
first. A model that cannot generate in slots falls back to transformers' own `generate` (`write_batches`).

Dimensions: R slots, N tokens of the longest answer.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from isopref.models.draw import draw, noise
from isopref.models.policy import Policy
from isopref.models.slots import Slots
from isopref.types import IntArray

FREE_SHARE = 8  # new prompts enter once 1 in 8 slots is free, to make a pass over prompts worth its overhead
PROMPT_TOKENS = 8192  # in one pass over prompts


@dataclass(frozen=True)
class Request:
    """A prompt to answer: one answer per seed, and the maximum number of tokens."""

    prompt: IntArray
    seeds: tuple[int, ...]
    limits: tuple[int, ...]


@dataclass(frozen=True)
class Choice:
    """How tokens are chosen, and which of them end an answer."""

    temperature: float
    top_p: float
    stops: tuple[int, ...]


class Answer(NamedTuple):
    """A finished answer: to request number `request`, with its seed number `number`."""

    request: int
    number: int
    tokens: list[int]  # without the end token
    ended: bool  # otherwise it was cut at its limit


class _Place(NamedTuple):
    request: int
    number: int


def write(
    policy: Policy, requests: Sequence[Request], choice: Choice, *, rows: int, graphs: bool = True
) -> Iterator[Answer]:
    """All answers, in the order in which they end. `rows`: number of answers generated at a time.

    `graphs`: record passes as CUDA graphs, if on CUDA.
    """
    if requests:
        yield from _Desk(policy, requests, choice, rows, graphs).write()


class _Desk:
    """The answers in progress: for each slot its tokens so far, on the device, and its request, on the host."""

    def __init__(self, policy: Policy, requests: Sequence[Request], choice: Choice, rows: int, graphs: bool):
        self.requests, self.choice = requests, choice
        answers = sum(len(one.seeds) for one in requests)
        # With a single row, CUDA's cumulative sums are not reproducible.
        self.slots = Slots(policy, max(2, min(rows, answers)), graphs=graphs)
        self.device = self.slots.device
        self.check_every = 8 if self.device.type == "cuda" else 1  # steps between checks for ended answers
        order = sorted(range(len(requests)), key=lambda n: -len(requests[n].prompt))
        num = self.slots.num_slots
        # The answers of a prompt enter together, after one pass over it; the next to enter are last.
        self.waiting = [group for n in reversed(order) for group in _groups(n, len(requests[n].seeds), num)]
        most = max(max(one.limits) for one in requests)
        self.whose: list[_Place | None] = [None] * num
        self.length = np.ones(num, dtype=np.int64)  # maximum number of tokens in a slot after the next step
        self.stops = torch.tensor(choice.stops, device=self.device)
        self.token = torch.zeros(num, dtype=torch.long, device=self.device)
        self.position = torch.zeros_like(self.token)
        self.count = torch.zeros_like(self.token)
        self.limit = torch.zeros_like(self.token)
        self.done = torch.ones(num, dtype=torch.bool, device=self.device)
        self.ended = torch.zeros_like(self.done)
        self.uniform = torch.zeros(num, most, dtype=torch.float64, device=self.device)
        self.written = torch.zeros(num, most, dtype=torch.long, device=self.device)

    def write(self) -> Iterator[Answer]:
        while self.waiting or any(self.whose):
            self._admit()
            self._shrink()
            for _ in range(self.check_every):
                self._step()
            yield from self._finished()

    def _admit(self) -> None:
        """Assign free slots to waiting answers."""
        free = [slot for slot, one in enumerate(self.whose) if one is None]
        if len(free) < max(1, len(self.whose) // FREE_SHARE):
            return
        while self.waiting and len(self.waiting[-1]) <= len(free):
            batch: dict[int, list[int]] = {}
            tokens = 0
            while self.waiting and len(self.waiting[-1]) <= len(free):
                request = self.waiting[-1][0].request
                tokens += len(self.requests[request].prompt)
                if request in batch or (batch and tokens > PROMPT_TOKENS):
                    break
                batch[request] = []
                for place in self.waiting.pop():
                    batch[request].append(free.pop())
                    self.whose[batch[request][-1]] = place
            self._enter(batch)

    def _enter(self, batch: dict[int, list[int]]) -> None:
        """Compute prompts up to their last token, which is the first token fed to the answers' slots."""
        for request, slots in batch.items():
            self.length[slots] = len(self.requests[request].prompt)
        self.slots.reserve(int(self.length.max()) + self.check_every)
        starts = {request: self.requests[request].prompt[:-1] for request in batch}
        known = [request for request in batch if len(starts[request])]
        if known:
            self.slots.add_prompts([starts[request] for request in known], [batch[request] for request in known])
        slots, prompts, limits = [], [], []
        uniform = np.zeros((sum(map(len, batch.values())), self.uniform.shape[1]))
        for request, mine in batch.items():
            one = self.requests[request]
            for slot in mine:
                place = self.whose[slot]
                assert place is not None
                limit = one.limits[place.number]
                uniform[len(slots), :limit] = noise(one.seeds[place.number], limit)
                slots.append(slot)
                prompts.append(one.prompt)
                limits.append(limit)
        index = torch.tensor(slots, device=self.device)
        self.token[index] = self._tensor([int(prompt[-1]) for prompt in prompts])
        self.position[index] = self._tensor([len(prompt) - 1 for prompt in prompts])
        self.limit[index] = self._tensor(limits)
        self.uniform[index] = torch.from_numpy(uniform).to(self.device)
        self.count[index] = 0
        self.done[index] = False
        self.ended[index] = False

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, device=self.device)

    def _shrink(self) -> None:
        """Drop free slots once nothing is waiting and half of the slots are free."""
        busy = [slot for slot, one in enumerate(self.whose) if one is not None]
        if self.waiting or len(busy) < 2 or 2 * len(busy) > len(self.whose):
            return
        self.slots.keep_only(busy)
        index = torch.tensor(busy, device=self.device)
        for name in ("token", "position", "count", "limit", "done", "ended", "uniform", "written"):
            setattr(self, name, getattr(self, name)[index])
        self.whose = [self.whose[slot] for slot in busy]
        self.length = self.length[busy]

    def _step(self) -> None:
        """Generate one more token in every unfinished slot. Does not synchronise with the device."""
        self.slots.reserve(int(self.length.max()))
        logits = self.slots.next_logits(self.token, self.position, int(self.length.max()))
        at = self.count.clamp(max=self.uniform.shape[1] - 1)[:, None]
        uniform = self.uniform.gather(1, at)[:, 0]
        token = draw(logits, uniform, temperature=self.choice.temperature, top_p=self.choice.top_p)
        stops = torch.isin(token, self.stops)
        writes = ~self.done
        keeps = writes & ~stops
        self.written.scatter_(1, at, torch.where(keeps, token, self.written.gather(1, at)[:, 0])[:, None])
        self.count += keeps
        self.ended |= writes & stops
        self.done |= stops | (self.count >= self.limit)
        going = ~self.done
        self.token = torch.where(going, token, self.token)
        self.position += going
        self.length += [one is not None for one in self.whose]

    def _finished(self) -> Iterator[Answer]:
        """The answers that have ended since the last check; their slots become free."""
        done = self.done.tolist()
        ready = [slot for slot, place in enumerate(self.whose) if place is not None and done[slot]]
        if not ready:
            return
        index = torch.tensor(ready, device=self.device)
        count, ended = self.count[index].tolist(), self.ended[index].tolist()
        tokens = self.written[index].cpu()
        for row, slot in enumerate(ready):
            place = self.whose[slot]
            assert place is not None
            self.whose[slot] = None
            self.length[slot] = 1
            self.position[slot] = 0
            yield Answer(*place, tokens[row, : count[row]].tolist(), ended[row])


def _groups(request: int, answers: int, most: int) -> list[list[_Place]]:
    """The answers of a request, in groups no larger than the number of slots."""
    every = [_Place(request, number) for number in range(answers)]
    return [every[start : start + most] for start in range(0, answers, most)]


class _Draw(LogitsProcessor):  # type: ignore[misc,unused-ignore]
    """Makes `generate`'s greedy choice the token that `draw` selects."""

    def __init__(self, choice: Choice, uniform_RN: Tensor, start: int):
        self.choice, self.uniform, self.start = choice, uniform_RN, start

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        uniform = self.uniform[:, input_ids.shape[1] - self.start]
        token = draw(scores, uniform, temperature=self.choice.temperature, top_p=self.choice.top_p)
        return torch.full_like(scores, -torch.inf).scatter(1, token[:, None], 0.0)


@torch.no_grad()
def write_batches(policy: Policy, requests: Sequence[Request], choice: Choice, *, rows: int) -> Iterator[Answer]:
    """The same answers through transformers' `generate`, in batches of prompts of equal length.

    Recurrent models would read left padding as text, so there is none.
    """

    def length(place: _Place) -> int:
        return len(requests[place.request].prompt)

    every = [_Place(n, number) for n, one in enumerate(requests) for number in range(len(one.seeds))]
    every.sort(key=length, reverse=True)
    with policy.plain() as model, _nothing_suggested(model):
        for _, group in groupby(every, key=length):
            places = list(group)
            for start in range(0, len(places), rows):
                yield from _generate(model, requests, choice, places[start : start + rows])


@contextmanager
def _nothing_suggested(model: Any) -> Iterator[None]:
    """`generate` without what the model's generation_config.json adds, such as a repetition penalty."""
    suggested, model.generation_config = model.generation_config, GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = suggested


def _generate(model: Any, requests: Sequence[Request], choice: Choice, places: list[_Place]) -> Iterator[Answer]:
    device = next(model.parameters()).device
    mine = [requests[place.request] for place in places]
    limits = [one.limits[place.number] for one, place in zip(mine, places, strict=True)]
    width, most = len(mine[0].prompt), max(limits)
    ids = torch.from_numpy(np.stack([one.prompt for one in mine]).astype(np.int64)).to(device)
    uniform = np.zeros((len(mine), most))
    for row, (one, place) in enumerate(zip(mine, places, strict=True)):
        uniform[row, : limits[row]] = noise(one.seeds[place.number], limits[row])
    out = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=most,
        do_sample=False,
        eos_token_id=list(choice.stops),
        pad_token_id=choice.stops[0],
        logits_processor=LogitsProcessorList([_Draw(choice, torch.from_numpy(uniform).to(device), width)]),
    )
    for place, limit, row in zip(places, limits, out[:, width:].tolist(), strict=True):
        tokens = row[:limit]
        end = next((n for n, token in enumerate(tokens) if token in choice.stops), None)
        yield Answer(*place, tokens[:end], end is not None)
