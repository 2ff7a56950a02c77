"""Cutting one global batch into microbatches for every rank: a pure function of lengths.

Every rank computes the same plan from the same lengths, so nothing needs to be communicated. All ranks get the same
number of microbatches (sharded training moves in lockstep); a rank short of work gets empty ones. The plan decides
speed and memory, never the result.
"""

import bisect
import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from isopref.errors import ConfigError, shorter_pairs
from isopref.examples import Lengths
from isopref.types import FloatArray, IntArray

RowKind = Literal["shared", "packed", "padded", "padded_separate"]
Group = list[int]  # positions in the global batch that share a microbatch
GROUPS_PER_RANK = 4
ROWS_AT_ONCE = 16  # of R rows, R / 16 get an example at a time


@dataclass(frozen=True)
class Budget:
    """How large a microbatch may be on one rank."""

    kind: RowKind
    tokens: int
    examples: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(RowKind):
            raise ConfigError(f"Budget: kind must be one of {', '.join(get_args(RowKind))}; found {self.kind!r}.")
        if self.tokens < 1 or (self.examples is not None and self.examples < 1):
            raise ConfigError(
                f"Budget: tokens and examples must be at least 1; found tokens={self.tokens}, examples={self.examples}."
            )


def padded_tokens(lengths: Lengths, group: Sequence[int] | IntArray, kind: RowKind) -> int:
    """Token slots, padding included, that some of the examples take as one microbatch."""
    if len(group) == 0:
        return 0
    if kind in ("shared", "packed"):
        return int(tokens_alone(lengths, kind)[group].sum())
    sequences = lengths.sequences[group]
    if kind == "padded":
        return int(lengths.num_answers[group].sum() * sequences.max())
    return int(((sequences > 0).sum(axis=0) * sequences.max(axis=0)).sum())


def tokens_alone(lengths: Lengths, kind: RowKind) -> IntArray:
    """Token slots that each example takes as a microbatch of its own: N."""
    if kind == "shared":
        return lengths.tree
    if kind == "padded":
        padded: IntArray = lengths.num_answers * lengths.sequences.max(axis=1, initial=0)
        return padded
    together: IntArray = lengths.sequences.sum(axis=1)
    return together


def check_budget(
    lengths: Lengths,
    budget: Budget,
    *,
    setting: str | None = None,
    name: Callable[[int], str] = "example {}".format,
) -> None:
    """Raise ConfigError if the longest example does not fit into a microbatch alone.

    `setting` is the config field that set the budget (None: a script's own Budget); `name` gives an example's name in
    the message.
    """
    totals = tokens_alone(lengths, budget.kind)
    worst = int(totals.argmax())
    if totals[worst] > budget.tokens:
        rows = f"{budget.kind} rows" if setting is None else f"layout.rows: {budget.kind}"
        shorten = "shorten it." if setting is None else f"shorten the data: {shorter_pairs()}"
        raise ConfigError(
            f"{setting or 'Budget.tokens'} is {budget.tokens}, but {name(worst)} takes {int(totals[worst])} tokens in "
            f"{rows} ({parts(lengths, worst)}). Raise it to at least {int(totals[worst])}, or {shorten}"
        )


def parts(lengths: Lengths, example: int) -> str:
    """The parts of an example in words: "prompt 10, chosen 5, rejected 7"; of a list "prompt 10, answers 5, 7, 3"."""
    of_example = lengths.select([example])
    answers = of_example.answer.tolist()
    if of_example.compared.tolist() == [[0, 1]]:
        return f"prompt {lengths.prompt[example]}, chosen {answers[0]}, rejected {answers[1]}"
    return f"prompt {lengths.prompt[example]}, answers {', '.join(map(str, answers))}"


def plan_step(
    lengths: Lengths, budget: Budget, *, num_ranks: int = 1, attention_share: float = 0.0
) -> list[list[Group]]:
    """Microbatches of one global batch, by rank: the same number on every rank, empty groups where work runs out.

    `attention_share` is the cost of attending to one token over the cost of passing one token through the linear
    layers; it balances long sequences against short ones. An example too long for the budget raises ConfigError.
    """
    check_budget(lengths, budget)
    work = _work(lengths, budget.kind, attention_share)
    if budget.kind in ("shared", "packed"):
        groups = _pack(tokens_alone(lengths, budget.kind), work, budget, num_ranks)
    else:
        groups = _sort_and_cut(lengths, budget, num_ranks)
    return _deal(groups, work, num_ranks)


