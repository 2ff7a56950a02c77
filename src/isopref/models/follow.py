"""Recurrent layers that follow the tree of a packed row, so a prompt is computed once for all its answers.

Two operations in these layers look beyond a single token: a short convolution and, in a Gated DeltaNet, the state. Both
are replaced by ops that start each branch where its own sequence left off (ops/convolution.py, ops/delta.py);
projections, gates and norms remain the layer's own modules. Each kind of layer needs a few lines that define its
inputs, so only the kinds in `KINDS` follow; others are unfolded (unfold.py). The new forward is set on the instance, as
torch's own `register_fsdp_forward_method` does: classes and weights are untouched, and anything that is not a packed
row (padded batches, generation) runs the class's own forward. The probe (probe.py) compares the result with the model
itself and unfolds a layer that fails.

If ranks split the row, they exchange tokens for heads or channels around these operations, which then see all tokens.
Passing states from rank to rank instead would make each rank wait for the one before it.

Dimensions: T tokens of the row (of this rank, if ranks split it), D hidden width, H heads, J taps of a convolution,
K and V widths of a head's keys and values.
"""

from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from transformers.activations import ACT2FN

from isopref.models.row import current_row
from isopref.ops import delta, exchange
from isopref.ops.convolution import Taps, tree_convolution
from isopref.types import ContextGroup

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]  # what is convolved to queries, keys, values; gate; beta; log decay


def can_follow(layer: nn.Module) -> bool:
    """Whether there is code for this kind of layer."""
    return type(layer).__name__ in KINDS


def can_split(layer: nn.Module) -> bool:
    """Whether that code exchanges tokens for heads, so that ranks can split rows."""
    return type(layer).__name__.endswith(("GatedDeltaNet", "ShortConv"))


def follow(layers: Iterable[nn.Module]) -> None:
    """Make these layers follow the tree of a packed row. Idempotent."""
    for layer in layers:
        layer.forward = MethodType(KINDS[type(layer).__name__], layer)


def unfollow(layers: Iterable[nn.Module]) -> None:
    """Restore the layers' own forward."""
    for layer in layers:
        del layer.forward


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _taps(count: int) -> Taps | None:
    """The tables of the row being computed; None for a padded batch."""
    row = current_row()
    return None if row is None else row.taps(count)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _context() -> ContextGroup | None:
    """The ranks that split the row being computed, if any."""
    row = current_row()
    return None if row is None else row.segments.context


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _rule(inputs: delta.Inputs) -> Tensor:
    row = current_row()
    assert row is not None
    return delta.tree_delta_rule(inputs, row.levels)


