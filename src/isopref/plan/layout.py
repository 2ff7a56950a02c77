"""The planner's view of a layout, and the sizes of the microbatches into which the run would split a batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from isopref.batch.packing import Budget, Group, RowKind, padded_tokens, plan_step
from isopref.examples import Lengths
from isopref.models.shape import ModelShape
from isopref.models.windows import Windows
from isopref.ops.attention import Kernel
from isopref.types import FloatArray, IntArray

TILE = 128  # queries and keys per FlashAttention tile, which is always computed in full


@dataclass(frozen=True)
class Layout:
    """How the model is placed on the ranks, and in which dtypes."""

    rows: RowKind
    parallel: Literal["single", "ddp", "fsdp", "hsdp"]
    ranks: int
    shard: int  # ranks that share one copy of the weights; 1 if each has its own
    grad_sync: Literal["last", "every"]
    compiled: bool
    kernel: Kernel  # for attention
    recompute: int  # layers that recompute their activations
    weight_bytes: int  # of a trained number
    compute_bytes: int
    frozen_bytes: float  # of a number that is not trained, on average
    quantised: bool  # frozen layers have 4 bits and are replicated on every rank
    state_bytes: float  # of optimizer state, per trained number
    offload: bool  # weights, gradients and optimizer state are kept in host memory
    offloaded: int = 0  # layers whose inputs are in host memory
    tile: int | None = None  # tokens that an MLP computes at a time
    from_host: bool = False  # sharded unit by unit from host memory, never in full on a rank
    references: int = 0  # models besides the trained one: a moving reference
    float8: bool = False  # linear layers multiply in float8
    forwards: float = 0  # extra forward passes: of a moving reference, or a first pass
    tensor: int = 1  # neighbouring ranks that compute each layer together
    context: int = 1  # neighbouring ranks that split every row

    @property
    def sharded(self) -> bool:
        return self.parallel in ("fsdp", "hsdp")

    @property
    def groups(self) -> int:
        """How many ways a batch is divided: by rank, or by group of ranks that work on the same pairs."""
        return self.ranks // self.together

    @property
    def together(self) -> int:
        """Ranks that work on the same pairs."""
        return self.tensor * self.context

    @property
    def averaging(self) -> int:
        """Ranks that hold the same part of each weight: they average its gradient, and may shard it further."""
        return self.ranks // self.tensor

    @property
    def parts(self) -> int:
        """How many parts a weight is divided into."""
        return self.shard * self.tensor

    def spread(self, shape: ModelShape) -> int:
        """Parameters that are sharded over ranks: frozen ones only if not quantised and there are several ranks."""
        frozen = self.sharded and not self.quantised and (self.shard > 1 or self.offload)
        return shape.parameters if frozen else shape.trained_parameters


ONE_GPU = Layout(
    rows="shared",
    parallel="single",
    ranks=1,
    shard=1,
    grad_sync="last",
    compiled=True,
    kernel="varlen_attn",
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
    """Sizes of the microbatches of one step, each R ranks (or groups with the same pairs) by M microbatches."""

    tokens: FloatArray  # slots, padding included
    keys: FloatArray  # slots of keys, a shared prompt's once for each answer
    predicted: FloatArray  # trained tokens of answers
    scores: FloatArray  # of queries with keys, computed in whole tiles, in all layers with attention
    tile_rows: FloatArray  # rows of such tiles

    @property
    def largest(self) -> "Loads":
        """The largest microbatch alone: R and M are 1."""
        return Loads(*(x.flat[[int(self.tokens.argmax())]].reshape(1, 1) for x in vars(self).values()))

    @property
    def summed(self) -> "Loads":
        """All microbatches added up: R and M are 1."""
        return Loads(*(x.sum().reshape(1, 1) for x in vars(self).values()))

    def split(self, size: int) -> "Loads":
        """The load of each of `size` ranks that split every row, by tokens and, in attention, by heads."""
        return Loads(*(x / size for x in vars(self).values()))

    def scaled(self, tokens: float) -> "Loads":
        """The same kind of pairs in microbatches with this many tokens in total."""
        return Loads(*(x * (tokens / self.tokens.sum()) for x in vars(self).values()))


def step_loads(lengths: Lengths, budget: Budget, *, ranks: int, attention_share: float, windows: Windows) -> Loads:
    """The microbatches of a global batch, cut as the run would cut it. `windows`: of the model's attention."""
    plan = plan_step(lengths, budget, num_ranks=ranks, attention_share=attention_share)
    return loads_of(lengths, plan, budget.kind, windows)


def loads_of(lengths: Lengths, plan: Sequence[Sequence[Group]], kind: RowKind, windows: Windows) -> Loads:
    groups = [group for rank in plan for group in rank]
    of_group = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    examples = lengths.select([example for group in groups for example in group])
    if kind in ("shared", "packed"):
        sizes = _packed(examples, kind, windows)
    else:
        slots = np.array([padded_tokens(lengths, group, kind) / max(1, len(group)) for group in groups])[of_group]
        count = examples.num_answers
        each = slots / count
        sizes = np.stack([slots, slots, *(count * tiles for tiles in _tiles(each, each, windows))])
    sizes = np.vstack([sizes, _sums(examples, examples.trained)])
    tokens, keys, scores, tile_rows, predicted = (
        np.bincount(of_group, size, minlength=len(groups)).astype(np.float64).reshape(len(plan), -1) for size in sizes
    )
    return Loads(tokens, keys, predicted, scores, tile_rows)


def _packed(examples: Lengths, kind: RowKind, windows: Windows) -> FloatArray:
    """Tokens, keys, scores and rows of tiles of each example: 4, N. A common start of answers counts once for each."""
    queries = keys = examples.sequence.astype(np.float64)
    if kind == "shared":  # the prompt is computed with the first answer
        queries = queries - examples.prompt[examples.of_answer]
        queries[examples.first_answer] += examples.prompt
    tokens = examples.tree if kind == "shared" else _sums(examples, keys)
    of_answers = (keys, *_tiles(queries, keys, windows))
    return np.stack([tokens, *(_sums(examples, one) for one in of_answers)])


def _sums(examples: Lengths, of_answers: IntArray | FloatArray) -> FloatArray:
    """Sums over the answers of each example: N."""
    return np.bincount(examples.of_answer, of_answers, minlength=len(examples)).astype(np.float64)


def _tiles(queries: FloatArray, keys: FloatArray, windows: Windows) -> tuple[FloatArray, FloatArray]:
    """Scores and rows of tiles in all layers with attention, of segments with these queries and keys."""
    scores = np.zeros_like(queries)
    for window, count in windows.items():
        scores += count * tile_scores(queries, keys, window)
    return scores, sum(windows.values()) * np.ceil(queries / TILE)


def tile_scores(queries: FloatArray, keys: FloatArray, window: int | None = None) -> FloatArray:
    """Scores computed for causal segments of these queries and keys, aligned at their ends, in full tiles."""
    total = np.zeros_like(queries)
    for first in range(0, int(queries.max(initial=0)), TILE):
        seen = keys - queries + np.minimum(first + TILE, queries)
        hidden = 0.0 if window is None else np.maximum(0.0, keys - queries + first + 1 - window)
        tiles = np.ceil(seen / TILE) - np.floor(hidden / TILE)
        total += np.where(queries > first, TILE * TILE * tiles, 0.0)
    return total
