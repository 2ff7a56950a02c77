"""Cutting one global batch into microbatches for every rank: a pure function of lengths.

Every rank computes the same plan from the same lengths, so nothing needs to be communicated. All ranks get the same
number of microbatches (sharded training moves in lockstep); a rank short of work gets empty ones. The plan decides
speed and memory, never the result.
"""

import bisect
import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from isopref.errors import ConfigError, shorter_pairs
from isopref.types import CHOSEN, PROMPT, REJECTED, FloatArray, IntArray

RowKind = Literal["shared", "packed", "padded", "padded_separate"]
Group = list[int]  # positions in the global batch that share a microbatch
GROUPS_PER_RANK = 4
ROWS_AT_ONCE = 16  # one in so many rows gets a pair at a time


@dataclass(frozen=True)
class Budget:
    """How large a microbatch may be on one rank."""

    kind: RowKind
    tokens: int
    pairs: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(RowKind):
            raise ConfigError(f"Budget: kind must be one of {', '.join(get_args(RowKind))}; found {self.kind!r}.")
        if self.tokens < 1 or (self.pairs is not None and self.pairs < 1):
            raise ConfigError(
                f"a microbatch of {self.tokens} tokens and {self.pairs} pairs holds nothing; use 1 or more."
            )


def padded_tokens(lengths_P3: IntArray, kind: RowKind) -> int:
    """Token slots, padding included, that the given pairs take as one microbatch."""
    if len(lengths_P3) == 0:
        return 0
    prompt, chosen, rejected = (lengths_P3[:, side].astype(np.int64) for side in (PROMPT, CHOSEN, REJECTED))
    if kind == "shared":
        return int((prompt + chosen + rejected).sum())
    if kind == "packed":
        return int((2 * prompt + chosen + rejected).sum())
    longest_chosen, longest_rejected = int((prompt + chosen).max()), int((prompt + rejected).max())
    if kind == "padded":
        return 2 * len(lengths_P3) * max(longest_chosen, longest_rejected)
    return len(lengths_P3) * (longest_chosen + longest_rejected)


def tokens_alone(lengths_N3: IntArray, kind: RowKind) -> IntArray:
    """Token slots that each pair takes as a microbatch of its own: N."""
    alone: IntArray = lengths_N3.sum(axis=1) + (0 if kind == "shared" else lengths_N3[:, PROMPT])
    if kind == "padded":
        alone = 2 * (lengths_N3[:, PROMPT] + lengths_N3[:, CHOSEN:].max(axis=1))
    return alone


def check_budget(
    lengths_N3: IntArray,
    budget: Budget,
    *,
    setting: str | None = None,
    name: Callable[[int], str] = "pair {}".format,
) -> None:
    """Raise ConfigError if the longest pair does not fit into a microbatch alone.

    `setting` is the config's field that the budget comes from (None: a script's own Budget), `name` what a pair is
    called in the message.
    """
    totals = tokens_alone(lengths_N3, budget.kind)
    worst = int(totals.argmax())
    if totals[worst] > budget.tokens:
        prompt, chosen, rejected = (int(n) for n in lengths_N3[worst])
        rows = f"{budget.kind} rows" if setting is None else f"layout.rows: {budget.kind}"
        shorten = "shorten the pair." if setting is None else f"shorten the pairs: {shorter_pairs()}"
        raise ConfigError(
            f"{setting or 'Budget.tokens'} is {budget.tokens}, but {name(worst)} takes {int(totals[worst])} tokens in "
            f"{rows} (prompt {prompt}, chosen {chosen}, rejected {rejected}). Raise it to at least "
            f"{int(totals[worst])}, or {shorten}"
        )


def plan_step(
    lengths_P3: IntArray, budget: Budget, *, num_ranks: int = 1, attention_share: float = 0.0
) -> list[list[Group]]:
    """Microbatches of one global batch, by rank: the same number on every rank, empty groups where work runs out.

    `attention_share` is the cost of attending to one token over the cost of passing one token through the linear
    layers; it balances long sequences against short ones. A pair too long for the budget raises ConfigError.
    """
    check_budget(lengths_P3, budget)
    if budget.kind in ("shared", "packed"):
        groups = _pack(lengths_P3, budget, num_ranks, attention_share)
    else:
        groups = _sort_and_cut(lengths_P3, budget, num_ranks)
    return _deal(groups, _work(lengths_P3, budget.kind, attention_share), num_ranks)


def _work(lengths_P3: IntArray, kind: RowKind, attention_share: float) -> FloatArray:
    """Relative time of each pair: linear in the tokens computed, plus attention."""
    lengths = lengths_P3.astype(np.float64)
    sequences = lengths[:, PROMPT, None] + lengths[:, CHOSEN:]
    tokens = lengths.sum(axis=1) if kind == "shared" else sequences.sum(axis=1)
    work: FloatArray = tokens + attention_share / 2 * (sequences**2).sum(axis=1)
    return work