def _short_convolution(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """LFM2: a gated convolution and nothing else."""
    taps: Taps | None = _taps(self.conv_kernel_size)
    if taps is None:
        own: Tensor = type(self).forward(self, hidden_states, *args, **kwargs)
        return own
    before, after, x = self.in_proj(hidden_states[0]).chunk(3, dim=-1)
    mixed_TD, weight_DJ, bias_D = before * x, self.conv.weight[:, 0], self.conv.bias
    context: ContextGroup | None = _context()
    if context is None:
        mixed_TD = tree_convolution(mixed_TD, weight_DJ, bias_D, taps)
    else:
        (mixed_TD1,) = exchange.to_heads([mixed_TD[..., None]], context)
        own_bias = None if bias_D is None else exchange.own_heads(bias_D, context)
        mixed_TD = tree_convolution(mixed_TD1[..., 0], exchange.own_heads(weight_DJ, context), own_bias, taps)
        mixed_TD = exchange.from_heads(mixed_TD[..., None], context)[..., 0]
    out: Tensor = self.out_proj(after * mixed_TD)[None]
    return out


def _gated_delta_net(inputs: Callable[[Any, Tensor], Inputs], norm: str, out_proj: str) -> Callable[..., Tensor]:
    """The forward of a Gated DeltaNet, given how it computes its inputs and the names of its last two modules."""

    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        taps: Taps | None = _taps(self.conv_kernel_size)
        if taps is None:
            own: Tensor = type(self).forward(self, hidden_states, *args, **kwargs)
            return own
        mixed_TD, gate, beta_TH, log_decay_TH = inputs(self, hidden_states[0])
        sizes = [self.key_dim, self.key_dim, self.value_dim]
        given = _Given(mixed_TD, beta_TH, log_decay_TH, self.conv1d.weight[:, 0], self.conv1d.bias, sizes)
        context: ContextGroup | None = _context()
        if context is not None:
            given = _in_heads(self, given, context)
        mixed_TD = tree_convolution(given.mixed, given.weight, given.bias, taps)
        mixed_TD = ACT2FN[self.activation](mixed_TD)
        q, k, v = mixed_TD.split(given.sizes, dim=-1)
        q_THK, k_THK = (x.unflatten(-1, (-1, self.head_k_dim)) for x in (q, k))
        v_THV = v.unflatten(-1, (-1, self.head_v_dim))
        out: Tensor = _rule(delta.Inputs(q_THK, k_THK, v_THV, given.log_decay, given.beta))
        if context is not None:
            out = exchange.from_heads(out, context)
        out = getattr(self, norm)(out.flatten(0, 1), gate.reshape(-1, self.head_v_dim))
        out = getattr(self, out_proj)(out.view(hidden_states.shape[1], -1))
        return out[None]

    return forward


class _Given(NamedTuple):
    """What the convolution and the rule are given."""

    mixed: Tensor  # T, D
    beta: Tensor  # T, H
    log_decay: Tensor  # T, H
    weight: Tensor  # D, J: of the convolution
    bias: Tensor | None  # D
    sizes: list[int]  # of queries, keys and values in D


def _in_heads(layer: Any, given: _Given, context: ContextGroup) -> _Given:
    """The same for all tokens of the row, and this rank's heads.

    The ranks may be more than the heads of queries and keys, which then repeat, as in attention.
    """
    widths = layer.head_k_dim, layer.head_k_dim, layer.head_v_dim
    times = exchange.repeats(given.sizes[0] // layer.head_k_dim, context)

    def by_head(x: Tensor, dim: int) -> list[Tensor]:
        parts = x.split(given.sizes, dim=dim)
        q, k, v = (part.unflatten(dim, (-1, width)) for part, width in zip(parts, widths, strict=True))
        return [*(one.repeat_interleave(times, dim=dim) if times > 1 else one for one in (q, k)), v]

    def own(x: Tensor) -> Tensor:
        return torch.cat([exchange.own_heads(one, context).flatten(0, 1) for one in by_head(x, 0)])

    rates = given.beta[..., None], given.log_decay[..., None]
    *parts, beta, log_decay = exchange.to_heads([*by_head(given.mixed, 1), *rates], context)
    channels = [part.flatten(1) for part in parts]
    return _Given(
        torch.cat(channels, dim=1),
        beta[..., 0],
        log_decay[..., 0],
        own(given.weight),
        None if given.bias is None else own(given.bias),
        [part.shape[1] for part in channels],
    )


def _log_decay(layer: Any, step_TH: Tensor) -> Tensor:
    decay: Tensor = -layer.A_log.float().exp() * softplus(step_TH.float() + layer.dt_bias)
    return decay


def _qwen3_next(layer: Any, hidden_TD: Tensor) -> Inputs:
    mixed, ba = layer.in_proj_qkvz(hidden_TD)[None], layer.in_proj_ba(hidden_TD)[None]
    q, k, v, gate, b, a = (x[0] for x in layer.fix_query_key_value_ordering(mixed, ba))
    return torch.cat([x.flatten(1) for x in (q, k, v)], dim=-1), gate, b.sigmoid(), _log_decay(layer, a)


def _qwen3_5(layer: Any, hidden_TD: Tensor) -> Inputs:
    beta, log_decay = layer.in_proj_b(hidden_TD).sigmoid(), _log_decay(layer, layer.in_proj_a(hidden_TD))
    return layer.in_proj_qkv(hidden_TD), layer.in_proj_z(hidden_TD), beta, log_decay


def _olmo_hybrid(layer: Any, hidden_TD: Tensor) -> Inputs:
    mixed = torch.cat([project(hidden_TD) for project in (layer.q_proj, layer.k_proj, layer.v_proj)], dim=-1)
    beta = layer.b_proj(hidden_TD).sigmoid() * (2.0 if layer.allow_neg_eigval else 1.0)
    return mixed, layer.g_proj(hidden_TD), beta, _log_decay(layer, layer.a_proj(hidden_TD))


KINDS: dict[str, Callable[..., Tensor]] = {
    "Qwen3NextGatedDeltaNet": _gated_delta_net(_qwen3_next, "norm", "out_proj"),
    **dict.fromkeys(
        ("Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet", "Qwen4ExpTextGatedDeltaNet"),
        _gated_delta_net(_qwen3_5, "norm", "out_proj"),
    ),
    "OlmoHybridGatedDeltaNet": _gated_delta_net(_olmo_hybrid, "o_norm", "o_proj"),
    **dict.fromkeys(("Lfm2ShortConv", "Lfm2MoeShortConv"), _short_convolution),
}
