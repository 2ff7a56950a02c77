"""The speed of attention kernels by head width, as a share of a card's peak, measured on one H200.

A kernel computes full tiles of 128 queries by 128 keys. FlashAttention 4 also has a fixed cost for each row of tiles,
expressed as a number of extra tiles. Every measurement is of a forward and a backward pass together, so one rate serves
both. benchmarks/NOTES.md lists the runs that each rate was fitted to.
"""

from typing import NamedTuple

from isopref.ops.attention import Kernel

NAMES: dict[Kernel, str] = {
    "flash-attn-4": "FlashAttention 4 (flash-attn-4)",
    "varlen_attn": "FlashAttention 2 (torch's varlen_attn)",
    "segments": "torch's attention, segment by segment",
}


class AttentionRate(NamedTuple):
    """How fast a kernel is."""

    peak_share: float  # of the card's flops, over the tiles it computes
    row_tiles: float = 0.0  # the fixed cost of a row of tiles, in tiles


RATES: dict[Kernel, dict[int, AttentionRate]] = {
    "flash-attn-4": {64: AttentionRate(0.36, 1.6), 128: AttentionRate(0.61, 4.7)},
    "varlen_attn": {64: AttentionRate(0.165), 128: AttentionRate(0.20)},
    "segments": {64: AttentionRate(0.165)},  # not measured: taken from varlen_attn
}


def is_measured(kernel: Kernel, head_width: int) -> bool:
    return kernel != "segments" and head_width in RATES[kernel]


def attention_rate(kernel: Kernel, head_width: int) -> AttentionRate:
    """The rate for heads of this width or, if none was measured, of the widest ones that are narrower."""
    known = RATES[kernel]
    return known[max((width for width in known if width <= head_width), default=min(known))]
