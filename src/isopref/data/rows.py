"""Pairs to tensors: packed rows and padded batches. Every layout ends in the same Microbatch, and so in one score path.

A packed row holds whole pairs. With a shared prompt a pair is [prompt | chosen | rejected]: the rejected answer's
positions restart after the prompt, and it attends to the prompt and itself, never to the chosen one. Without, all
sequences [prompt | answer] follow one another, first the chosen ones.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from isopref.data.packing import RowKind
from isopref.types import IntArray, Microbatch, PairTokens, Pass, Segments

FILLER_TOKENS = 8  # an empty microbatch still runs the model, so that ranks stay in step


def build_microbatch(pairs: Sequence[PairTokens], kind: RowKind, *, row_tokens: int | None = None) -> Microbatch:
    """One microbatch of the given pairs, on the CPU. No pairs give a filler, which has no completions.

    `row_tokens` pads a packed row to that length; the padding is a segment of its own.
    """
    if row_tokens is not None and kind not in ("shared", "packed"):
        raise ValueError(f"row_tokens is for packed rows, not for {kind}")
    if any(len(pair.prompt) == 0 for pair in pairs):
        raise ValueError("a prompt needs at least one token: something must predict the first completion token")
    counts = torch.tensor([[len(p.chosen) for p in pairs], [len(p.rejected) for p in pairs]], dtype=torch.long)
    if kind == "shared":
        passes = [_shared_row(pairs, row_tokens)]
    elif kind == "packed":
        passes = [_packed_row(pairs, row_tokens)]
    elif kind == "padded":
        passes = [_padded(_sides(pairs, (0, 1)))]
    else:
        passes = [_padded(_sides(pairs, (0,))), _padded(_sides(pairs, (1,)))]
    return Microbatch(tuple(passes), counts.view(2, len(pairs)))


class _Sequence(NamedTuple):
    prompt: IntArray
    completion: IntArray
    number: int  # which completion it is
    tail: NDArray[np.bool_]  # of the completion


def _sides(pairs: Sequence[PairTokens], sides: tuple[int, ...]) -> list[_Sequence]:
    return [
        _Sequence(pair.prompt, pair[1 + side], side * len(pairs) + p, _tails(pair)[side])
        for side in sides
        for p, pair in enumerate(pairs)
    ]


def _tails(pair: PairTokens) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Which tokens of chosen and of rejected are beyond the length of the shorter one."""
    shorter = min(len(pair.chosen), len(pair.rejected))
    return np.arange(len(pair.chosen)) >= shorter, np.arange(len(pair.rejected)) >= shorter


class _Row:
    """A packed row under construction."""

    def __init__(self) -> None:
        self.tokens: list[IntArray] = []
        self.positions: list[IntArray] = []
        self.predict: list[IntArray] = []
        self.target: list[IntArray] = []
        self.completion: list[IntArray] = []
        self.tail: list[NDArray[np.bool_]] = []
        self.keys: list[IntArray] = []
        self.query_bounds = [0]
        self.key_bounds = [0]
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
        return where

    def predicts(self, where: IntArray, target: IntArray, completion: int, tail: NDArray[np.bool_]) -> None:
        self.predict.append(where)
        self.target.append(target)
        self.completion.append(np.full(len(target), completion))
        self.tail.append(tail)

    def finish(self, row_tokens: int | None) -> Pass:
        wanted = row_tokens or max(self.length, FILLER_TOKENS if self.length == 0 else 0)
        real, padding = self.length, wanted - self.length
        if padding < 0:
            raise ValueError(f"row_tokens is {row_tokens}, but the pairs of the row take {self.length}")
        if padding:
            nothing = np.zeros(padding, np.int64)  # position 0 too: a long padding must not run out of positions
            self.segment(nothing, nothing, nothing[:0])
        keys = np.concatenate(self.keys)
        in_order = len(keys) == self.length  # nothing is shared, so every token is a key once
        predict = _flat(self.predict)
        return Pass(
            input_ids=_tensor(self.tokens)[None],
            position_ids=_tensor(self.positions)[None],
            segments=Segments(
                query_offsets=torch.tensor(self.query_bounds, dtype=torch.int32),
                key_offsets=torch.tensor(self.key_bounds, dtype=torch.int32),
                key_index=None if in_order else torch.from_numpy(keys),
                key_copies=None if in_order else torch.from_numpy(_copies(keys, self.length)),
                query_bounds=tuple(self.query_bounds),
                key_bounds=tuple(self.key_bounds),
                longest=int(np.diff(self.key_bounds).max()),
            ),
            predict_index=torch.from_numpy(predict),
            predict_copies=torch.from_numpy(_copies(predict, self.length)),
            target=_tensor(self.target),
            completion=_tensor(self.completion),
            # A token is a key once for every sequence it is a part of; but the padding is part of none.
            times=torch.from_numpy(np.bincount(keys, minlength=self.length) * (np.arange(self.length) < real)),
            is_tail=_tensor(self.tail).bool(),
        )