def _pack(lengths_P3: IntArray, budget: Budget, num_ranks: int, attention_share: float) -> list[Group]:
    """As few rows as hold everything, with the same work in each if that can be had."""
    tokens = tokens_alone(lengths_P3, budget.kind)
    work = _work(lengths_P3, budget.kind, attention_share)
    num_rows = -(-int(tokens.sum()) // budget.tokens)
    if budget.pairs is not None:
        num_rows = max(num_rows, -(-len(tokens) // budget.pairs))
    order = np.argsort(-work, kind="stable")
    while True:
        num_rows = -(-num_rows // num_ranks) * num_ranks
        rows = _least_work(order, tokens, work, num_rows, budget)
        rows = rows or _best_fit(np.argsort(-tokens, kind="stable").tolist(), tokens.tolist(), num_rows, budget)
        if rows is not None:
            return rows
        num_rows += 1


def _least_work(
    order: IntArray, tokens: IntArray, work: FloatArray, num_rows: int, budget: Budget
) -> list[Group] | None:
    """Largest pair first, into the row with the least work that has room; of many rows, several such at once.

    Sorting is stable throughout: every rank must find the same plan, whatever its processor.
    """
    used, count = np.zeros(num_rows, np.int64), np.zeros(num_rows, np.int64)
    load = np.zeros(num_rows)
    rows = np.arange(num_rows)  # by their work
    row_of = np.empty(len(order), np.int64)
    at, at_once = 0, max(1, num_rows // ROWS_AT_ONCE)
    while at < len(order):
        pairs = order[at : at + at_once]
        free = used[rows] + tokens[pairs].max() <= budget.tokens
        if budget.pairs is not None:
            free &= count[rows] < budget.pairs
        chosen = rows[np.flatnonzero(free)[: len(pairs)]]
        if len(chosen) < len(pairs):
            if at_once == 1:
                return None
            at_once //= 2
            continue
        row_of[at : at + len(pairs)] = chosen
        used[chosen] += tokens[pairs]
        load[chosen] += work[pairs]
        count[chosen] += 1
        rows = rows[np.argsort(load[rows], kind="stable")]
        at += len(pairs)
    members = order[np.argsort(row_of, kind="stable")].tolist()
    ends = np.cumsum(count).tolist()
    return [members[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _best_fit(order: list[int], tokens: list[int], num_rows: int, budget: Budget) -> list[Group] | None:
    """Each pair into the fullest row that still has room: less even, but it fits where balance alone would not."""
    rows: list[Group] = [[] for _ in range(num_rows)]
    room = [(budget.tokens, row) for row in range(num_rows)]  # sorted
    for pair in order:
        at = bisect.bisect_left(room, (tokens[pair], -1))
        if at == len(room):
            return None
        free, row = room.pop(at)
        rows[row].append(pair)
        if budget.pairs is None or len(rows[row]) < budget.pairs:
            bisect.insort(room, (free - tokens[pair], row))
    return rows


def _sort_and_cut(lengths_P3: IntArray, budget: Budget, num_ranks: int) -> list[Group]:
    """Neighbours in length share a padded microbatch, which keeps padding low; halve groups until ranks are even."""

    def slots(group: Group) -> int:
        return padded_tokens(lengths_P3[group], budget.kind)

    longest = lengths_P3[:, PROMPT] + lengths_P3[:, CHOSEN:].max(axis=1)
    # Several groups to a rank, so that they can be dealt out evenly.
    even = 2 * int(longest.sum()) // (GROUPS_PER_RANK * num_ranks) if num_ranks > 1 else budget.tokens
    tokens = min(budget.tokens, max(even, 2 * int(longest.max())))
    groups: list[Group] = []
    for pair in np.argsort(-longest, kind="stable").tolist():
        full = not groups or len(groups[-1]) == budget.pairs or slots([*groups[-1], pair]) > tokens
        if full:
            groups.append([])
        groups[-1].append(pair)
    while len(groups) % num_ranks and max(map(len, groups)) > 1:
        largest = max(groups, key=lambda group: (len(group) > 1, slots(group)))
        groups.remove(largest)
        groups += [largest[: len(largest) // 2], largest[len(largest) // 2 :]]
    return groups


def _deal(groups: list[Group], work: FloatArray, num_ranks: int) -> list[list[Group]]:
    """Groups to ranks: equal counts, near-equal work, large ones first so that ranks stay in step."""
    of_pair = work.tolist()
    loads = [(sum(of_pair[pair] for pair in group), group) for group in groups]
    loads += [(0.0, [])] * (-len(groups) % num_ranks)
    loads.sort(key=lambda item: (-item[0], item[1]))
    per_rank = len(loads) // num_ranks
    ranks: list[list[Group]] = [[] for _ in range(num_ranks)]
    heap = [(0.0, rank) for rank in range(num_ranks)]
    for load, group in loads:
        total, rank = heap[0]
        ranks[rank].append(group)
        if len(ranks[rank]) < per_rank:
            heapq.heapreplace(heap, (total + load, rank))
        else:
            heapq.heappop(heap)
    return ranks