def _work(lengths: Lengths, kind: RowKind, attention_share: float) -> FloatArray:
    """Relative time of each example: linear in the tokens computed, plus attention."""
    sequences = lengths.sequences.astype(np.float64)
    tokens = lengths.tree if kind == "shared" else sequences.sum(axis=1)
    work: FloatArray = tokens + attention_share / 2 * (sequences**2).sum(axis=1)
    return work


def _pack(tokens: IntArray, work: FloatArray, budget: Budget, num_ranks: int) -> list[Group]:
    """As few rows as can hold everything, with equal work in each if possible."""
    num_rows = -(-int(tokens.sum()) // budget.tokens)
    if budget.examples is not None:
        num_rows = max(num_rows, -(-len(tokens) // budget.examples))
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
    """Place the largest example first, in the row with the least work that has room. None if an example has no row.

    With many rows, several examples are placed at a time, each in a row of its own, which is faster. Sorting is stable
    throughout: every rank must find the same plan, whatever its processor.
    """
    used, count = np.zeros(num_rows, np.int64), np.zeros(num_rows, np.int64)
    load = np.zeros(num_rows)
    rows = np.arange(num_rows)  # sorted by their work
    row_of = np.empty(len(order), np.int64)
    at, at_once = 0, max(1, num_rows // ROWS_AT_ONCE)
    while at < len(order):
        some = order[at : at + at_once]
        free = used[rows] + tokens[some].max() <= budget.tokens
        if budget.examples is not None:
            free &= count[rows] < budget.examples
        taken = rows[np.flatnonzero(free)[: len(some)]]
        if len(taken) < len(some):
            if at_once == 1:
                return None
            at_once //= 2
            continue
        row_of[at : at + len(some)] = taken
        used[taken] += tokens[some]
        load[taken] += work[some]
        count[taken] += 1
        rows = rows[np.argsort(load[rows], kind="stable")]
        at += len(some)
    members = order[np.argsort(row_of, kind="stable")].tolist()
    ends = np.cumsum(count).tolist()
    return [members[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _best_fit(order: list[int], tokens: list[int], num_rows: int, budget: Budget) -> list[Group] | None:
    """Place each example in the fullest row that has room: less even, but needs fewer rows. None if one has no row."""
    rows: list[Group] = [[] for _ in range(num_rows)]
    room = [(budget.tokens, row) for row in range(num_rows)]  # sorted by free tokens
    for example in order:
        at = bisect.bisect_left(room, (tokens[example], -1))
        if at == len(room):
            return None
        free, row = room.pop(at)
        rows[row].append(example)
        if budget.examples is None or len(rows[row]) < budget.examples:
            bisect.insort(room, (free - tokens[example], row))
    return rows


def _sort_and_cut(lengths: Lengths, budget: Budget, num_ranks: int) -> list[Group]:
    """Padded microbatches of examples of similar length, which keeps padding low; as many for each rank.

    If their number is no multiple of the ranks, the largest ones are halved until it is.
    """

    def slots(group: Group) -> int:
        return padded_tokens(lengths, group, budget.kind)

    longest = lengths.sequences.max(axis=1, initial=0)
    alone = lengths.num_answers * longest
    # Several groups to a rank, so that they can be dealt out evenly.
    even = int(alone.sum()) // (GROUPS_PER_RANK * num_ranks) if num_ranks > 1 else budget.tokens
    tokens = min(budget.tokens, max(even, int(alone.max())))
    groups: list[Group] = []
    for example in np.argsort(-longest, kind="stable").tolist():
        full = not groups or len(groups[-1]) == budget.examples or slots([*groups[-1], example]) > tokens
        if full:
            groups.append([])
        groups[-1].append(example)
    while len(groups) % num_ranks and max(map(len, groups)) > 1:
        largest = max(groups, key=lambda group: (len(group) > 1, slots(group)))
        groups.remove(largest)
        groups += [largest[: len(largest) // 2], largest[len(largest) // 2 :]]
    return groups


def _deal(groups: list[Group], work: FloatArray, num_ranks: int) -> list[list[Group]]:
    """Groups to ranks: equal counts, near-equal work, large ones first so that ranks stay in step."""
    of_example = work.tolist()
    loads = [(sum(of_example[example] for example in group), group) for group in groups]
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
