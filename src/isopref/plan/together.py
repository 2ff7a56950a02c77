"""Communication inside layers between ranks that work on the same pairs, and which group sizes are possible.

None of this communication is hidden by compute.

Tensor-parallel ranks compute each layer together. Outside attention and the MLP, each rank has its share of a row's
tokens; inside, it has all tokens, but only its share of the heads and of the MLP's inner side. So a forward pass
gathers tokens before attention and before the MLP, and reduces sums after each; a backward pass does the reverse. Every
rank computes the output head in full, for which it gathers the last hidden states and the head's weight. The norms of
queries and keys are computed by tokens again, with exchanges before and after them.

Ranks that split rows exchange tokens for heads before every attention, and back after it. In layers with a state, they
do so before the convolution and after the recurrence.

A recomputing layer counts as another full forward pass, although torch may stop before its last exchange; the sums of
the norms' gradients are too small to count. This is a model on paper, with the same links as network.py: no run has
timed it.
"""

import math
from dataclasses import dataclass

from isopref.errors import ConfigError
from isopref.models.follow import Exchanged
from isopref.models.shape import ModelShape
from isopref.plan.layout import Layout
from isopref.plan.network import Network
from isopref.types import FloatArray

PER_LAYER = 4  # gathers and reductions of a row in a forward pass, and as many in a backward pass
FORWARD_ENDS, BACKWARD_ENDS = 2, 1  # the sums of embeddings and the gather for the head; the gradient of embeddings
NORM_EXCHANGES = 4  # per pass: queries and keys, before and after their norms
HEAD_EXCHANGES = 2  # per pass: tokens for heads, and back


@dataclass(frozen=True)
class Exchange:
    """What a group of ranks exchanges during one microbatch: in its forward, backward and recomputing passes."""

    of_token: float  # bytes that a rank holds or receives for each token of a row
    of_microbatch: float  # further bytes for each microbatch, whatever its size
    size: int  # ranks of the group
    byte_s: float  # seconds per byte
    calls_s: float  # seconds for the latency of all calls

    @classmethod
    def of(cls, shape: ModelShape, layout: Layout, network: Network) -> "Exchange":
        return _for_heads(shape, layout, network) if layout.context > 1 else _in_layers(shape, layout, network)

    def sent_bytes(self, tokens_RM: FloatArray) -> FloatArray:
        """Bytes that one rank sends in microbatches of these sizes; a rank does not send its own part to itself."""
        return self._bytes(tokens_RM) * (self.size - 1) / self.size

    def seconds(self, tokens_RM: FloatArray) -> FloatArray:
        """Seconds that one rank waits for exchanges in microbatches of these sizes."""
        return self._bytes(tokens_RM) * self.byte_s + self.calls_s

    def _bytes(self, tokens_RM: FloatArray) -> FloatArray:
        return self.of_token * tokens_RM + self.of_microbatch


def _passes(shape: ModelShape, layout: Layout) -> tuple[float, float]:
    """The number of passes through single layers (forward, backward, recomputing), and of forward passes in all."""
    forward = 1 + layout.forwards
    return shape.layers * (forward + 1) + layout.recompute, forward


def _in_layers(shape: ModelShape, layout: Layout, network: Network) -> Exchange:
    """The exchange between tensor-parallel ranks. Sizes are those of the full tensors that they gather and reduce."""
    of_layers, forward = _passes(shape, layout)
    rows = PER_LAYER * of_layers + FORWARD_ENDS * forward + BACKWARD_ENDS  # of hidden states, gathered or reduced
    normed = NORM_EXCHANGES / 2 * of_layers * shape.normed_width / layout.tensor  # a rank has only its share of these
    calls = rows + NORM_EXCHANGES * of_layers * bool(shape.normed_width) + forward
    return Exchange(
        of_token=layout.compute_bytes * (rows * shape.width + normed),
        of_microbatch=layout.compute_bytes * forward * shape.vocabulary * shape.width,
        size=layout.tensor,
        byte_s=network.ring_s(1.0, layout.tensor, 0),
        calls_s=network.ring_s(0.0, layout.tensor, round(calls)),
    )


