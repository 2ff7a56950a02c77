"""Peak bytes of a rank in a step, by part, counted from the model's shape.

A layer keeps the input and the output of every matrix product once for its backward pass. A matrix of D x F has an
inner side of F; the layer's two residual sums and their two norms are D wide each. So a token keeps 4 D numbers, plus
the layer's matrix entries divided by D. Attention adds one float32 per head, and the keys and values of prompts copied
for the second answer. Compiled layers keep only that; uncompiled ones also keep what their operations save. MLPs in
tiles keep their input, and intermediate activations for one tile. Weights that peft adds an adapter's update to, as
those of routers, are kept as that sum, independent of the tokens.

Tensor-parallel ranks divide the weights (norms count as divided, too), tokens outside attention and MLPs, and inner
sides in them. The inputs of both are gathered and kept for all tokens, and so are the head's.

Ranks that split rows divide the tokens. They keep what attention returns before and after they exchange it, and keys
and values as often as they send them.
"""

from dataclasses import dataclass, replace

from isopref.models.adapter import NF4_BLOCK
from isopref.models.shape import ModelShape
from isopref.ops.logprob import MAX_LOGITS_FUSED
from isopref.plan.layout import Layout, Loads
from isopref.plan.together import key_repeats

NF4_BYTES = 0.5 + 1 / NF4_BLOCK  # 4 bits per weight, and a scale of one byte per block


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank at its peak."""

    weights: float
    gathered: float  # weights that FSDP has gathered or cast to the compute dtype
    gradients: float
    optimizer: float
    activations: float  # of one microbatch
    logits: float  # and everything else in the head; or a layer's backward pass, if that needs more
    cache: float  # the reference's log-probabilities

    @property
    def total(self) -> float:
        return float(sum(vars(self).values()))

    @property
    def of_step(self) -> float:
        """What is allocated during a step: everything except weights, optimizer and cache."""
        return self.gathered + self.gradients + self.activations + self.logits


def peak_memory(
    shape: ModelShape, layout: Layout, load: Loads, *, answers: int, only_microbatch: bool = False
) -> Memory:
    """Memory of a rank whose largest microbatch is `load`, with stored reference values for `answers` answers.

    `load` counts complete rows, even if ranks split them. `only_microbatch`: of its step, so a layer's gradients take
    memory only once its activations are freed. (DDP and FSDP allocate gradients in other ways.)
    """
    load = load.split(layout.context)
    tokens, keys, predicted = (float(x[0, 0]) for x in (load.tokens, load.keys, load.predicted))
    of_token, of_copy = kept_bytes(shape, layout)
    inside = 0.0 if layout.tile is None else inside_bytes(shape, layout)
    tile = min(tokens, layout.tile or 0)
    summed = shape.summed_parameters / shape.layers * layout.compute_bytes
    kept = (of_token - inside) * tokens + of_copy * (keys - tokens) + summed
    plain = shape.layers - layout.recompute
    inputs = tokens * shape.width * layout.compute_bytes / layout.tensor
    # When the first offloaded input returns, while the one before it is being copied, all others have been freed.
    on_device = max(layout.recompute - layout.offloaded, min(2, layout.offloaded))
    activations = plain * kept + on_device * inputs + 2 * inputs  # and the embeddings, the last norm
    # Layers that do not recompute come last, and are free again before the first one recomputes.
    again = kept if layout.recompute and not plain else 0.0
    # The gradients of a layer's two residual sums are held for all tokens: just gathered, or about to be reduced.
    gradients = inputs * (shape.active_parameters / shape.width**2 + 2 * layout.tensor)
    if layout.tile is not None:
        inner = 3 * shape.inner_width * layout.compute_bytes
        gradients += inside * tile - inner * (tokens - tile) + _tile_sums(shape)
    backward = again + gradients + unpacked_bytes(shape, layout) + summed
    of_weights = _gradients(shape, layout)
    if only_microbatch and layout.parallel == "single":
        # The peak is where the backward pass begins, with the head's gradients, or where it ends: with all gradients
        # and what the first layer has recomputed, but without the activations.
        of_head = 0 if shape.flops.frozen_per_logits else shape.vocabulary * shape.width * layout.weight_bytes
        recomputed = kept if layout.recompute and plain else 0.0
        of_weights = max(of_head, of_weights + recomputed - activations)
    return Memory(
        weights=_weights(shape, layout) + layout.references * shape.parameters * layout.weight_bytes / layout.parts,
        gathered=_gathered(shape, layout),
        gradients=of_weights,
        optimizer=0.0 if layout.offload else shape.trained_parameters * layout.state_bytes / layout.parts,
        activations=activations,
        logits=max(_head(shape, layout, predicted) + _gathered_hidden(shape, layout, tokens), backward),
        cache=4.0 * answers,
    )


def loading_memory(shape: ModelShape, layout: Layout) -> float:
    """Memory of a rank before the first step: the full model, or its shards and one unit that is about to be sharded.

    A moving reference is loaded next to the policy, which is sharded by then. The probe is not compiled.
    """
    whole, shards = whole_bytes(shape, layout), _weights(shape, layout)
    unit = max(shape.root_parameters, shape.layer_parameters, shape.unused_parameters) / shape.parameters * whole
    unpacking = unpacked_bytes(shape, replace(layout, compiled=False))
    return (shards + unit if layout.from_host else whole) + layout.references * shards + unpacking


def whole_bytes(shape: ModelShape, layout: Layout) -> float:
    """Bytes of all weights."""
    return shape.trained_parameters * layout.weight_bytes + shape.frozen_parameters * layout.frozen_bytes


def kept_bytes(shape: ModelShape, layout: Layout) -> tuple[float, float]:
    """What one layer keeps for its backward pass, per token and per key copied for a second answer."""
    divided = shape.active_parameters / shape.width + 2 * shape.width
    if not layout.compiled:
        # Two norms keep their input in float32 and the result before its scale; a gate keeps its activation.
        divided += 6 * shape.width + shape.inner_width
    # A token is copied for each of its experts, and their outputs are kept until they are weighted.
    divided += 2 * shape.flops.experts_per_token * shape.width
    times = key_repeats(shape, layout.context)
    if layout.context > 1:
        divided += shape.heads * shape.value_width + (times - 1) * 2 * shape.key_width
    numbers = divided / layout.tensor + 2 * shape.width
    of_copy = times * 2 * shape.key_width * layout.compute_bytes
    return numbers * layout.compute_bytes + 4 * shape.heads / layout.tensor, of_copy / layout.tensor


def inside_bytes(shape: ModelShape, layout: Layout) -> float:
    """The part of `kept_bytes` inside the layer's MLP, per token: the inner sides of its three matrices."""
    return (3 + (not layout.compiled)) * shape.inner_width * layout.compute_bytes


