"""Seconds per step, by part: counted work divided by a card's rates.

The achieved shares of the data sheet were measured on one H200 (benchmarks/NOTES.md); other cards are assumed to
achieve the same. They hold for bfloat16 and compiled layers.
"""

from dataclasses import dataclass

import numpy as np

from isopref.cards import Card
from isopref.models.shape import ModelShape
from isopref.plan.attention import attention_rate
from isopref.plan.layout import TILE, Layout, Loads
from isopref.plan.memory import kept_bytes, kept_predictions
from isopref.plan.network import Network, Traffic
from isopref.plan.together import Exchange
from isopref.types import FloatArray

PRODUCTS = 0.72  # of the card's flops, in matrix products
GROUPED = 0.48  # of the card's flops, in grouped products of experts; fitted to a single run, olmoe-chat
# These two are fitted to a single run, 8B chat in benchmarks/measured_float8.json.
FLOAT8 = 0.69  # of the card's float8 flops, in float8 products
FLOAT8_CAST = 7.5  # bytes moved to cast one number to float8: read for the scale, read again, written, transposed
HOST_BANDWIDTH = 0.8  # of the card's link to host memory, in copies from page-locked memory: assumed, not measured
BANDWIDTH = 0.85  # of the card's memory bandwidth, in element-wise kernels
# Passes over what a layer keeps: forward writes it, backward reads it and writes as many gradients; sums add another.
ELEMENTWISE_PASSES = 3.5
HEAD_PASSES = 3  # over the logits: forward reads, backward reads and writes
# Over inputs and outputs of linear layers with an adapter. Forward: its two thin products read the input, and read and
# write the output. Backward: they read both for the adapter's gradient, and one more for the input's.
ADAPTER_PASSES = 4
READ_PASSES = 2  # over the weights, per microbatch: products read them, forward and backward
ACCUMULATE_PASSES = 4  # over the trained weights, per microbatch: gradients are written and accumulated
OPTIMIZER_PASSES = 6  # over a rank's trained weights, per step: norm, clip, update; plus two over the optimizer's state
ATTENTION_BACKWARD = 2.5  # FlashAttention's backward pass computes five products for two forward
OVERHEAD = 0.02  # of a step: the trainer, and kernels too small to count


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step. Parts are means over ranks; `imbalance` is the wait for the slowest one."""

    products: float
    attention: float
    elementwise: float
    copies: float  # to host memory and back, where not hidden by compute
    optimizer: float
    exchange: float  # between ranks that work on the same pairs; not overlapped with compute
    overhead: float
    imbalance: float
    network: float  # gathers and reductions of weights and gradients that compute does not hide

    @property
    def forward(self) -> float:
        """The forward pass alone, approximately: the backward pass takes twice as long."""
        return (self.products + self.attention + self.elementwise + self.exchange + self.imbalance) / 3

    @property
    def total(self) -> float:
        return float(sum(vars(self).values()))


def step_time(shape: ModelShape, layout: Layout, card: Card, loads: Loads, network: Network) -> StepTime:
    """Time of a step whose microbatches are `loads`."""
    parts = _microbatch_parts(shape, layout, card, loads.split(layout.context))
    computing = sum(parts.values())
    assert isinstance(computing, np.ndarray)
    exchanging = Exchange.of(shape, layout, network).seconds(loads.tokens)
    each = computing + exchanging
    traffic = Traffic.of(shape, layout, network)
    # Sharded ranks synchronise in every microbatch if each is reduced, otherwise only at the end of the step.
    lockstep = layout.sharded and layout.grad_sync == "every"
    slowest = float(each.max(axis=0).sum() if lockstep else each.sum(axis=1).max())
    busy = float(each.sum(axis=1).mean())
    local = shape.trained_parameters / layout.parts
    moved = local * (OPTIMIZER_PASSES * layout.weight_bytes + 2 * layout.state_bytes)
    optimizer = moved / (BANDWIDTH * card.bandwidth)
    return StepTime(
        **{name: float(seconds.sum(axis=1).mean()) for name, seconds in parts.items()},
        optimizer=optimizer,
        exchange=float(exchanging.sum(axis=1).mean()),
        overhead=OVERHEAD * (slowest + optimizer),
        imbalance=slowest - busy,
        network=traffic.exposed_s(computing.mean(axis=0)),
    )


def _microbatch_parts(shape: ModelShape, layout: Layout, card: Card, loads: Loads) -> dict[str, FloatArray]:
    """Seconds of each microbatch, by part: R, M each. `loads`: what one rank computes."""
    rate = card.rate(layout.compute_bytes)
    again = layout.recompute / shape.layers
    forward = layout.forwards + again
    flops = shape.flops  # frozen weights get no gradient
    grouped = (3 + forward) * flops.per_token_in_experts - flops.frozen_in_experts
    others = (3 + forward) * flops.per_token - flops.frozen_per_token - grouped
    products = others * loads.tokens / layout.tensor
    products += ((3 + layout.forwards) * flops.per_logits - flops.frozen_per_logits) * loads.predicted
    products += flops.per_logits * np.maximum(0.0, loads.predicted - kept_predictions(shape))
    seconds = products / (PRODUCTS * rate) + grouped * loads.tokens / layout.tensor / (GROUPED * rate)
    casts = np.zeros_like(loads.tokens)
    if layout.float8 and card.flops_float8 is not None:
        passes = 2 + forward  # all but the gradient of weights
        narrow = passes * 2.0 * shape.float8.parameters * loads.tokens
        seconds = seconds + narrow / (FLOAT8 * card.flops_float8) - narrow / (PRODUCTS * rate)
        casts = FLOAT8_CAST * (passes / 2 * shape.float8.sides * loads.tokens + passes * shape.float8.parameters)
    kernel = attention_rate(layout.kernel, shape.head_width)
    scores = loads.scores + kernel.row_tiles * TILE**2 * loads.tile_rows
    attention = (1 + forward + ATTENTION_BACKWARD) * flops.per_query_key * scores / layout.tensor
    of_token, of_copy = kept_bytes(shape, layout)
    kept = shape.layers * (of_token * loads.tokens + of_copy * (loads.keys - loads.tokens))
    logits = HEAD_PASSES * shape.vocabulary * layout.compute_bytes * loads.predicted
    # Tensor-parallel ranks divide the weights, but each computes the head in full.
    repeated = shape.vocabulary * shape.width / shape.text_parameters * (1 - 1 / layout.tensor)
    read = READ_PASSES * (
        shape.trained_parameters * layout.weight_bytes
        + (shape.text_parameters - shape.trained_parameters) * layout.frozen_bytes
    )
    weights = read + ACCUMULATE_PASSES * shape.trained_parameters * layout.weight_bytes
    weights = weights * (1 / layout.tensor + repeated)
    adapter = ADAPTER_PASSES * shape.adapter_sides * layout.compute_bytes * loads.tokens
    moved = (ELEMENTWISE_PASSES + forward) * kept + logits + weights + casts + adapter
    parts = {
        "products": seconds,
        "attention": attention / (kernel.peak_share * rate),
        "elementwise": moved / (BANDWIDTH * card.bandwidth),
    }
    return {**parts, "copies": _exposed_copies(shape, layout, card, loads.tokens, sum(parts.values()))}


def _exposed_copies(
    shape: ModelShape, layout: Layout, card: Card, tokens: FloatArray, computing: FloatArray | float
) -> FloatArray:
    """Seconds of copies that compute does not hide.

    Layer inputs are copied out during the forward pass, about a quarter of the compute, and back during the rest.
    """
    sent = layout.offloaded * tokens * shape.width * layout.compute_bytes / layout.tensor
    each_way = sent / (HOST_BANDWIDTH * card.host_link)
    exposed: FloatArray = np.maximum(0.0, each_way - computing / 4) + np.maximum(0.0, each_way - 3 * computing / 4)
    return exposed
