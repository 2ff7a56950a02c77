"""Forecasts steps of a run on a number of ranks: microbatches planned from real lengths, time and memory modelled."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from isopref.batch.packing import Budget
from isopref.cards import Card
from isopref.examples import Lengths
from isopref.models.shape import ModelShape
from isopref.plan.layout import Layout, step_loads
from isopref.plan.memory import Memory, loading_memory, peak_memory
from isopref.plan.network import Network, Traffic
from isopref.plan.speed import StepTime, step_time
from isopref.plan.together import Exchange


@dataclass(frozen=True)
class Forecast:
    """Expected figures of a step, each a mean over the forecast steps."""

    parallel: str
    ranks: int
    shard: int
    tensor: int  # ranks that compute each layer together
    context: int  # ranks that split a row
    batch_size: float
    microbatches: float  # of one rank and step
    largest_tokens: float  # of all microbatches
    fill: float  # share of the token slots that hold a token
    balance: float  # mean over the slowest rank's computing time
    sent_bytes: float  # by one rank in a step
    exchanged_bytes: float  # the part of sent_bytes that goes to ranks with the same pairs, inside layers
    flops: float  # useful floating-point operations of a step
    examples_per_s: float
    mfu: float  # useful FLOP/s over the data sheet's
    memory: Memory  # at the largest microbatch
    loading: float  # bytes of a rank while the model is loaded and sharded
    time: StepTime
    fits: bool  # whether a rank has enough memory to load the model and to run a step

    def as_json(self) -> dict[str, Any]:
        """As JSON; if the run does not fit, times and speeds are null."""
        return asdict(self) | ({} if self.fits else dict.fromkeys(("examples_per_s", "mfu", "time")))


def forecast(
    shape: ModelShape,
    layout: Layout,
    card: Card,
    network: Network,
    batches: Sequence[Lengths],
    budget: Budget,
    *,
    answers: int,
    attention_share: float,
    room: float = math.inf,
) -> Forecast:
    """Forecast steps from the lengths of some global batches, with `room` bytes of memory on each rank.

    `answers`: their number in the entire table, whose reference values are kept in memory.
    """
    steps = [
        step_loads(batch, budget, ranks=layout.groups, attention_share=attention_share, windows=shape.flops.windows)
        for batch in batches
    ]
    times = [step_time(shape, layout, card, loads, network) for loads in steps]
    mean = StepTime(*(float(np.mean([vars(time)[name] for time in times])) for name in vars(times[0])))
    busy = mean.products + mean.attention + mean.elementwise + mean.exchange
    useful = float(np.mean([shape.flops(batch) for batch in batches]))
    batch_size = float(np.mean([len(batch) for batch in batches]))
    microbatches = float(np.mean([loads.tokens.shape[1] for loads in steps]))
    real = sum(int((batch.tree if layout.rows == "shared" else batch.sequence).sum()) for batch in batches)
    largest = max((loads.largest for loads in steps), key=lambda one: float(one.tokens[0, 0]))
    only = all(loads.tokens.shape[1] == 1 for loads in steps)
    memory = peak_memory(shape, layout, largest, answers=answers, only_microbatch=only)
    loading = loading_memory(shape, layout)
    exchange = Exchange.of(shape, layout, network)
    exchanged = float(np.mean([exchange.sent_bytes(loads.tokens).sum(axis=1).mean() for loads in steps]))
    return Forecast(
        parallel=layout.parallel,
        ranks=layout.ranks,
        shard=layout.shard,
        tensor=layout.tensor,
        context=layout.context,
        batch_size=batch_size,
        microbatches=microbatches,
        largest_tokens=float(largest.tokens[0, 0]),
        fill=real / sum(float(loads.tokens.sum()) for loads in steps),
        balance=busy / (busy + mean.imbalance),
        sent_bytes=Traffic.of(shape, layout, network).bytes_per_step(round(microbatches)) + exchanged,
        exchanged_bytes=exchanged,
        flops=useful,
        examples_per_s=batch_size / mean.total,
        mfu=useful / (mean.total * layout.ranks * card.rate(layout.compute_bytes)),
        memory=memory,
        loading=loading,
        time=mean,
        fits=max(memory.total, loading) <= room,
    )
