"""Examples to tensors: packed rows and padded batches. All layouts end in a Microbatch, and so in one score path.

A packed row holds complete examples. In a `shared` row, the sequences [prompt | answer] of an example form a prefix
tree: the first sequence is stored completely, each later one without the prefix that it shares with an earlier one. Its
own tokens continue the positions of that prefix, and attend to it and to themselves, never to another answer.
In a `packed` row, all sequences are complete and follow one another, the first answers of all examples before the
second ones. Only trained tokens are predicted: tokens of weight 0 are context, and cost nothing in the head.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from isopref.batch.packing import RowKind
from isopref.examples import Example, Lengths, shared_tokens
from isopref.types import FloatArray, IntArray, Microbatch, Pass, Segments

FILLER_TOKENS = 8  # an empty microbatch still runs the model, so that ranks stay in step
FEWEST_COPIES = 2  # so that all rows of pairs have tables of copies of the same shape, whether or not tokens are shared


@dataclass(frozen=True)
class _Sequence:
    """A prompt with one of its answers."""

    example: int  # index of the example in the microbatch
    number: int  # index of the answer in its example
    answer: int  # index of the answer in the microbatch
    prompt: IntArray
    own: IntArray  # tokens of the answer
    tokens: IntArray  # of prompt and answer
    trained: IntArray  # places of the trained tokens in `own`
    weights: FloatArray | None  # of the trained tokens; None if all are 1


def build_microbatch(
    examples: Sequence[Example], kind: RowKind, *, row_tokens: int | None = None, num_passes: int = 2
) -> Microbatch:
    """One microbatch of the given examples, on the CPU. Without examples, a filler, which has no answers.

    `row_tokens` pads a packed row to that length; the padding is a segment of its own. `num_passes` is for
    padded_separate: the most answers of any example in the global batch, so that all ranks run as many passes.
    Answers are numbered in rounds: the first ones of all examples, then the second ones (see `in_rounds`).
    """
    if row_tokens is not None and kind not in ("shared", "packed"):
        raise ValueError(f"row_tokens is for packed rows, not for {kind}")
    if any(len(example.prompt) == 0 for example in examples):
        raise ValueError("a prompt needs at least one token: something must predict the first token of an answer")
    rounds = _rounds(examples, num_passes)
    sequences = [one for of_round in rounds for one in of_round]
    if kind == "shared":
        passes = [_shared_row(sorted(sequences, key=lambda one: one.example), row_tokens)]
    elif kind == "packed":
        passes = [_packed_row(sequences, row_tokens)]
    elif kind == "padded":
        passes = [_padded(sequences)]
    else:
        passes = [_padded(of_round) for of_round in rounds]
    compared = _compared(examples, sequences)
    return Microbatch(
        tuple(passes),
        num_tokens=torch.tensor([len(one.trained) for one in sequences], dtype=torch.long),
        example=torch.tensor([one.example for one in sequences], dtype=torch.long),
        score=_scores(examples, sequences),
        compared=torch.from_numpy(compared),
        compared_copies=torch.from_numpy(copies_of(compared, len(sequences))),
        gap=torch.tensor([gap for one in examples for gap in _gaps(one)], dtype=torch.float64),
    )


def in_rounds(lengths: Lengths, index: IntArray) -> IntArray:
    """The answers of some examples in the order of their microbatch, as indices among all answers of `lengths`."""
    count = lengths.num_answers[index]
    round_A = np.concatenate([np.arange(0), *(np.arange(n) for n in count)])
    return lengths.answers_of(index)[np.argsort(round_A, kind="stable")]


def _rounds(examples: Sequence[Example], num_rounds: int) -> list[list[_Sequence]]:
    """The first answers of all examples, then the second ones, and so on; numbered in this order."""
    rounds: list[list[_Sequence]] = []
    number = 0
    for k in range(max([num_rounds, *(len(example.answers) for example in examples)])):
        rounds.append([])
        for e, example in enumerate(examples):
            if k < len(example.answers):
                rounds[-1].append(_sequence(example, e, k, number))
                number += 1
    return rounds


def _sequence(example: Example, place: int, k: int, number: int) -> _Sequence:
    """Answer k of the example at `place` in the microbatch; `number` is the answer's own index in the microbatch."""
    own, weights = example.answers[k], example.weights_of(k)
    trained = np.arange(len(own)) if weights is None else np.flatnonzero(weights)
    tokens = np.concatenate([example.prompt, own])
    return _Sequence(
        place, k, number, example.prompt, own, tokens, trained, None if weights is None else weights[trained]
    )


