"""Passes over one token per slot, recorded as CUDA graphs: the CPU cannot launch kernels fast enough otherwise."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class _Recorded(NamedTuple):
    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    output: Tensor


class Graphs:
    """Recorded passes, keyed by the number of tokens they attend to. They share one memory pool."""

    def __init__(self) -> None:
        self._recorded: dict[int, _Recorded] = {}
        self._pool: Any = None

    def run(self, length: int, compute: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """The result of `compute` for these inputs. The same `length` must always mean the same computation.

        The result is overwritten by the next call.
        """
        if length not in self._recorded:
            self._recorded[length] = self._record(compute, inputs)
        found = self._recorded[length]
        for place, value in zip(found.inputs, inputs, strict=True):
            place.copy_(value)
        found.graph.replay()
        return found.output

    def _record(self, compute: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> _Recorded:
        places = tuple(one.clone() for one in inputs)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # kernels are selected and compiled before recording
            compute(*places)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = compute(*places)
        self._pool = graph.pool()
        return _Recorded(graph, places, output)
