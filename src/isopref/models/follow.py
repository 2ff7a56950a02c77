"""Recurrent layers that follow the tree of a packed row, so a prompt is computed once for all its answers.

Two operations in these layers look beyond a single token: a short convolution and, in Gated DeltaNet and Mamba2, the
state. Both are replaced by ops that start each branch where its own sequence left off (ops/convolution.py,
ops/delta.py, ops/state_space.py); projections, gates and norms remain the layer's own modules. Each kind of layer needs
a few lines that define its inputs, so only the kinds in `KINDS` follow; others are unfolded (unfold.py). The new
forward is set on the instance, as torch's own `register_fsdp_forward_method` does: classes and weights are untouched,
and anything that is not a packed row (padded batches, generation) runs the class's own forward. The probe (probe.py)
compares the result with the model itself and unfolds a layer that fails.

If ranks split the row, they exchange tokens for heads or channels around these operations, which then see all tokens.
Passing states from rank to rank instead would make each rank wait for the one before it.

Dimensions: T tokens of the row (of this rank, if ranks split it), D hidden width, H heads, G groups of them, J taps of
a convolution, K and V widths of a head's keys and values.
"""

from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import silu, softplus
from transformers.activations import ACT2FN

from isopref.models.row import current_row
from isopref.ops import delta, exchange, state_space
from isopref.ops.convolution import Taps, tree_convolution
from isopref.ops.fla import Kernel
from isopref.types import ContextGroup

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]  # queries, keys and values before convolution; gate; beta; log decay


def can_follow(layer: nn.Module) -> bool:
    """Whether there is code for this kind of layer."""
    return type(layer).__name__ in KINDS


def follow(layers: Iterable[nn.Module]) -> None:
    """Make these layers follow the tree of a packed row. Idempotent."""
    for layer in layers:
        layer.forward = MethodType(KINDS[type(layer).__name__].forward, layer)


def kernel_of(layer: nn.Module) -> Kernel | None:
    """The kernel for the recurrence of a following layer; None if it has only a convolution."""
    kind = KINDS[type(layer).__name__]
    return None if kind.kernel is None else kind.kernel()


def heads_of(layer: nn.Module) -> int:
    """How many heads, or channels, a following layer has that ranks can divide among them."""
    kept: Any = layer
    return len(kept.conv.weight if KINDS[type(layer).__name__].kernel is None else kept.A_log)


class Exchanged(NamedTuple):
    """Numbers for one token that ranks exchange around a layer's operations, there and back, if they split the row."""

    numbers: int
    floats: int  # in float32
    shared: int  # of heads that serve several others, so they are repeated if there are more ranks
    shared_heads: int


def exchanged(layer: nn.Module) -> Exchanged:
    """What ranks that split a row exchange for a following layer."""
    return KINDS[type(layer).__name__].exchanged(layer)


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


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _scan(inputs: state_space.Inputs) -> Tensor:
    row = current_row()
    assert row is not None
    return state_space.tree_state_space(inputs, row.levels)


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


def _of_convolution(layer: Any) -> Exchanged:
    return Exchanged(2 * len(layer.conv.weight), 0, 0, 1)


def _gated_delta_net(inputs: Callable[[Any, Tensor], Inputs], norm: str, out_proj: str) -> Callable[..., Tensor]:
    """The forward of a Gated DeltaNet, given how it computes its inputs and the names of its last two modules."""

    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        taps: Taps | None = _taps(self.conv_kernel_size)
        if taps is None:
            own: Tensor = type(self).forward(self, hidden_states, *args, **kwargs)
            return own
        mixed_TD, gate, beta_TH, log_decay_TH = inputs(self, hidden_states[0])
        sizes = [self.key_dim, self.key_dim, self.value_dim]
        widths = [self.head_k_dim, self.head_k_dim, self.head_v_dim]
        context: ContextGroup | None = _context()
        given = _given(self.conv1d, mixed_TD, sizes, widths, [beta_TH, log_decay_TH], context)
        (q_THK, k_THK, v_THV), (beta_TH, log_decay_TH) = _convolved(self, given, widths, taps), given.rates
        out: Tensor = _rule(delta.Inputs(delta.unit(q_THK), delta.unit(k_THK), v_THV, log_decay_TH, beta_TH))
        if context is not None:
            out = exchange.from_heads(out, context)
        out = getattr(self, norm)(out.flatten(0, 1), gate.reshape(-1, self.head_v_dim))
        out = getattr(self, out_proj)(out.view(hidden_states.shape[1], -1))
        return out[None]

    return forward