def _copies(index_K: IntArray, size: int) -> IntArray:
    """Where each of `size` rows is in `index`: 2, size; -1 for a copy there is not."""
    counts = np.bincount(index_K, minlength=size)
    assert counts.max(initial=0) <= 2, "a row is taken more than twice"
    order = np.append(np.argsort(index_K, kind="stable"), [0, 0])
    first = np.cumsum(counts) - counts
    return np.stack([np.where(counts > copy, order[first + copy], -1) for copy in (0, 1)])


def _shared_row(pairs: Sequence[PairTokens], row_tokens: int | None) -> Pass:
    row = _Row()
    for p, pair in enumerate(pairs):
        prompt, chosen, rejected = pair
        tails = _tails(pair)
        length = len(prompt)
        first = row.segment(np.concatenate([prompt, chosen]), np.arange(length + len(chosen)), prompt[:0])
        second = row.segment(rejected, np.arange(length, length + len(rejected)), first[:length])
        end = first[length - 1 : length]  # the prompt's last token predicts the first token of both answers
        row.predicts(first[length - 1 : -1], chosen, p, tails[0])
        row.predicts(np.concatenate([end, second])[: len(rejected)], rejected, len(pairs) + p, tails[1])
    return row.finish(row_tokens)


def _packed_row(pairs: Sequence[PairTokens], row_tokens: int | None) -> Pass:
    row = _Row()
    for prompt, completion, number, tail in _sides(pairs, (0, 1)):
        tokens = np.concatenate([prompt, completion])
        where = row.segment(tokens, np.arange(len(tokens)), tokens[:0])
        row.predicts(where[len(prompt) - 1 : -1], completion, number, tail)
    return row.finish(row_tokens)


def _padded(sequences: list[_Sequence]) -> Pass:
    width = max((len(one.prompt) + len(one.completion) for one in sequences), default=FILLER_TOKENS)
    ids = np.zeros((max(1, len(sequences)), width), np.int64)
    times = np.zeros_like(ids)
    predict, target, completions = [], [], []
    for b, (prompt, completion, number, _) in enumerate(sequences):
        end = len(prompt) + len(completion)
        ids[b, :end] = np.concatenate([prompt, completion])
        times[b, :end] = 1
        predict.append(np.arange(b * width + len(prompt) - 1, b * width + end - 1))
        target.append(completion)
        completions.append(np.full(len(completion), number))
    where = _flat(predict)
    return Pass(
        input_ids=torch.from_numpy(ids),
        position_ids=None,
        segments=None,
        predict_index=torch.from_numpy(where),
        predict_copies=torch.from_numpy(_copies(where, ids.size)),
        target=_tensor(target),
        completion=_tensor(completions),
        times=torch.from_numpy(times.ravel()),
        is_tail=_tensor([one.tail for one in sequences]).bool(),
    )


def _tensor(parts: Sequence[IntArray | NDArray[np.bool_]]) -> torch.Tensor:
    return torch.from_numpy(_flat(parts))


def _flat(parts: Sequence[IntArray | NDArray[np.bool_]]) -> IntArray:
    return np.concatenate([np.arange(0), *parts]).astype(np.int64, copy=False)