def _compared(examples: Sequence[Example], sequences: Sequence[_Sequence]) -> IntArray:
    """Indices in the microbatch of the answers that are compared: all better ones, then all worse ones."""
    answers: list[list[int]] = [[] for _ in examples]
    for one in sequences:
        answers[one.example].append(one.answer)
    pairs = [
        (answers[e][better], answers[e][worse])
        for e, example in enumerate(examples)
        for better, worse in example.comparisons
    ]
    return np.array(pairs, dtype=np.int64).reshape(-1, 2).T.ravel()


def _gaps(example: Example) -> Sequence[float]:
    return example.score_gaps or (math.nan,) * len(example.comparisons)


def _scores(examples: Sequence[Example], sequences: Sequence[_Sequence]) -> torch.Tensor:
    """The score of each answer, NaN if its example has none: A."""
    of_examples = [example.scores or (math.nan,) * len(example.answers) for example in examples]
    return torch.tensor([of_examples[one.example][one.number] for one in sequences], dtype=torch.float64)


class _Row:
    """A packed row under construction."""

    def __init__(self) -> None:
        self.tokens: list[IntArray] = []
        self.positions: list[IntArray] = []
        self.paths: list[IntArray] = []
        self.predict: list[IntArray] = []
        self.last: list[tuple[int, int]] = []  # of each sequence: position of its last token, and its answer
        self.keys: list[IntArray] = []
        self.sequences: list[_Sequence] = []
        self.query_bounds = [0]
        self.key_bounds = [0]
        self.follows: list[int] = []
        self.length = 0

    def segment(self, tokens: IntArray, positions: IntArray, seen_before: IntArray) -> IntArray:
        """Append tokens that attend to `seen_before` and to themselves. Returns where they are in the row."""
        where = np.arange(self.length, self.length + len(tokens))
        self.tokens.append(tokens)
        self.positions.append(positions)
        self.keys += [seen_before, where]
        self.length += len(tokens)
        self.query_bounds.append(self.length)
        self.key_bounds.append(self.key_bounds[-1] + len(seen_before) + len(tokens))
        self.follows.append(int(seen_before[-1]) if len(seen_before) else -1)
        return where

    def append(self, sequence: _Sequence, seen_before: IntArray) -> IntArray:
        """Append the tokens of a sequence after those at `seen_before`. Returns the positions of all its tokens."""
        tokens, shared = sequence.tokens, len(seen_before)
        path = seen_before
        if shared < len(tokens):
            path = np.append(path, self.segment(tokens[shared:], np.arange(shared, len(tokens)), seen_before))
        self.sequences.append(sequence)
        self.paths.append(path)
        self.predict.append(path[_before(sequence)])
        self.last.append((int(path[-1]), sequence.answer))
        return path

    def finish(self, row_tokens: int | None) -> Pass:
        wanted = row_tokens or max(self.length, FILLER_TOKENS if self.length == 0 else 0)
        padding = wanted - self.length
        if padding < 0:
            raise ValueError(f"row_tokens is {row_tokens}, but the examples of the row take {self.length}")
        if padding:
            nothing = np.zeros(padding, np.int64)  # the positions, too: long padding must not exceed the model's
            self.segment(nothing, nothing, nothing[:0])
        keys = np.concatenate(self.keys)
        in_order = len(keys) == self.length  # no prefix is shared, so every token is a key once
        predict = _flat(self.predict)
        return Pass(
            input_ids=_tensor(self.tokens)[None],
            position_ids=_tensor(self.positions)[None],
            segments=Segments(
                query_offsets=torch.tensor(self.query_bounds, dtype=torch.int32),
                key_offsets=torch.tensor(self.key_bounds, dtype=torch.int32),
                key_index=None if in_order else torch.from_numpy(keys),
                key_copies=None if in_order else torch.from_numpy(copies_of(keys, self.length)),
                query_bounds=tuple(self.query_bounds),
                key_bounds=tuple(self.key_bounds),
                follows=tuple(self.follows),
                longest=int(np.diff(self.key_bounds).max()),
            ),
            predict_places=predict,
            predict_index=torch.from_numpy(predict),
            predict_copies=torch.from_numpy(copies_of(predict, self.length)),
            times=torch.from_numpy(np.bincount(_flat(self.paths), minlength=self.length)),
            **_trained(self.sequences),
            **_last(self.last, self.length),
        )