def _of_delta(layer: Any) -> Exchanged:
    heads = len(layer.A_log)
    return Exchanged(2 * layer.value_dim + heads, heads, 2 * layer.key_dim, layer.key_dim // layer.head_k_dim)


class _Given(NamedTuple):
    """The inputs of the convolution and the recurrence."""

    mixed: Tensor  # T, D: to be convolved
    sizes: list[int]  # of the parts of D: queries, keys and values, or Mamba2's x, B and C
    rates: list[Tensor]  # T, H each: the recurrence's scalars for each token and head
    weight: Tensor  # D, J: of the convolution
    bias: Tensor | None  # D


def _given(
    conv1d: nn.Conv1d,
    mixed_TD: Tensor,
    sizes: list[int],
    widths: list[int],
    rates: list[Tensor],
    context: ContextGroup | None,
) -> _Given:
    """If ranks split the row: the inputs for all its tokens, of this rank's heads. `widths`: of a head of each part.

    There may be more ranks than heads of a part (queries and keys, or Mamba2's B and C), which are then repeated, as in
    attention. The number of ranks must divide the heads of `rates`.
    """
    weight_DJ, bias_D = conv1d.weight[:, 0], conv1d.bias
    if context is None:
        return _Given(mixed_TD, sizes, rates, weight_DJ, bias_D)

    def by_head(x: Tensor, dim: int) -> list[Tensor]:
        parts = zip(x.split(sizes, dim=dim), widths, strict=True)
        return [exchange.repeated(part.unflatten(dim, (-1, width)), dim, context) for part, width in parts]

    def own(x: Tensor) -> Tensor:
        return torch.cat([exchange.own_heads(one, context).flatten(0, 1) for one in by_head(x, 0)])

    received = exchange.to_heads([*by_head(mixed_TD, 1), *(rate[..., None] for rate in rates)], context)
    channels = [part.flatten(1) for part in received[: len(sizes)]]
    return _Given(
        torch.cat(channels, dim=1),
        [part.shape[1] for part in channels],
        [rate[..., 0] for rate in received[len(sizes) :]],
        own(weight_DJ),
        None if bias_D is None else own(bias_D),
    )


def _convolved(layer: Any, given: _Given, widths: list[int], taps: Taps) -> list[Tensor]:
    """The parts after the convolution and its activation, head by head."""
    mixed_TD = ACT2FN[layer.activation](tree_convolution(given.mixed, given.weight, given.bias, taps))
    parts = mixed_TD.split(given.sizes, dim=-1)
    return [part.unflatten(-1, (-1, width)) for part, width in zip(parts, widths, strict=True)]


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


def _mamba2(
    project: Callable[[Any, Tensor], Tensor], norm: Callable[[Any, Tensor, Tensor], Tensor]
) -> Callable[..., Tensor]:
    """The forward of a Mamba2 layer, given its projection of hidden states and its norm of outputs, with their gate."""

    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        taps: Taps | None = _taps(self.conv_kernel_size)
        if taps is None:
            own: Tensor = type(self).forward(self, hidden_states, *args, **kwargs)
            return own
        parts = [self.intermediate_size, self.conv_dim, self.num_heads]
        gate, mixed_TD, step_TH = project(self, hidden_states[0]).split(parts, dim=-1)
        wide = torch.promote_types(step_TH.dtype, torch.float32)
        dt_TH = softplus(step_TH.to(wide) + self.dt_bias.to(wide)).clamp(*self.time_step_limit)
        log_decay_TH, d_H = -self.A_log.to(wide).exp() * dt_TH, self.D
        shared = self.n_groups * self.ssm_state_size
        sizes = [self.intermediate_size, shared, shared]
        widths = [self.head_dim, self.ssm_state_size, self.ssm_state_size]
        context: ContextGroup | None = _context()
        given = _given(self.conv1d, mixed_TD, sizes, widths, [dt_TH, log_decay_TH], context)
        (x_THV, b_TGK, c_TGK), (dt_TH, log_decay_TH) = _convolved(self, given, widths, taps), given.rates
        if context is not None:
            d_H = exchange.own_heads(d_H, context)
        out: Tensor = _scan(state_space.Inputs(c_TGK, b_TGK, x_THV, dt_TH, log_decay_TH)) + d_H[:, None] * x_THV
        if context is not None:
            out = exchange.from_heads(out, context)
        out = norm(self, out.flatten(1), gate)
        out = self.out_proj(out.to(hidden_states.dtype))
        return out[None]

    return forward


def _of_mamba2(layer: Any) -> Exchanged:
    shared = 2 * layer.n_groups * layer.ssm_state_size
    return Exchanged(2 * layer.intermediate_size, 2 * layer.num_heads, shared, layer.n_groups)


def _projected(layer: Any, hidden_TD: Tensor) -> Tensor:
    projected: Tensor = layer.in_proj(hidden_TD)
    return projected


def _falcon_h1_projected(layer: Any, hidden_TD: Tensor) -> Tensor:
    projected: Tensor = layer.in_proj(hidden_TD * layer.ssm_in_multiplier) * layer.mup_vector.flatten()
    return projected


def _normed(layer: Any, out_TD: Tensor, gate_TD: Tensor) -> Tensor:
    normed: Tensor = layer.norm(out_TD, gate_TD)
    return normed


def _falcon_h1_normed(layer: Any, out_TD: Tensor, gate_TD: Tensor) -> Tensor:
    return _normed(layer, out_TD, gate_TD) if layer.mamba_rms_norm else out_TD * silu(gate_TD)


class Kind(NamedTuple):
    """What a kind of layer computes over the tree of a row."""

    forward: Callable[..., Tensor]
    kernel: Callable[[], Kernel] | None  # of its recurrence
    exchanged: Callable[[Any], Exchanged]


def _delta(inputs: Callable[[Any, Tensor], Inputs], norm: str, out_proj: str) -> Kind:
    return Kind(_gated_delta_net(inputs, norm, out_proj), delta.kernel, _of_delta)


KINDS: dict[str, Kind] = {
    "Qwen3NextGatedDeltaNet": _delta(_qwen3_next, "norm", "out_proj"),
    **dict.fromkeys(
        ("Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet", "Qwen4ExpTextGatedDeltaNet"),
        _delta(_qwen3_5, "norm", "out_proj"),
    ),
    "OlmoHybridGatedDeltaNet": _delta(_olmo_hybrid, "o_norm", "o_proj"),
    **dict.fromkeys(
        ("BambaMixer", "GraniteMoeHybridMambaLayer", "Mamba2Mixer", "NemotronHMamba2Mixer", "Zamba2MambaMixer"),
        Kind(_mamba2(_projected, _normed), state_space.kernel, _of_mamba2),
    ),
    "FalconH1Mixer": Kind(_mamba2(_falcon_h1_projected, _falcon_h1_normed), state_space.kernel, _of_mamba2),
    **dict.fromkeys(("Lfm2ShortConv", "Lfm2MoeShortConv"), Kind(_short_convolution, None, _of_convolution)),
}
