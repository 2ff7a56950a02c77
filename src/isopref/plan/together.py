"""What tensor-parallel ranks, which compute each layer together, send each other. Computing hides none of it.

Outside attention and the MLP, each rank has its share of a row's tokens; inside, all tokens and its share of the heads
and of the MLP's inner side. So a forward pass gathers tokens before each of the two and reduces sums after it, and a
backward pass does the reverse. Every rank computes the output head in full, for which it gathers the last hidden states
and the head's weight. Norms of queries and keys go by tokens again: exchanges before and after them.
A layer that recomputes counts as a full pass forward, though torch may stop before its last reduction; the sums of
norms' gradients are too small to count. A model on paper, by the same links as network.py: no run has timed it.
"""

import math

from isopref.errors import ConfigError
from isopref.models.shape import ModelShape
from isopref.plan.layout import Layout
from isopref.plan.network import Network
from isopref.types import FloatArray

PER_LAYER = 4  # gathers and reductions of a row, in a pass forward and as many in one backward
FORWARD_ENDS, BACKWARD_ENDS = 2, 1  # the sums of embeddings and the gather for the head; the gradient of embeddings
NORM_EXCHANGES = 4  # in a pass: queries and keys, before and after their norms


def check_degree(degree: int, shape: ModelShape, network: Network, ranks: int) -> None:
    """Raise ConfigError if so many ranks of these cannot compute a layer together, in one machine."""
    heads = math.gcd(shape.heads, shape.key_width // max(1, shape.head_width))
    node = network.ranks_per_node
    fitting = [str(n) for n in range(1, min(node, heads) + 1) if heads % n == 0 and ranks % n == 0]
    if str(degree) not in fitting:
        raise ConfigError(
            f"layout.tensor_parallel: {degree} does not fit {ranks} GPUs, {node} in a machine, and a model whose heads "
            f"and key heads have the common divisor {heads}: it must divide both and stay within a machine. What does: "
            f"{', '.join(fitting)}."
        )


def sent_bytes(shape: ModelShape, layout: Layout, tokens_RM: FloatArray) -> FloatArray:
    """Bytes that one rank sends in microbatches of so many tokens."""
    return _gathered_bytes(shape, layout, tokens_RM) * (layout.tensor - 1) / layout.tensor


def exchange_s(shape: ModelShape, layout: Layout, network: Network, tokens_RM: FloatArray) -> FloatArray:
    """Seconds that one rank waits in them."""
    per_byte, calls_s = network.ring_s(1.0, layout.tensor, 0), network.ring_s(0.0, layout.tensor, _calls(shape, layout))
    return _gathered_bytes(shape, layout, tokens_RM) * per_byte + calls_s


def _passes(shape: ModelShape, layout: Layout) -> tuple[float, float]:
    """Through one layer, in all layers: forward, backward and forward again; and forward through the model."""
    forward = 1 + layout.forwards
    return shape.layers * (forward + 1) + layout.recompute, forward


def _rows(shape: ModelShape, layout: Layout) -> float:
    """How often the hidden states of a row are gathered or reduced."""
    of_layers, forward = _passes(shape, layout)
    return PER_LAYER * of_layers + FORWARD_ENDS * forward + BACKWARD_ENDS


def _gathered_bytes(shape: ModelShape, layout: Layout, tokens_RM: FloatArray) -> FloatArray:
    """Of the tensors that the group gathers and reduces, in full."""
    of_layers, forward = _passes(shape, layout)
    normed = NORM_EXCHANGES / 2 * of_layers * shape.normed_width / layout.tensor  # of these, a rank has a share only
    of_token = _rows(shape, layout) * shape.width + normed
    return layout.compute_bytes * (of_token * tokens_RM + forward * shape.vocabulary * shape.width)


def _calls(shape: ModelShape, layout: Layout) -> int:
    of_layers, forward = _passes(shape, layout)
    return round(_rows(shape, layout) + NORM_EXCHANGES * of_layers * bool(shape.normed_width) + forward)
