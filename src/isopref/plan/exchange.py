"""What ranks that split rows send each other: tokens for heads before every attention, and back after it.

A model on paper, like network.py. A layer needs what it is sent at once, so nothing hides this time. Layers with a
state are counted as if they attended.
"""

import math
from dataclasses import dataclass

from isopref.models.shape import ModelShape
from isopref.plan.layout import Layout, Loads
from isopref.plan.network import Network
from isopref.types import FloatArray


@dataclass(frozen=True)
class Exchange:
    """The exchanges of a microbatch's passes, forward, backward and recomputing."""

    of_token: float  # bytes of one token in all exchanges; a rank sends them for its share of a row's tokens
    calls: float
    size: int  # ranks that split a row

    @classmethod
    def of(cls, shape: ModelShape, layout: Layout) -> "Exchange":
        # Every exchange has one in the backward pass, and one more where a layer recomputes.
        passes = 2 + layout.forwards + layout.recompute / shape.layers
        return cls(passes * shape.layers * layer_bytes(shape, layout), passes * shape.layers * 2, layout.context)

    def sent_bytes(self, loads: Loads) -> FloatArray:
        """By one rank in each microbatch, R groups by M microbatches; a rank keeps what is its own."""
        return self.of_token * loads.tokens / self.size * (self.size - 1) / self.size

    def seconds(self, loads: Loads, network: Network) -> FloatArray:
        """Of each microbatch, R groups by M microbatches."""
        if self.size == 1:
            return 0.0 * loads.tokens
        byte_s, hop_s = network.all_to_all_s(self.size)
        return self.of_token * loads.tokens / self.size * byte_s + self.calls * hop_s


def layer_bytes(shape: ModelShape, layout: Layout) -> float:
    """Of one token in one layer, there and back: queries, keys and values, and what attention makes of them."""
    times = key_repeats(shape, layout.context)
    values = shape.key_width / shape.head_width * shape.value_width if shape.heads else 0.0
    there = shape.heads * shape.head_width + times * (shape.key_width + values)
    return (there + shape.heads * shape.value_width) * layout.compute_bytes


def key_repeats(shape: ModelShape, size: int) -> int:
    """How often key heads are sent so that every rank gets those of its query heads."""
    key_heads = shape.key_width // shape.head_width if shape.heads else 0
    return size // math.gcd(size, key_heads)
