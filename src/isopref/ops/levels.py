"""A packed row cut into parts where its sequences branch, and recurrences over the parts, level by level.

Sequences with a common prefix share its state: a part starts from the final state of the part that it continues. Parts
of equal depth form a level and are computed together: all prompts, then all their answers.

Dimensions: T tokens of the row, N parts of one level or of one batch of it, L tokens of the longest part, M chunks of
`CHUNK` tokens.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isopref.ops.take import take

CHUNK = 64  # tokens that a recurrence computes at once


class Level(NamedTuple):
    """The parts of one depth, the longest first, one after the other in the order of `Levels`."""

    bounds: tuple[int, ...]  # N+1: where parts begin and end among the tokens of this level
    offsets: Tensor  # N+1, int64: the same on the device
    chunks: Tensor  # M, 2, int64: the part of each chunk of this level, and the chunk's number in it
    batches: tuple[tuple[int, int], ...]  # (N, L) of each padded batch; the parts fill the batches in their order
    slots: Tensor  # the slot of each of the level's tokens among the N * L slots of all batches
    parent: Tensor | None  # N: the part of the previous level that each part continues; None at depth 0
    parent_copies: Tensor | None  # R, parts of the previous level: where each of them is in `parent` (see take.py)


class Levels(NamedTuple):
    """A row cut where its sequences branch."""

    order: Tensor  # T: the row's tokens, level by level
    place: Tensor  # T: where each of the row's tokens is in that order
    levels: tuple[Level, ...]


# Takes the inputs of one level's tokens and the state before each of its parts (None: zeros). Returns the output for
# each token and the state after each part.
Rule = Callable[[tuple[Tensor, ...], Level, Tensor | None], tuple[Tensor, Tensor]]


def over_levels(rule: Rule, inputs: Sequence[Tensor], levels: Levels) -> Tensor:
    """The output of a recurrence for each token of the row: T, ...; the first dimension of `inputs` is T, too."""
    counts = [level.bounds[-1] for level in levels.levels]
    by_level = zip(*(_reorder(x, levels.order, levels.place).split(counts) for x in inputs), strict=True)
    outputs: list[Tensor] = []
    state: Tensor | None = None
    for level, given in zip(levels.levels, by_level, strict=True):
        if state is not None and level.parent is not None and level.parent_copies is not None:
            state = take(state, level.parent, level.parent_copies)
        out, state = rule(given, level, state)
        outputs.append(out)
    return _reorder(torch.cat(outputs), levels.place, levels.order)


def in_batches(
    rule: Callable[[tuple[Tensor, ...], Tensor | None], tuple[Tensor, Tensor]],
    inputs: Sequence[Tensor],
    level: Level,
    state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The outputs for a level's tokens and the state after each part, from a rule for padded batches of parts.

    The rule takes inputs padded with zeros (N, L, ...) and the state before each part. Zeros must not change the state.
    """
    places = [count * longest for count, longest in level.batches]
    spread = [_spread(x, level.slots, sum(places)).split(places) for x in inputs]
    counts = [count for count, _ in level.batches]
    before = [None] * len(counts) if state is None else state.split(counts)
    outputs, after = [], []
    for shape, first, *given in zip(level.batches, before, *spread, strict=True):
        out, last = rule(tuple(x.view(*shape, *x.shape[1:]) for x in given), first)
        outputs.append(out.flatten(0, 1))
        after.append(last)
    return _collect(torch.cat(outputs), level.slots), torch.cat(after)


def _reorder(x: Tensor, order: Tensor, place: Tensor) -> Tensor:
    ordered: Tensor = _Reorder.apply(x, order, place)  # type: ignore[no-untyped-call]
    return ordered


def _spread(x: Tensor, slots: Tensor, length: int) -> Tensor:
    places: Tensor = _Spread.apply(x, slots, length)  # type: ignore[no-untyped-call]
    return places


def _collect(places: Tensor, slots: Tensor) -> Tensor:
    x: Tensor = _Collect.apply(places, slots)  # type: ignore[no-untyped-call]
    return x


class _Reorder(torch.autograd.Function):
    """x[order]; the gradient is grad[place], as `place` is the inverse of `order`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.index_select(0, ctx.saved_tensors[0]), None, None


class _Spread(torch.autograd.Function):
    """A tensor of `length` zeros, except for x[i] at slots[i]. No two slots are equal."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slots: Tensor, length: int) -> Tensor:
        ctx.save_for_backward(slots)
        return x.new_zeros(length, *x.shape[1:]).index_copy(0, slots, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.index_select(0, ctx.saved_tensors[0]), None, None


class _Collect(torch.autograd.Function):
    """x[slots], the reverse of `_Spread`. torch's own gradient of indexing uses atomic additions on CUDA."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(slots)
        ctx.length = len(x)
        return x.index_select(0, slots)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.new_zeros(ctx.length, *grad.shape[1:]).index_copy(0, ctx.saved_tensors[0], grad), None