def _tile_sums(shape: ModelShape) -> float:
    """Gradients of one MLP's weights, accumulated in float32 over its tiles."""
    trained = shape.trained_parameters / shape.text_parameters
    return 4 * trained * 3 * shape.inner_width * shape.width


def unpacked_bytes(shape: ModelShape, layout: Layout) -> float:
    """Peak memory of a 4-bit layer while it dequantises, one matrix at a time, in every pass.

    Compiled, that is the largest matrix. Uncompiled, torchao holds each number as an int64 index, as the value found,
    as the scaled value and in the result, besides the blocks' scales.
    """
    if not layout.quantised:
        return 0.0
    number = layout.compute_bytes
    return shape.largest_matrix * (number if layout.compiled else 8 + 3 * number + number / NF4_BLOCK)


def kept_predictions(shape: ModelShape) -> float:
    """Tokens whose logits are kept for the backward pass; beyond that, logits are recomputed in chunks."""
    return MAX_LOGITS_FUSED / max(1, shape.vocabulary)


def _head(shape: ModelShape, layout: Layout, predicted: float) -> float:
    """Logits, hidden states and their gradient, and the gradient of the head's weights if they are trained."""
    trained = not shape.flops.frozen_per_logits
    weight = shape.vocabulary * shape.width * layout.compute_bytes * trained
    if trained and predicted > kept_predictions(shape):
        weight += shape.vocabulary * shape.width * 4  # chunks add up in float32
    logits = min(predicted * shape.vocabulary, MAX_LOGITS_FUSED) * layout.compute_bytes
    return logits + 2 * predicted * shape.width * layout.compute_bytes + weight


def _gathered_hidden(shape: ModelShape, layout: Layout, tokens: float) -> float:
    """The last hidden states of all tokens, which tensor-parallel ranks gather for the head."""
    return tokens * shape.width * layout.compute_bytes * (layout.tensor > 1)


def _weights(shape: ModelShape, layout: Layout) -> float:
    spread = layout.spread(shape)
    whole = (shape.parameters - spread) * layout.frozen_bytes
    frozen = (spread - shape.trained_parameters) * layout.frozen_bytes
    own = (shape.trained_parameters * layout.weight_bytes + frozen) / layout.parts
    return whole + (0.0 if layout.offload else own)


def _gathered(shape: ModelShape, layout: Layout) -> float:
    alone = layout.shard == 1 and not layout.offload
    head = shape.vocabulary * shape.width * layout.compute_bytes * (layout.tensor > 1)  # in full, next to its shards
    if not layout.sharded or (alone and layout.weight_bytes == layout.compute_bytes):
        return head
    spread = layout.spread(shape)
    every = layout.grad_sync == "every"
    at_once = shape.root_parameters + 2 * shape.layer_parameters if every else shape.text_parameters
    return min(at_once, spread) * layout.compute_bytes / layout.tensor + head


def _gradients(shape: ModelShape, layout: Layout) -> float:
    """All gradients on every rank; if FSDP reduces after every microbatch, only the rank's shard and one unit."""
    trained = shape.trained_parameters
    if not layout.sharded or layout.grad_sync == "last":
        return trained * layout.weight_bytes / layout.tensor
    unit = min(trained, max(shape.root_parameters, shape.layer_parameters))
    own = 0.0 if layout.offload else trained * layout.weight_bytes / layout.parts
    return own + unit / layout.tensor * (layout.weight_bytes + layout.compute_bytes)
