"""What recurrent layers need to know about a packed row: which tokens precede each one, and where sequences branch.

Pure index tables from a row's segments, built once per row (row.py) and used by all its layers. Nothing here
synchronises with the device.

Dimensions: S segments, T tokens of the row, J taps of a convolution, R copies of a token at most.
"""

from itertools import pairwise

import numpy as np
import torch

from isopref.batch.rows import copies_of, on_device
from isopref.ops.convolution import Taps
from isopref.ops.levels import CHUNK, Level, Levels
from isopref.types import IntArray, Segments

SHORT = 32  # tokens: parts up to this length are not worth a batch of their own


def taps_of(segments: Segments, count: int) -> Taps:
    """The tables of a convolution over `count` tokens, made on the device of the segments."""
    query, key = segments.query_offsets.long(), segments.key_offsets.long()
    token_T = torch.arange(segments.query_bounds[-1], device=query.device)
    index, copies = segments.key_index, segments.key_copies
    if index is None or copies is None:  # every token is a key once
        index, copies = token_T, torch.stack([token_T, torch.full_like(token_T, -1)])
    own = key[1:] - query.diff()  # index of a segment's first own token among the keys

    segment = torch.searchsorted(query[1:], token_T, right=True)
    place = own[segment] + token_T - query[segment]  # of each token among the keys
    before = [place - j for j in range(count)]
    index_JT = [torch.where(at >= key[segment], index[at.clamp(min=0)], -1) for at in before]

    segment = torch.searchsorted(key[1:], copies.clamp(min=0), right=True)
    after = [copies + j for j in range(count)]
    inside = [(copies >= 0) & (at >= own[segment]) & (at < key[segment + 1]) for at in after]
    copies_JRT = [
        torch.where(there, query[segment] + at - own[segment], -1) for there, at in zip(inside, after, strict=True)
    ]
    return Taps(torch.stack(index_JT), torch.stack(copies_JRT))


def levels_of(segments: Segments) -> Levels:
    """The row cut wherever a segment branches off, on the device of the segments."""
    by_depth = _longest_first(_parts(segments))
    order = np.concatenate([np.arange(start, end) for parts in by_depth for start, end, _ in parts])
    device = segments.query_offsets.device
    levels = []
    for depth, parts in enumerate(by_depth):
        length = np.array([end - start for start, end, _ in parts])
        bounds = np.cumsum([0, *length])
        batches = _batches(length.tolist())
        count, longest = np.array(batches).T
        places = np.repeat(longest, count)  # of each part in its batch
        padding = np.cumsum([0, *places[:-1]]) - bounds[:-1]  # before each part, in all batches
        parent = np.array([before for *_, before in parts])
        copies = None if depth == 0 else on_device(copies_of(parent, len(by_depth[depth - 1])), device)
        levels.append(
            Level(
                bounds=tuple(bounds.tolist()),
                offsets=on_device(bounds, device),
                chunks=on_device(_chunks(length), device),
                batches=batches,
                slots=on_device(np.arange(bounds[-1]) + np.repeat(padding, length), device),
                parent=None if depth == 0 else on_device(parent, device),
                parent_copies=copies,
            )
        )
    return Levels(on_device(order, device), on_device(np.argsort(order), device), tuple(levels))


def _chunks(lengths: IntArray) -> IntArray:
    """For each chunk of all parts, its part and its number there."""
    counts = -(-lengths // CHUNK)
    part = np.repeat(np.arange(len(lengths)), counts)
    return np.stack([part, np.arange(len(part)) - (np.cumsum(counts) - counts)[part]], axis=1)


def _longest_first(by_depth: list[list[tuple[int, int, int]]]) -> list[list[tuple[int, int, int]]]:
    """The parts of each depth sorted by length, so that batches hold parts of similar lengths."""
    found = []
    place = {-1: -1}  # old to new numbers of the previous depth's parts
    for parts in by_depth:
        order = sorted(range(len(parts)), key=lambda n: parts[n][0] - parts[n][1])
        found.append([(start, end, place[before]) for start, end, before in (parts[n] for n in order)])
        place = {old: new for new, old in enumerate(order)}
    return found


def _batches(lengths: list[int]) -> tuple[tuple[int, int], ...]:
    """(number of parts, padded length) of batches, the longest first. Parts fill at least half of it, unless short."""
    batches: list[tuple[int, int]] = []
    for length in lengths:
        if not batches or 2 * max(length, SHORT) < batches[-1][1]:
            batches.append((0, length))
        count, longest = batches[-1]
        batches[-1] = count + 1, longest
    return tuple(batches)


def _parts(segments: Segments) -> list[list[tuple[int, int, int]]]:
    """By depth: where parts begin and end in the row, and which part of the previous depth each follows (-1: none)."""
    cuts = sorted({token + 1 for token in segments.follows if token >= 0})
    by_depth: list[list[tuple[int, int, int]]] = []
    ending_at: dict[int, tuple[int, int]] = {-1: (-1, -1)}  # the depth of a part, and its number there
    for (start, end), follows in zip(pairwise(segments.query_bounds), segments.follows, strict=True):
        if start == end:
            continue
        inside = cuts[np.searchsorted(cuts, start, "right") : np.searchsorted(cuts, end, "left")]
        for first, last in pairwise([start, *inside, end]):
            depth, number = ending_at[follows if first == start else first - 1]
            if depth + 1 == len(by_depth):
                by_depth.append([])
            by_depth[depth + 1].append((first, last, number))
            ending_at[last - 1] = depth + 1, len(by_depth[depth + 1]) - 1
    return by_depth
