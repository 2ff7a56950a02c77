"""What the planner is told of a layout, and the sizes of the microbatches that the run's own plan makes of a batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from isopref.data.packing import Budget, Group, RowKind, padded_tokens, plan_step
from isopref.models.shape import ModelShape
from isopref.types import CHOSEN, PROMPT, REJECTED, FloatArray, IntArray

TILE = 128  # queries and keys that FlashAttention computes at a time, whether all of them are needed or not


@dataclass(frozen=True)
class Layout:
    """How the model lies on the ranks, and in which number types."""

    rows: RowKind
    parallel: Literal["single", "ddp", "fsdp", "hsdp"]
    ranks: int
    shard: int  # ranks that share one copy of the weights; 1 where each has its own
    grad_sync: Literal["last", "every"]
    compiled: bool
    recompute: int  # layers that compute their activations again
    weight_bytes: int  # of a trained number
    compute_bytes: int
    frozen_bytes: float  # of a number that is not trained, on average
    quantised: bool  # frozen layers are in four bits, and whole on every rank
    state_bytes: float  # of the optimizer, for each trained number
    offload: bool  # weights, their gradients and the optimizer are in the host's memory
    from_host: bool = False  # sharded unit by unit from the host's memory, and never whole on a rank
    references: int = 0  # models beside the one that is trained: a reference that moves
    forwards: int = 0  # forward passes besides the one that is trained on: of such a reference, or a first pass

    @property
    def sharded(self) -> bool:
        return self.parallel in ("fsdp", "hsdp")

    def spread(self, shape: ModelShape) -> int:
        """Parameters that sharding spreads over ranks: frozen ones only where they are whole numbers and ranks many."""
        frozen = self.sharded and not self.quantised and (self.shard > 1 or self.offload)
        return shape.parameters if frozen else shape.trained_parameters


ONE_GPU = Layout(
    rows="shared",
    parallel="single",
    ranks=1,
    shard=1,
    grad_sync="last",
    compiled=True,
    recompute=0,
    weight_bytes=2,
    compute_bytes=2,
    frozen_bytes=2,
    quantised=False,
    state_bytes=4,
    offload=False,
)  # all in bfloat16, with AdamW


@dataclass(frozen=True)
class Loads:
    """Sizes of the microbatches of one step, each R ranks by M microbatches."""

    tokens: FloatArray  # slots, padding included
    keys: FloatArray  # slots of keys, a shared prompt's once for each answer
    predicted: FloatArray  # tokens of answers
    scores: FloatArray  # of queries with keys, computed in whole tiles

    @property
    def largest(self) -> "Loads":
        """The largest microbatch, as one of one."""
        return Loads(*(x.flat[[int(self.tokens.argmax())]].reshape(1, 1) for x in vars(self).values()))

    @property
    def summed(self) -> "Loads":
        """All of them as one microbatch."""
        return Loads(*(x.sum().reshape(1, 1) for x in vars(self).values()))

    def scaled(self, tokens: float) -> "Loads":
        """The same kind of pairs in microbatches that add up to so many tokens."""
        return Loads(*(x * (tokens / self.tokens.sum()) for x in vars(self).values()))


def step_loads(lengths_P3: IntArray, budget: Budget, *, ranks: int, attention_share: float) -> Loads:
    """The microbatches of a global batch, cut as the run would cut it."""
    plan = plan_step(lengths_P3, budget, num_ranks=ranks, attention_share=attention_share)
    return loads_of(lengths_P3, plan, budget.kind)


def loads_of(lengths_P3: IntArray, plan: Sequence[Sequence[Group]], kind: RowKind) -> Loads:
    groups = [group for rank in plan for group in rank]
    of_group = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    pairs = lengths_P3[[pair for group in groups for pair in group]].astype(np.float64)
    if kind in ("shared", "packed"):
        sizes = _packed(pairs, kind)
    else:
        slots = np.array([padded_tokens(lengths_P3[group], kind) / max(1, len(group)) for group in groups])[of_group]
        sizes = np.stack([slots, slots, 2 * tile_scores(slots / 2, slots / 2)])
    sizes = np.vstack([sizes, pairs[:, CHOSEN:].sum(axis=1)])
    tokens, keys, scores, predicted = (
        np.bincount(of_group, size, minlength=len(groups)).astype(np.float64).reshape(len(plan), -1) for size in sizes
    )
    return Loads(tokens, keys, predicted, scores)


def _packed(pairs_P3: FloatArray, kind: RowKind) -> FloatArray:
    """Tokens, keys and scores of each pair: 3, P."""
    prompt, chosen, rejected = (pairs_P3[:, side] for side in (PROMPT, CHOSEN, REJECTED))
    keys = 2 * prompt + chosen + rejected
    tokens = prompt + chosen + rejected if kind == "shared" else keys
    of_rejected = rejected if kind == "shared" else prompt + rejected
    scores = tile_scores(prompt + chosen, prompt + chosen) + tile_scores(of_rejected, prompt + rejected)
    return np.stack([tokens, keys, scores])


def tile_scores(queries: FloatArray, keys: FloatArray) -> FloatArray:
    """Scores computed for causal segments of so many queries and keys, aligned at their ends, in whole tiles."""
    total = np.zeros_like(queries)
    for first in range(0, int(queries.max(initial=0)), TILE):
        seen = keys - queries + np.minimum(first + TILE, queries)
        total += np.where(queries > first, TILE * TILE * np.ceil(seen / TILE), 0.0)
    return total
