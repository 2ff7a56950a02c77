"""What ranks send each other in a step, and how much of that time computing does not hide.

A model on paper: ring all-gathers and reduce-scatters, tree all-reduces, each limited by its slowest link and by the
hops that a piece of data takes.
"""

import math
from dataclasses import dataclass

from isopref.cards import Card
from isopref.models.shape import Shape
from isopref.plan.layout import Layout
from isopref.types import FloatArray

LINK_SHARE = 0.8  # of a link's rate that a collective reaches
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

    def ring_s(self, size: float, ranks: int, calls: int, *, spread: bool = False) -> float:
        """Seconds to gather or reduce `size` bytes over so many ranks, in so many calls.

        `spread`: each rank is in a machine of its own.
        """
        if ranks == 1:
            return 0.0
        nodes = ranks if spread else math.ceil(ranks / self.ranks_per_node)
        link = LINK_SHARE * (self.between if nodes > 1 else self.inside)
        hops = (ranks - nodes) * HOP_S + (nodes - 1) * NODE_HOP_S
        return size * (ranks - 1) / ranks / link + calls * hops

    def tree_s(self, size: float, ranks: int, calls: int, *, spread: bool) -> float:
        """Seconds to add up `size` bytes that every rank has."""
        if ranks == 1:
            return 0.0
        outside = spread or ranks > self.ranks_per_node
        link = LINK_SHARE * (self.between if outside else self.inside)
        hop = NODE_HOP_S if outside else HOP_S
        return 2 * size * (ranks - 1) / ranks / link + 2 * calls * math.ceil(math.log2(ranks)) * hop


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank sends in a step, and the seconds of one gather and one reduction of all weights."""

    gather_bytes: float  # of one gather of all weights
    reduce_bytes: float
    gather_s: float
    reduce_s: float
    last_s: float  # what comes on top in the step's last microbatch
    every: bool  # for each microbatch; a second gather then serves the backward pass

    @classmethod
    def of(cls, shape: Shape, layout: Layout, network: Network) -> "Traffic":
        whole = shape.parameters * layout.weight_bytes
        calls = shape.layers + 1
        if layout.parallel in ("single", "ddp"):
            moved = 2 * whole * (layout.ranks - 1) / layout.ranks
            return cls(0.0, moved, 0.0, network.tree_s(whole, layout.ranks, calls, spread=False), 0.0, False)
        shard, copies = layout.shard, layout.ranks // layout.shard
        share = (shard - 1) / shard
        gathered = shape.parameters * layout.compute_bytes
        between = 2 * whole / shard * (copies - 1) / copies
        return cls(
            gather_bytes=gathered * share,
            reduce_bytes=whole * share + between,
            gather_s=network.ring_s(gathered, shard, calls),
            reduce_s=network.ring_s(whole, shard, calls),
            last_s=network.tree_s(whole / shard, copies, calls, spread=shard >= network.ranks_per_node),
            every=layout.grad_sync == "every",
        )

    def bytes_per_step(self, microbatches: int) -> float:
        """Sent by one rank."""
        if not self.every:
            return self.gather_bytes + self.reduce_bytes
        return microbatches * (2 * self.gather_bytes + self.reduce_bytes)

    def exposed_s(self, seconds_M: FloatArray) -> float:
        """Seconds of a step that its microbatches' own time does not hide: a third of it is forward, the rest backward.

        A gather runs beside the forward pass, a reduction and a second gather beside the backward pass.
        """
        forward, backward = seconds_M / 3, 2 * seconds_M / 3
        behind = self.reduce_s + (self.gather_s if self.every else 0.0)
        exposed = max(0.0, behind + self.last_s - float(backward[-1]))
        gathers = len(seconds_M) if self.every else 1
        exposed += sum(max(0.0, self.gather_s - float(t)) for t in forward[:gathers])
        if self.every:
            exposed += sum(max(0.0, behind - float(t)) for t in backward[:-1])
        return exposed