def _last(ends: Sequence[tuple[int, int]], size: int) -> dict[str, Any]:
    """The fields of a Pass of `size` positions that say where sequences end, from (position, answer) of each."""
    index, answer = np.array(ends, np.int64).reshape(-1, 2).T
    return {
        "last_places": index.copy(),
        "last_index": torch.from_numpy(index.copy()),
        "last_copies": torch.from_numpy(copies_of(index, size)),
        "last_answer": torch.from_numpy(answer.copy()),
    }


def _before(one: _Sequence) -> IntArray:
    """The places in a sequence that predict its trained tokens: each is one before its token."""
    return len(one.prompt) - 1 + one.trained


def _trained(sequences: Sequence[_Sequence]) -> dict[str, Any]:
    """The fields of a Pass about the trained tokens of its sequences, one sequence after the other."""
    weights = [np.ones(len(one.trained)) if one.weights is None else one.weights for one in sequences]
    plain = all(one.weights is None for one in sequences)
    return {
        "target": _tensor([one.own[one.trained] for one in sequences]),
        "answer": _tensor([np.full(len(one.trained), one.answer) for one in sequences]),
        "place": _tensor([np.arange(len(one.trained)) for one in sequences]),
        "weight": None if plain else torch.from_numpy(np.concatenate(weights)),
    }


def copies_of(index_K: IntArray, size: int) -> IntArray:
    """Where `index` takes each of `size` rows, copy by copy: R, size; -1 beyond a row's last copy. See ops/take.py."""
    counts = np.bincount(index_K, minlength=size)
    first = np.cumsum(counts) - counts
    order = np.append(np.argsort(index_K, kind="stable"), 0)
    copies = range(max(FEWEST_COPIES, counts.max(initial=0)))
    return np.stack([np.where(counts > n, order[(first + n).clip(max=len(index_K))], -1) for n in copies])


def on_device(array: IntArray, device: torch.device) -> torch.Tensor:
    """The array on the device. A copy from pinned memory does not wait for the device."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _shared_row(sequences: Sequence[_Sequence], row_tokens: int | None) -> Pass:
    row = _Row()
    placed: dict[int, list[tuple[IntArray, IntArray]]] = {}  # by example: answers, and positions of their sequences
    for one in sequences:
        before = placed.setdefault(one.example, [])
        before.append((one.own, row.append(one, _shared_path(one, before))))
    return row.finish(row_tokens)


def _shared_path(one: _Sequence, before: Sequence[tuple[IntArray, IntArray]]) -> IntArray:
    """Positions in the row of the longest prefix that a sequence shares with an earlier one of its example."""
    path: IntArray = np.arange(0)
    for answer, where in before:
        shared = len(one.prompt) + shared_tokens(one.own, answer)
        if shared > len(path):
            path = where[:shared]
    return path


def _packed_row(sequences: Sequence[_Sequence], row_tokens: int | None) -> Pass:
    row = _Row()
    for one in sequences:
        row.append(one, np.arange(0))
    return row.finish(row_tokens)


def _padded(sequences: Sequence[_Sequence]) -> Pass:
    width = max((len(one.tokens) for one in sequences), default=FILLER_TOKENS)
    ids = np.zeros((max(1, len(sequences)), width), np.int64)
    times = np.zeros_like(ids)
    predict = []
    for b, one in enumerate(sequences):
        end = len(one.tokens)
        ids[b, :end] = one.tokens
        times[b, :end] = 1
        predict.append(b * width + _before(one))
    where = _flat(predict)
    return Pass(
        input_ids=torch.from_numpy(ids),
        position_ids=None,
        segments=None,
        predict_places=where,
        predict_index=torch.from_numpy(where),
        predict_copies=torch.from_numpy(copies_of(where, ids.size)),
        times=torch.from_numpy(times.ravel()),
        **_trained(sequences),
        **_last([(b * width + len(one.tokens) - 1, one.answer) for b, one in enumerate(sequences)], ids.size),
    )


def _tensor(parts: Sequence[IntArray]) -> torch.Tensor:
    return torch.from_numpy(_flat(parts))


def _flat(parts: Sequence[IntArray]) -> IntArray:
    return np.concatenate([np.arange(0), *parts]).astype(np.int64, copy=False)
