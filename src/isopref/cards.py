"""GPU specifications from the manufacturers' data sheets. From isopref, imports only errors."""

import math
import re
from dataclasses import dataclass

from isopref.errors import ConfigError

GIB = 2.0**30
_UNITS = {"GB": 1e9, "GIB": GIB, "TB": 1e12, "TIB": 2.0**40}


@dataclass(frozen=True)
class Card:
    """One kind of GPU."""

    flops: float  # per second, dense bfloat16
    flops_float32: float  # without TF32
    bandwidth: float  # bytes per second, to and from its own memory
    memory: float  # bytes, about as many as torch reports
    link: float  # bytes per second to another card of the same machine, each way
    flops_float8: float | None = None  # per second, dense, with a scale per row; None: before Hopper
    host_link: float = 64e9  # bytes per second to the host's memory, each way: PCIe 5.0 with 16 lanes
    capability: int = 8  # CUDA's major number: 8 Ampere and Ada, 9 Hopper, 10 Blackwell

    def rate(self, number_bytes: int) -> float:
        """Operations per second on numbers of two bytes (bfloat16) or four (float32)."""
        return {2: self.flops, 4: self.flops_float32}[number_bytes]


# By a part of torch's device name. The first entry that matches applies, so more specific names come first.
CARDS = {
    "B200": Card(2250e12, 80e12, 8.0e12, 178 * GIB, 900e9, 4500e12, capability=10),
    "H200": Card(989e12, 67e12, 4.8e12, 139.8 * GIB, 450e9, 1979e12, capability=9),
    "H100 PCIe": Card(756e12, 51e12, 2.0e12, 79.2 * GIB, 64e9, 1513e12, capability=9),
    "H100": Card(989e12, 67e12, 3.35e12, 79.2 * GIB, 450e9, 1979e12, capability=9),
    "A100": Card(312e12, 19.5e12, 2.0e12, 79.2 * GIB, 300e9, host_link=32e9),
    "L40S": Card(362e12, 91.6e12, 0.864e12, 44.4 * GIB, 32e9, host_link=32e9),
    "A10G": Card(70e12, 31.2e12, 0.6e12, 22.1 * GIB, 32e9, host_link=32e9),
    "RTX 4090": Card(165e12, 82.6e12, 1.008e12, 23.6 * GIB, 32e9, host_link=32e9),
    "RTX 3090": Card(71e12, 35.6e12, 0.936e12, 23.6 * GIB, 32e9, host_link=32e9),
}


def find_card(name: str) -> Card:
    """The card called `name`, ignoring case and spaces. Raises ConfigError."""
    for known, card in CARDS.items():
        if known.lower().replace(" ", "") == name.lower().replace(" ", ""):
            return card
    raise ConfigError(f"--card {name}: unknown GPU. Use one of {', '.join(CARDS)}, with --memory if it differs.")


def parse_memory(text: str) -> float:
    """Bytes of "80GB" or "79.2 GiB". Raises ConfigError."""
    found = re.fullmatch(r"\s*([0-9]+\.?[0-9]*|\.[0-9]+)\s*([a-zA-Z]+)\s*", text)
    if found is None or found[2].upper() not in _UNITS or not 0 < float(found[1]) < math.inf:
        raise ConfigError(f"--memory {text}: write a number and a unit, as in 80GB or 79.2GiB.")
    return float(found[1]) * _UNITS[found[2].upper()]
