"""MLPs computed in tiles along a row, so a long row never has all their intermediate activations in memory at once.

An MLP maps every token independently, so it can be computed for a few tokens at a time. Between forward and backward
only its input is kept; the backward pass recomputes each tile and accumulates weight gradients, in float32 if the
weights are narrower. `probe.check_tiles` verifies with tiny tiles that a model's MLPs really do not mix tokens.

A recomputing layer does not pay twice. Its recomputation stops once every tensor it saved is available, and the MLP's
input is saved before the MLP is computed (`_Keep`). So the layer recomputes only up to its MLP, and the tiles recompute
the MLP itself.

Dimensions: B sequences, T tokens, D hidden width.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from isopref.errors import ConfigError, ModelError
from isopref.models.parallel import decoder_layers, has_layers
from isopref.models.policy import Policy

# In class names. Models with experts also have names like Qwen3MoeAttention.
MLP = re.compile(r"(MLP|Mlp|MoE|Moe|MoeBlock|MoEBlock|MoELayer|FeedForward|FFN|FFNWithExperts)$")
WAY_OUT = "Set layout.mlp_tile_tokens: null."


def tile_mlps(policy: Policy, tokens: int | None) -> None:
    """Make the MLPs of all decoder layers compute this many tokens at a time; None: all at once.

    Raises ConfigError if the model's layers have no separate MLP.
    """
    if tokens is None and not has_layers(policy):
        return
    for layer in decoder_layers(policy, WAY_OUT):
        mlps = _mlps(layer)
        if tokens is not None and not mlps:
            raise ConfigError(
                f"layout.mlp_tile_tokens: {tokens}, but {type(layer).__name__} has no module that is its MLP. {WAY_OUT}"
            )
        for mlp in mlps:
            _tile(mlp, tokens, compiled=layer._compiled_call_impl is not None)


def can_tile(policy: Policy) -> bool:
    """Whether every layer has a separate MLP, which takes hidden states and nothing else.

    `probe.check_tiles` verifies that it does not mix tokens.
    """
    if not has_layers(policy):
        return False
    of_layers = [_mlps(layer) for layer in decoder_layers(policy)]
    return all(of_layers) and all(_takes_one_argument(mlp) for mlps in of_layers for mlp in mlps)


def _takes_one_argument(mlp: nn.Module) -> bool:
    return len(signature(type(mlp).forward).parameters) == 2  # besides itself


def _mlps(layer: nn.Module) -> list[nn.Module]:
    return [child for child in layer.children() if MLP.search(type(child).__name__)]


@contextmanager
def tiles_of(policy: Policy, tokens: int | None) -> Iterator[None]:
    """Use another tile size in MLPs that compute in tiles, as long as the context is open."""
    every = [one.forward for one in policy.modules() if isinstance(one.forward, TiledForward)]
    before = [one.tokens for one in every]
    for one in every:
        one.tokens = tokens
    try:
        yield
    finally:
        for one, size in zip(every, before, strict=True):
            one.tokens = size


def _tile(mlp: nn.Module, tokens: int | None, *, compiled: bool) -> None:
    own = vars(mlp).get("forward")
    if isinstance(own, TiledForward):
        own.tokens = tokens
    elif tokens is not None:
        # A wrapper module would change the names of all weights inside, and hooks cannot replace a forward.
        mlp.forward = TiledForward(mlp, tokens, compiled=compiled)
        if compiled:
            torch.compiler.reset()  # layers that were compiled with the MLP inside


class TiledForward:
    """Replaces the forward of an MLP. Compiled layers call it uncompiled; what it calls is compiled separately."""

    def __init__(self, mlp: nn.Module, tokens: int, *, compiled: bool):
        self.mlp = mlp
        self.tokens: int | None = tokens
        self.beside: tuple[None, ...] = ()  # placeholders for what the MLP returns besides its output
        self.own: Callable[..., Any] = torch.compile(mlp.forward) if compiled else mlp.forward

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.tokens is None:
            return self.own(*args, **kwargs)
        if len(args) != 1 or kwargs or not isinstance(args[0], Tensor):
            raise ModelError(f"{type(self.mlp).__name__} takes more than hidden states. {WAY_OUT}")
        x: Tensor = args[0]
        if x[..., 0].numel() <= self.tokens:
            return self.own(x)
        if not torch.is_grad_enabled():
            out = _all_tiles(self, x)
        else:
            weights = [weight for weight in self.mlp.parameters() if weight.requires_grad]
            kept = _Keep.apply(x) if x.requires_grad else x  # type: ignore[no-untyped-call]
            out = _Tiled.apply(kept, self, kept.grad_fn, *weights)  # type: ignore[no-untyped-call]
        return (out, *self.beside) if self.beside else out

    def tile(self, x: Tensor) -> Tensor:
        """The MLP's output for some tokens."""
        out = self.own(x)
        if isinstance(out, tuple):  # router logits, which layers discard
            self.beside = (None,) * (len(out) - 1)
            out = out[0]
        if not isinstance(out, Tensor) or out.flatten(0, -2).shape != x.flatten(0, -2).shape:
            raise ModelError(f"{type(self.mlp).__name__} does not return one vector per token. {WAY_OUT}")
        return out.view(x.shape)  # Llama 4's experts return the tokens of all sequences in one dimension

    def cut(self, x: Tensor) -> tuple[Tensor, ...]:
        """The tokens of a batch as one sequence, cut into tiles; views if x is contiguous."""
        assert self.tokens is not None
        tokens = x if x.ndim == 2 else x.reshape(1, -1, x.shape[-1])
        tiles: tuple[Tensor, ...] = tokens.split(self.tokens, dim=-2)
        return tiles


def _all_tiles(tiled: TiledForward, x: Tensor) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    for to, tile in zip(tiled.cut(out), tiled.cut(x), strict=True):
        to.copy_(tiled.tile(tile))
    return out


class _Keep(torch.autograd.Function):
    """An identity that saves the input of an MLP before the MLP is computed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tiled: TiledForward, keeper: Any, *_weights: Tensor) -> Tensor:
        ctx.tiled, ctx.keeper = tiled, keeper
        if keeper is None:
            ctx.save_for_backward(x)
        return _all_tiles(tiled, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (x,) = (ctx if ctx.keeper is None else ctx.keeper).saved_tensors
        tiled, need_x = ctx.tiled, ctx.needs_input_grad[0]
        # FSDP may have re-gathered the weights since.
        weights = [weight for weight in tiled.mlp.parameters() if weight.requires_grad]
        grad_x = torch.empty_like(x, memory_format=torch.contiguous_format) if need_x else None
        sums: list[Tensor | None] = [None] * len(weights)
        of_x = None if grad_x is None else tiled.cut(grad_x)
        for number, (tile, of_tile) in enumerate(zip(tiled.cut(x), tiled.cut(grad), strict=True)):
            own = tile.detach().requires_grad_(need_x)
            with torch.enable_grad():
                out = tiled.tile(own)
            found = list(torch.autograd.grad(out, [own, *weights] if need_x else weights, of_tile, allow_unused=True))
            if of_x is not None:
                of_x[number].copy_(found.pop(0))
            sums = [_added(total, more) for total, more in zip(sums, found, strict=True)]
        narrow = (total if total is None else total.to(w.dtype) for total, w in zip(sums, weights, strict=True))
        return grad_x, None, None, *narrow


def _added(total: Tensor | None, more: Tensor | None) -> Tensor | None:
    if more is None:  # an expert that got no token of the tile
        return total
    wide = torch.promote_types(more.dtype, torch.float32)
    return more.to(wide, copy=True) if total is None else total.add_(more)
