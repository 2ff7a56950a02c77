"""Activation checkpoints in host memory: the inputs that recomputing layers keep between forward and backward.

A layer's input is copied to the host on a separate stream while the layer computes. In the backward pass it is copied
back while the layer after it computes: fetching one checkpoint prefetches the one before it. Both directions share one
stream, so a host block is never overwritten before it has been read.

Host memory is allocated in blocks of one size, page-locked on CUDA, so rows of all lengths reuse the same blocks. On a
CPU the same code copies within host memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from isopref.models.row import contexts

BLOCK = 2**25  # bytes: torch rounds page-locked allocations up to a power of two


def recompute(layer: Callable[..., Any], *args: Any) -> Any:
    """Call a layer, keeping only its inputs and recomputing the rest in the backward pass."""
    return checkpoint(layer, *args, use_reentrant=False, context_fn=contexts)


class HostCheckpoints:
    """The inputs that layers of one model keep in host memory."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []  # blocks
        self._last: Callable[[], _Kept | None] = lambda: None
        self._leaving: tuple[Tensor, torch.cuda.Event] | None = None  # held until it has been copied
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def recompute(self, layer: Callable[..., Any], *args: Any) -> Any:
        """Call a layer like the function `recompute`, with its inputs in host memory."""
        # The checkpoint saves them before it puts hooks of its own around the layer.
        with saved_tensors_hooks(self._keep, self._fetch):
            return recompute(layer, *args)

    def recompute_on_device(self, layer: Callable[..., Any], *args: Any) -> Any:
        """Call a layer after the offloading ones, with its inputs on the device; release the last offloaded input."""
        self._let_go()
        return recompute(layer, *args)

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    def take_blocks(self, num_bytes: int, device: torch.device) -> list[Tensor]:
        count = math.ceil(num_bytes / BLOCK)
        while len(self._free) < count:
            self._free.append(torch.empty(BLOCK, dtype=torch.uint8, pin_memory=device.type == "cuda"))
        return [self._free.pop() for _ in range(count)]

    def give_blocks(self, blocks: list[Tensor]) -> None:
        self._free += blocks

    def _keep(self, tensor: Tensor) -> _Kept | Tensor:
        if not tensor.is_floating_point() or tensor.numel() == 0:
            return tensor
        whole = tensor.detach()
        source = (whole.to_local() if isinstance(whole, DTensor) else whole).contiguous()
        kept = _Kept(self, source, before=self._last)
        if isinstance(whole, DTensor):  # of ranks that compute a layer together, each holds a part of its input
            kept.spread = partial(
                DTensor.from_local,
                device_mesh=whole.device_mesh,
                placements=whole.placements,
                run_check=False,
                shape=whole.shape,
                stride=whole.stride(),
            )
        self._last = ref(kept)
        self._let_go()
        if kept.event is not None:
            self._leaving = source, kept.event
        return kept

    def _fetch(self, kept: _Kept | Tensor) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        self._let_go()
        tensor = kept.arrive()
        before = kept.before()
        if before is not None:
            before.fetch()
        return tensor if kept.spread is None else kept.spread(tensor)

    def _let_go(self) -> None:
        """Let the device reuse the memory of the last copied input once it is copied; a layer has computed since."""
        if self._leaving is not None:
            tensor, event = self._leaving
            torch.cuda.current_stream(tensor.device).wait_event(event)
            self._leaving = None


class _Kept:
    """One tensor in blocks of host memory, which are freed when the tensor is no longer needed."""

    def __init__(self, store: HostCheckpoints, tensor: Tensor, before: Callable[[], _Kept | None]):
        self.store, self.before = store, before
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device
        self.spread: Callable[[Tensor], Tensor] | None = None  # makes a DTensor from this rank's part
        self.fetched: Tensor | None = None
        self.event: torch.cuda.Event | None = None
        self.blocks: list[Tensor] = []
        pieces = _pieces(tensor)
        self.blocks = store.take_blocks(BLOCK * len(pieces), tensor.device)
        self._copy([(block[: len(piece)], piece) for piece, block in zip(pieces, self.blocks, strict=True)])

    def fetch(self) -> None:
        """Start copying the tensor back to its device, unless that has already begun."""
        if self.fetched is None:
            self.fetched = torch.empty(self.shape, dtype=self.dtype, device=self.device)
            pairs = zip(_pieces(self.fetched), self.blocks, strict=True)
            self._copy([(piece, block[: len(piece)]) for piece, block in pairs])

    def arrive(self) -> Tensor:
        """The tensor on its device, in time for whatever is computed next."""
        self.fetch()
        self._wait()
        tensor, self.fetched = self.fetched, None
        assert tensor is not None
        return tensor

    def _copy(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        if self.device.type != "cuda":
            for to, source in pairs:
                to.copy_(source)
            return
        stream = self.store.stream(self.device)
        # Not before the source is computed, nor while earlier work on the queue still reads the target's memory.
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for to, source in pairs:
                to.copy_(source, non_blocking=True)
            self.event = stream.record_event()

    def _wait(self) -> None:
        if self.event is not None:
            torch.cuda.current_stream(self.device).wait_event(self.event)

    def __del__(self) -> None:
        if self.fetched is not None:  # from a failed pass: its memory must not be reused during the copy
            self._wait()
        self.store.give_blocks(self.blocks)


def _pieces(tensor: Tensor) -> tuple[Tensor, ...]:
    """The bytes of a contiguous tensor, in blocks."""
    pieces: tuple[Tensor, ...] = tensor.view(-1).view(torch.uint8).split(BLOCK)
    return pieces
