"""What ranks send each other in a step, and how much of that time is not hidden by compute.

A model on paper: rings gather and reduce, trees sum over machines, each limited by its slowest link and by its number
of hops. The model assumes that the ranks of a shard group fill complete machines or fit into one.
"""

import math
from dataclasses import dataclass, replace

from isopref.cards import Card
from isopref.models.shape import ModelShape
from isopref.plan.layout import Layout
from isopref.types import FloatArray

LINK_SHARE = 0.8  # of a link's bandwidth, achieved by a collective
HOP_S, NODE_HOP_S = 2e-6, 5e-6  # one step of a ring, inside a machine and between two


@dataclass(frozen=True)
class Network:
    """Links of one rank: to others in its machine, and to other machines, in bytes a second each way."""

    inside: float
    between: float
    ranks_per_node: int = 8

    @classmethod
    def of(cls, card: Card, gigabits: float = 400.0) -> "Network":
        return cls(card.link, gigabits * 1e9 / 8)

    def every(self, step: int) -> "Network":
        """The network among every `step`-th rank only: fewer of them share a machine."""
        return replace(self, ranks_per_node=max(1, self.ranks_per_node // step))

    def ring_s(self, size: float, ranks: int, calls: int) -> float:
        """Seconds to gather or reduce `size` bytes over `ranks` ranks, in `calls` calls.

        Across machines there are as many rings as ranks per machine, each with its own link and a part of the bytes.
        """
        if ranks == 1:
            return 0.0
        nodes = math.ceil(ranks / self.ranks_per_node)
        link = self.inside if nodes == 1 else min(self.inside, self.between * self.ranks_per_node)
        hops = (ranks - nodes) * HOP_S + (nodes - 1) * NODE_HOP_S
        return size * (ranks - 1) / ranks / (LINK_SHARE * link) + calls * hops

    def tree_s(self, size: float, ranks: int, calls: int) -> float:
        """Seconds to sum `size` bytes over `ranks` ranks, each in a different machine, in `calls` calls."""
        if ranks == 1:
            return 0.0
        hops = 2 * math.ceil(math.log2(ranks))
        return 2 * size * (ranks - 1) / ranks / (LINK_SHARE * self.between) + calls * hops * NODE_HOP_S

    def all_to_all_s(self, ranks: int) -> tuple[float, float]:
        """Seconds per byte that each of `ranks` ranks divides among all of them, and seconds per call.

        Neighbours fill machines. Traffic to other machines and inside a machine flows at the same time.
        """
        near = min(ranks, self.ranks_per_node)
        inside = (near - 1) / ranks / self.inside
        between = (ranks - near) / ranks / self.between
        return max(inside, between) / LINK_SHARE, HOP_S if near == ranks else NODE_HOP_S


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank sends in a step, and the seconds of one gather and one reduction of all weights."""

    gather_bytes: float  # of one gather of all weights
    reduce_bytes: float  # of one reduction of all gradients
    last_bytes: float  # in addition, once in the step's last microbatch: sums over the copies of the model (HSDP)
    gather_s: float
    reduce_s: float
    last_s: float
    every: bool  # gather and reduce for each microbatch, with a second gather for its backward pass

    @classmethod
    def of(cls, shape: ModelShape, layout: Layout, network: Network) -> "Traffic":
        whole = shape.trained_parameters * layout.weight_bytes / layout.tensor
        calls, ranks, network = shape.layers + 1, layout.averaging, network.every(layout.tensor)
        if not layout.sharded:
            # An all-reduce is a reduction and a gather.
            moved = 2 * whole * (ranks - 1) / ranks
            return cls(0.0, moved, 0.0, 0.0, 2 * network.ring_s(whole, ranks, calls), 0.0, every=False)
        shard, copies = layout.shard, ranks // layout.shard
        gathered = min(layout.spread(shape), shape.text_parameters) * layout.compute_bytes / layout.tensor
        return cls(
            gather_bytes=gathered * (shard - 1) / shard,
            reduce_bytes=whole * (shard - 1) / shard,
            last_bytes=2 * whole / shard * (copies - 1) / copies,
            gather_s=network.ring_s(gathered, shard, calls),
            reduce_s=network.ring_s(whole, shard, calls),
            last_s=network.tree_s(whole / shard, copies, calls),
            every=layout.grad_sync == "every",
        )

    def bytes_per_step(self, microbatches: int) -> float:
        """Bytes that one rank sends in a step."""
        times, gathers = (microbatches, 2) if self.every else (1, 1)
        return times * (gathers * self.gather_bytes + self.reduce_bytes) + self.last_bytes

    def exposed_s(self, seconds_M: FloatArray) -> float:
        """Seconds of communication in a step that compute does not hide. `seconds`: compute of each microbatch.

        A third of that is the forward pass, which overlaps with a gather; the rest is the backward pass, which overlaps
        with a reduction and a second gather.
        """
        forward, backward = seconds_M / 3, 2 * seconds_M / 3
        behind = self.reduce_s + (self.gather_s if self.every else 0.0)
        exposed = max(0.0, behind + self.last_s - float(backward[-1]))
        gathers = len(seconds_M) if self.every else 1
        exposed += sum(max(0.0, self.gather_s - float(t)) for t in forward[:gathers])
        if self.every:
            exposed += sum(max(0.0, behind - float(t)) for t in backward[:-1])
        return exposed
