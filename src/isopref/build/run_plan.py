"""The input of `isopref plan`, the hardware, and its output."""

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from isopref.cards import Card, find_card, parse_memory
from isopref.errors import ConfigError
from isopref.plan.long_rows import Reach
from isopref.plan.network import Network
from isopref.plan.scale import Forecast


@dataclass(frozen=True)
class Hardware:
    """The hardware to plan for."""

    card_name: str
    card: Card
    gpus: int
    network: Network

    @classmethod
    def named(cls, card: str, gpus: int, memory: str | None = None, gigabits: float = 400) -> "Hardware":
        """Raises ConfigError for an unknown card, an invalid size or bandwidth."""
        found = find_card(card)
        if not math.isfinite(gigabits):
            raise ConfigError(f"--network: must be a number of Gb/s, as in 400; found {gigabits}.")
        if memory is not None:
            found = replace(found, memory=parse_memory(memory))
        return cls(card, found, gpus, Network.of(found, gigabits))


@dataclass(frozen=True)
class Alternative:
    """Another layout that fits, as overrides, with its memory and speed."""

    overrides: str
    memory_gib: float
    examples_per_s: float


@dataclass(frozen=True)
class RunPlan:
    """Everything `isopref plan` shows."""

    parameters: int
    unit: str  # what an example is called
    examples: int
    steps: int
    saved_by_sharing: float  # share of the tokens that computing a prompt once saves
    microbatch_tokens: int
    largest_fit: int  # tokens of the largest microbatch that would fit; 0 for none
    recompute: int  # layers that recompute their activations
    offloaded: int  # layers whose inputs are in host memory
    tile: int | None  # tokens that MLPs compute at a time
    layers: int
    grad_sync: str
    attention: str  # the kernel that was assumed
    usable: float  # bytes of a rank that a run may take
    run: Forecast
    hours: float | None  # of all steps; None if they do not fit
    score_hours: float | None  # of scoring every answer once with the reference; 0 if nothing is scored before training
    notes: list[str]
    alternatives: list[Alternative]
    reaches: list[Reach]  # how long an example may be, by setting
    scale: list[Forecast]

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"run": self.run.as_json(), "scale": [one.as_json() for one in self.scale]}
