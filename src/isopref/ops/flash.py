"""FlashAttention 4 (the package flash-attn-4) over segments, as one custom op that can be part of a compiled layer.

Torch has FlashAttention 2 built in; on a Hopper card, these kernels take 0.6 of its time over rows of chat pairs.
"""

from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from isopref.types import Segments

WIDTHS = (64, 128)  # of a head: the ones that tests/gpu compares
CAPABILITIES = (9, 10)  # Hopper and data-centre Blackwell


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def has_flash(device: torch.device) -> bool:
    """Whether the package can be used and supports this card."""
    return knows(device) and load().kernels is not None


class Package(NamedTuple):
    """The package's kernels, or None; if it is installed but cannot be imported, also why."""

    kernels: Any
    fault: str | None


@cache
def load() -> Package:
    """Import the package, if it is installed. A broken installation is not an error: torch has a kernel of its own."""
    try:
        distribution("flash-attn-4")  # other FlashAttention packages have a module of this name without these kernels
    except PackageNotFoundError:
        return Package(None, None)
    try:
        return Package(import_module("flash_attn.cute.interface"), None)
    except Exception as error:  # incompatible libraries may raise AttributeError as well as ImportError
        return Package(None, f"{type(error).__name__}: {error}")


def knows(device: torch.device) -> bool:
    """Whether the package has kernels for this card."""
    return device.type == "cuda" and covers(torch.cuda.get_device_capability(device)[0])


def covers(capability: int) -> bool:
    """Whether the package has kernels for cards of this major capability."""
    return capability in CAPABILITIES


def fits(query: Tensor, value: Tensor) -> bool:
    """Whether the kernels take heads of this width."""
    return takes(query.shape[-1], value.shape[-1])


def takes(query_width: int, value_width: int) -> bool:
    """The same, from the widths alone."""
    return query_width == value_width and query_width in WIDTHS


def _masked(window: int | None) -> dict[str, Any]:
    if window is None:
        return {"causal": True}
    return {"causal": False, "window_size_left": window - 1, "window_size_right": 0}


def attend(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float, window: int | None) -> Tensor:
    """`segment_attention` of keys and values that are already gathered: T, H, E in and out."""
    out: Tensor = forward(q, k, v, segments.query_offsets, segments.key_offsets, segments.longest, scale, window)[0]
    return out


@torch.library.custom_op("isopref::flash", mutates_args=())
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_offsets: Tensor,
    key_offsets: Tensor,
    longest: int,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """What each query gets, and the logarithm of its sum of exponentials (H, T)."""
    found = load().kernels._flash_attn_fwd(
        q,
        k,
        v,
        cu_seqlens_q=query_offsets,
        cu_seqlens_k=key_offsets,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        softmax_scale=scale,
        return_lse=True,
        **_masked(window),
    )
    return found[0], found[1]


@forward.register_fake
def _(q: Tensor, *_args: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(
        (q.shape[1], q.shape[0]), dtype=torch.float32
    )


@torch.library.custom_op("isopref::flash_backward", mutates_args=())
def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    query_offsets: Tensor,
    key_offsets: Tensor,
    longest: int,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = load().kernels._flash_attn_bwd(
        q,
        k,
        v,
        out,
        grad,
        lse,
        cu_seqlens_q=query_offsets,
        cu_seqlens_k=key_offsets,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        softmax_scale=scale,
        **_masked(window),
    )[:3]
    return dq, dk, dv


@backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_args: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


def _keep(ctx: FunctionCtx, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, query_offsets, key_offsets, *rest = inputs
    ctx.save_for_backward(q, k, v, *output, query_offsets, key_offsets)
    ctx.rest = rest  # type: ignore[attr-defined]


def _gradients(ctx: Any, grad: Tensor, _grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, query_offsets, key_offsets = ctx.saved_tensors
    grads = backward(grad.contiguous(), q, k, v, out, lse, query_offsets, key_offsets, *ctx.rest)
    return (*grads, None, None, None, None, None)


forward.register_autograd(_gradients, setup_context=_keep)