def _for_heads(shape: ModelShape, layout: Layout, network: Network) -> Exchange:
    """The exchange between ranks that split rows. Each has its share of a row's tokens."""
    of_layers, _ = _passes(shape, layout)
    passes, attending = of_layers / shape.layers, shape.flops.attending
    with_state = sum(state_bytes(one, layout) for one in shape.exchanged)
    apart = sum(bool(one.floats) for one in shape.exchanged) * (layout.compute_bytes < 4)  # a call for each dtype
    byte_s, call_s = network.all_to_all_s(layout.context)
    return Exchange(
        of_token=passes * (attending * head_bytes(shape, layout) + with_state) / layout.context,
        of_microbatch=0.0,
        size=layout.context,
        byte_s=byte_s,
        calls_s=passes * (HEAD_EXCHANGES * (attending + len(shape.exchanged)) + apart) * call_s,
    )


def head_bytes(shape: ModelShape, layout: Layout) -> float:
    """Bytes exchanged for one token in one layer: queries, keys and values, then the result of attention."""
    values = shape.key_width / max(1, shape.head_width) * shape.value_width
    there = shape.heads * shape.head_width + key_repeats(shape, layout.context) * (shape.key_width + values)
    return (there + shape.heads * shape.value_width) * layout.compute_bytes


def state_bytes(layer: Exchanged, layout: Layout) -> float:
    """Bytes exchanged for one token in one layer with a state: its inputs, then its result."""
    shared = _repeats(layer.shared_heads, layout.context) * layer.shared
    return (layer.numbers + shared) * layout.compute_bytes + 4 * layer.floats


def key_repeats(shape: ModelShape, size: int) -> int:
    """How often key heads are sent so that each of `size` ranks gets those that its query heads attend to."""
    key_heads = shape.key_width // shape.head_width if shape.heads else 0
    return _repeats(key_heads, size)


def _repeats(heads: int, size: int) -> int:
    return size // math.gcd(size, heads)


def tensor_sizes(shape: ModelShape, network: Network, ranks: int) -> list[int]:
    """How many of `ranks` ranks can compute a layer together, within one machine."""
    return [n for n in _divisors(_tensor_heads(shape)) if n <= network.ranks_per_node and ranks % n == 0]


def _tensor_heads(shape: ModelShape) -> int:
    return math.gcd(shape.heads, shape.key_width // max(1, shape.head_width))


def check_tensor(shape: ModelShape, size: int, network: Network, ranks: int) -> None:
    """Raise ConfigError if `size` of the `ranks` ranks cannot compute a layer together, within one machine."""
    heads, node = _tensor_heads(shape), network.ranks_per_node
    fitting = tensor_sizes(shape, network, ranks)
    if size not in fitting:
        raise ConfigError(
            f"layout.tensor_parallel: {size} does not fit {ranks} GPUs and this model. It must divide the number of "
            f"GPUs, divide the model's heads and key heads (their greatest common divisor is {heads}), and stay within "
            f"one machine ({node} GPUs). Use one of {_listed(fitting)}."
        )


def check_context(shape: ModelShape, size: int, ranks: int) -> None:
    """Raise ConfigError if `size` of the `ranks` ranks cannot split a row."""
    what = f"layout.context_parallel: {size}"
    if ranks % size:
        raise ConfigError(f"{what} does not divide {ranks} GPUs. Change --gpus or layout.context_parallel.")
    if size > 1 and shape.why_not_split is not None:
        raise ConfigError(f"{what}, but {shape.why_not_split}. Set layout.context_parallel: 1.")
    if shape.row_parts % size:
        fitting = _listed(_divisors(shape.row_parts))
        raise ConfigError(
            f"{what} does not divide {shape.row_parts}, the number of parts into which ranks can divide the model's "
            f"heads. Use one of {fitting}."
        )


def contexts(shape: ModelShape, layout: Layout) -> list[int]:
    """Larger numbers of ranks that could split a row."""
    if layout.rows not in ("shared", "packed") or layout.tensor > 1:
        return []
    sizes = (2**n for n in range(1, layout.ranks.bit_length()))
    return [n for n in sizes if n > layout.context and layout.ranks % n == 0 and shape.row_parts % n == 0]


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _listed(sizes: list[int]) -> str:
    return ", ".join(map(str, sizes))
