"""What ranks that work on the same pairs send each other inside layers, and how many ranks may. Computing hides none.

Tensor-parallel ranks compute each layer together. Outside attention and the MLP, each rank has its share of a row's
tokens; inside, all tokens and its share of the heads and of the MLP's inner side. So a forward pass gathers tokens
before each of the two and reduces sums after it, and a backward pass does the reverse. Every rank computes the output
head in full, for which it gathers the last hidden states and the head's weight. Norms of queries and keys go by tokens
again: exchanges before and after them.

Ranks that split rows exchange tokens for heads before every attention, and back after it. Layers with a state are
counted as if they attended, so not at all in a model without attention.

A layer that recomputes counts as a full pass forward, though torch may stop before its last exchange; the sums of
norms' gradients are too small to count. A model on paper, by the same links as network.py: no run has timed it.
"""

import math
from dataclasses import dataclass

from isopref.errors import ConfigError
from isopref.models.shape import ModelShape
from isopref.plan.layout import Layout
from isopref.plan.network import Network
from isopref.types import FloatArray

PER_LAYER = 4  # gathers and reductions of a row, in a pass forward and as many in one backward
FORWARD_ENDS, BACKWARD_ENDS = 2, 1  # the sums of embeddings and the gather for the head; the gradient of embeddings
NORM_EXCHANGES = 4  # in a pass: queries and keys, before and after their norms
HEAD_EXCHANGES = 2  # in a pass: tokens for heads, and back


@dataclass(frozen=True)
class Exchange:
    """What a group of ranks exchanges in a microbatch's passes, forward, backward and recomputing."""

    of_token: float  # bytes that a rank has of it, or gets, for one token of a row
    of_microbatch: float  # and for a microbatch of any size
    size: int  # ranks of the group
    byte_s: float  # seconds for one of these bytes
    calls_s: float  # and for all calls

    @classmethod
    def of(cls, shape: ModelShape, layout: Layout, network: Network) -> "Exchange":
        return _for_heads(shape, layout, network) if layout.context > 1 else _in_layers(shape, layout, network)

    def sent_bytes(self, tokens_RM: FloatArray) -> FloatArray:
        """By one rank in microbatches of so many tokens; it keeps what is its own."""
        return self._bytes(tokens_RM) * (self.size - 1) / self.size

    def seconds(self, tokens_RM: FloatArray) -> FloatArray:
        """That one rank waits in them."""
        return self._bytes(tokens_RM) * self.byte_s + self.calls_s

    def _bytes(self, tokens_RM: FloatArray) -> FloatArray:
        return self.of_token * tokens_RM + self.of_microbatch


def _passes(shape: ModelShape, layout: Layout) -> tuple[float, float]:
    """Through one layer, in all layers: forward, backward and forward again; and forward through the model."""
    forward = 1 + layout.forwards
    return shape.layers * (forward + 1) + layout.recompute, forward


def _in_layers(shape: ModelShape, layout: Layout, network: Network) -> Exchange:
    """Of tensor-parallel ranks: tensors that they gather and reduce, in full."""
    of_layers, forward = _passes(shape, layout)
    rows = PER_LAYER * of_layers + FORWARD_ENDS * forward + BACKWARD_ENDS  # of hidden states, gathered or reduced
    normed = NORM_EXCHANGES / 2 * of_layers * shape.normed_width / layout.tensor  # of these, a rank has a share only
    calls = rows + NORM_EXCHANGES * of_layers * bool(shape.normed_width) + forward
    return Exchange(
        of_token=layout.compute_bytes * (rows * shape.width + normed),
        of_microbatch=layout.compute_bytes * forward * shape.vocabulary * shape.width,
        size=layout.tensor,
        byte_s=network.ring_s(1.0, layout.tensor, 0),
        calls_s=network.ring_s(0.0, layout.tensor, round(calls)),
    )


def _for_heads(shape: ModelShape, layout: Layout, network: Network) -> Exchange:
    """Of ranks that split rows: each has its share of a row's tokens."""
    of_layers, _ = _passes(shape, layout)
    byte_s, call_s = network.all_to_all_s(layout.context)
    return Exchange(
        of_token=of_layers * head_bytes(shape, layout) / layout.context,
        of_microbatch=0.0,
        size=layout.context,
        byte_s=byte_s,
        calls_s=HEAD_EXCHANGES * of_layers * call_s,
    )


def head_bytes(shape: ModelShape, layout: Layout) -> float:
    """Of one token in one layer, there and back: queries, keys and values, and what attention makes of them."""
    values = shape.key_width / max(1, shape.head_width) * shape.value_width
    there = shape.heads * shape.head_width + key_repeats(shape, layout.context) * (shape.key_width + values)
    return (there + shape.heads * shape.value_width) * layout.compute_bytes


def key_repeats(shape: ModelShape, size: int) -> int:
    """How often key heads are sent so that each of so many ranks gets those of its query heads."""
    key_heads = shape.key_width // shape.head_width if shape.heads else 0
    return size // math.gcd(size, key_heads)


def check_tensor(shape: ModelShape, size: int, network: Network, ranks: int) -> None:
    """Raise ConfigError if so many ranks of these cannot compute a layer together, in one machine."""
    heads = math.gcd(shape.heads, shape.key_width // max(1, shape.head_width))
    node = network.ranks_per_node
    fitting = [n for n in _divisors(heads) if n <= node and ranks % n == 0]
    if size not in fitting:
        raise ConfigError(
            f"layout.tensor_parallel: {size} does not fit {ranks} GPUs, {node} in a machine, and a model whose heads "
            f"and key heads have the common divisor {heads}: it must divide both and stay within a machine. What does: "
            f"{_listed(fitting)}."
        )


def check_context(shape: ModelShape, size: int, ranks: int) -> None:
    """Raise ConfigError if so many ranks of these cannot split a row."""
    what = f"layout.context_parallel: {size}"
    if ranks % size:
        raise ConfigError(f"{what} does not divide {ranks} GPUs. Change --gpus or layout.context_parallel.")
    if shape.row_parts % size:
        fitting = _listed(_divisors(shape.row_parts))
        raise ConfigError(
            f"{what} does not divide the heads of the model that ranks can divide, {shape.row_parts}. "
            f"What does: {fitting}."
        )


def contexts(shape: ModelShape, layout: Layout) -> list[int]:
    """Numbers of ranks that could split a row, beyond those that do."""
    if layout.rows not in ("shared", "packed") or layout.tensor > 1:
        return []
    sizes = (2**n for n in range(1, layout.ranks.bit_length()))
    return [n for n in sizes if n > layout.context and layout.ranks % n == 0 and shape.row_parts % n == 0]


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _listed(sizes: list[int]) -> str:
    return ", ".join(map(str, sizes))
