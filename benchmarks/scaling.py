"""A run on many ranks, on paper: the run's planner on real lengths, and the performance model of `isopref plan`.

    python benchmarks/scaling.py            # writes docs/scaling.md and its plots

Needs no GPU. Balance and planning time come from the run's own planner; network, MFU and memory come from the
performance model, for an 8B Llama with float32 master weights on H100s, eight per machine.
"""

import platform
import time
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from math import log2
from pathlib import Path
from textwrap import fill

import scaling_long
import workload

from isopref.batch.packing import Budget, plan_step
from isopref.build import resolve
from isopref.cards import CARDS, GIB
from isopref.examples import Lengths
from isopref.models.shape import ModelShape
from isopref.plan.layout import ONE_GPU, step_loads
from isopref.plan.network import Network
from isopref.plan.scale import Forecast, forecast

DOCS = Path(__file__).parents[1] / "docs"
BATCHES = (64, 256, 1024, 4096, 16384, 65536)
SHARDED_BATCHES = (1024, 16384, 65536)
RANKS = tuple(2**n for n in range(13))  # 1 to 4,096
TOKENS = 8192
COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#a463f2")
CARD = CARDS["H100"]
FSDP = replace(ONE_GPU, parallel="fsdp", ranks=8, shard=8, grad_sync="every", weight_bytes=4, state_bytes=8)

Series = dict[str, list[tuple[float, float]]]

PAGE = """\
# Scaling to many ranks

This page predicts runs on 1 to 4,096 ranks with global batches of 64 to 65,536 pairs. Nothing here was run on that many
GPUs. In short: give each rank at least four pairs per step, and use HSDP instead of FSDP only from about 1,024 ranks
up. `isopref plan my.yaml --ranks 8,64,1024` makes the same predictions for your own model and data.

Balance, microbatches and planning time come from the run's own planner, applied to the lengths of real chat pairs.
Network, MFU and memory come from the performance model behind `isopref plan`, for an 8B Llama with float32 master
weights and bfloat16 compute, in microbatches of {tokens:,} tokens, on H100s: eight per machine, connected by NVLink
(450 GB/s each way), with 400 Gb/s per GPU to other machines. `python benchmarks/scaling.py` generates this page.

## Balance

Balance is the share of time that ranks spend computing if all wait for the slowest in every microbatch. It is about 97%
or more with four or more pairs per rank, and drops to about half with one pair per rank, because the longest pair
dominates. With fewer pairs than ranks, some ranks are idle.

![balance of ranks](scaling-balance.svg)

{balance}

## FSDP or HSDP

Model FLOPs utilisation (MFU) of the whole run: useful FLOPs divided by the data-sheet peak of all cards. FSDP shards
the model over all ranks, so it gathers weights and reduces gradients across all of them in every microbatch. HSDP
shards it within each machine (`layout.hsdp_shard: 8`), where links are fast, and reduces gradients between machines
once per step.

![MFU with FSDP and HSDP](scaling-mfu.svg)

{mfu}

{takeover}

The table shows how much one rank sends per step (all-gathers, reductions), and how long it waits for communication that
compute does not hide:

{network}

The model assumes ring all-gathers and reductions, with one ring per GPU of a machine across machines; tree all-reduces
between replicas; 80% of a link's bandwidth; 2 microseconds per hop within a machine, 5 between machines. Gathers
overlap with the forward pass, everything else with the backward pass. FSDP is limited by the number of hops: a ring
over 4,096 ranks has 4,095 of them in each call.

{long_pairs}
## Planning

Every rank plans every step from the lengths alone. A background thread plans two steps ahead while the device computes.
Milliseconds on one core to plan one step ({machine}, Python {python}), best of three:

{planning}
"""


def on_ranks(shape: ModelShape, ranks: int, pairs: int, *, shard: int) -> Forecast:
    layout = replace(FSDP, parallel="fsdp" if shard == ranks else "hsdp", ranks=ranks, shard=shard)
    return forecast(
        shape,
        layout,
        CARD,
        Network.of(CARD),
        [Lengths.of_pairs(workload.lengths("chat", pairs))],
        Budget("shared", TOKENS),
        answers=2 * pairs,
        attention_share=resolve.attention_share(shape.width),
    )


def balance(shape: ModelShape, pairs: int, ranks: int) -> float:
    """Balance by tokens: the mean over ranks divided by the maximum, microbatch by microbatch."""
    share = resolve.attention_share(shape.width)
    lengths = Lengths.of_pairs(workload.lengths("chat", pairs))
    loads = step_loads(
        lengths, Budget("shared", TOKENS), ranks=ranks, attention_share=share, windows=shape.flops.windows
    )
    return float(loads.tokens.sum() / ranks / loads.tokens.max(axis=0).sum())


def planning_ms(pairs: int, ranks: int) -> float:
    lengths, times = Lengths.of_pairs(workload.lengths("chat", pairs)), []
    for _ in range(3):
        started = time.process_time()
        plan_step(lengths, Budget("shared", TOKENS), num_ranks=ranks, attention_share=resolve.attention_share(4096))
        times.append(time.process_time() - started)
    return 1000 * min(times)


def chart(title: str, series: Series, *, x_label: str, y_label: str, dashed: Sequence[str] = ()) -> str:
    """A line chart as SVG: x is a power of two, y a share from 0 to 1."""
    left, top, width, height = 60, 40, 520, 280
    most = max(log2(x) for line in series.values() for x, _ in line)

    def at(x: float, y: float) -> str:
        return f"{left + width * log2(x) / most:.1f},{top + height * (1 - y):.1f}"

    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 390" font-family="sans-serif" font-size="12">',
        f"<title>{escape(title)}</title>",
        '<rect width="760" height="390" fill="#ffffff"/>',
        f'<text x="{left}" y="22" font-size="15" fill="#222">{escape(title)}</text>',
    ]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        x, y = at(1, share).split(",")
        parts.append(f'<line x1="{x}" y1="{y}" x2="{left + width}" y2="{y}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 8}" y="{float(y) + 4}" text-anchor="end" fill="#555">{share:.0%}</text>')
    for power in range(0, int(most) + 1, 2):
        x, y = at(2**power, 0).split(",")
        parts.append(f'<text x="{x}" y="{float(y) + 18}" text-anchor="middle" fill="#555">{2**power:,}</text>')
    parts.append(
        f'<text x="{left + width / 2}" y="{top + height + 40}" text-anchor="middle" fill="#222">{x_label}</text>'
    )
    parts.append(f'<text x="{left + width + 20}" y="{top + 4}" fill="#222">{y_label}</text>')
    for number, (name, line) in enumerate(series.items()):
        colour, dash = COLOURS[number % len(COLOURS)], ' stroke-dasharray="6 4"' if name in dashed else ""
        points = " ".join(at(x, y) for x, y in line)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        low = top + 28 + 20 * number
        parts.append(f'<line x1="600" y1="{low}" x2="624" y2="{low}" stroke="{colour}" stroke-width="2"{dash}/>')
        parts.append(f'<text x="630" y="{low + 4}" fill="#222">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    shape = scaling_long.eight_b()
    balances = {pairs: [(ranks, balance(shape, pairs, ranks)) for ranks in RANKS] for pairs in BATCHES}
    sharded = [ranks for ranks in RANKS if ranks >= 8]
    points = {
        (kind, pairs, ranks): on_ranks(shape, ranks, pairs, shard=ranks if kind == "fsdp" else 8)
        for pairs in SHARDED_BATCHES
        for ranks in sharded
        for kind in (("fsdp",) if ranks == 8 else ("fsdp", "hsdp"))
    }
    lines: Series = {}
    for pairs in SHARDED_BATCHES:
        for kind in ("fsdp", "hsdp"):
            lines[f"{kind.upper()}, {pairs:,}"] = [
                (ranks, points.get((kind, pairs, ranks), points["fsdp", pairs, ranks]).mfu) for ranks in sharded
            ]
    named = {f"{pairs:,} pairs": line for pairs, line in balances.items()}
    (DOCS / "scaling-balance.svg").write_text(chart("Balance of ranks", named, x_label="ranks", y_label="global batch"))
    dashed = [name for name in lines if name.startswith("FSDP")]
    (DOCS / "scaling-mfu.svg").write_text(
        chart("Expected MFU, 8B on H100", lines, x_label="ranks", y_label="pairs per step", dashed=dashed)
    )
    (DOCS / "scaling.md").write_text(page(balances, points, sharded, scaling_long.section(shape)))


def page(
    balances: dict[int, list[tuple[int, float]]],
    points: dict[tuple[str, int, int], Forecast],
    sharded: Sequence[int],
    long_pairs: str,
) -> str:
    some = [ranks for ranks in RANKS if log2(ranks) % 3 == 0]  # 1, 8, 64, 512, 4,096
    big = 16384
    first = {pairs: next(ranks for ranks in sharded if _faster(points, pairs, ranks)) for pairs in SHARDED_BATCHES}
    wins = ", ".join(f"from {ranks:,} ranks up at {pairs:,} pairs per step" for pairs, ranks in first.items())
    takeover = f"HSDP is faster by more than 2% {wins}. Below that, FSDP is as fast or faster and needs less memory."
    kinds = [(kind, ranks) for ranks in sharded for kind in ("fsdp", "hsdp") if (kind, big, ranks) in points]
    return PAGE.format(
        tokens=TOKENS,
        long_pairs=long_pairs,
        machine=platform.machine(),
        python=platform.python_version(),
        balance=scaling_long.table(
            ["pairs per step", "1 rank", *(f"{ranks:,} ranks" for ranks in some[1:])],
            [[f"{pairs:,}", *(f"{dict(line)[ranks]:.1%}" for ranks in some)] for pairs, line in balances.items()],
        ),
        mfu=scaling_long.table(
            ["ranks", *(f"{kind.upper()}, {pairs:,}" for pairs in SHARDED_BATCHES for kind in ("fsdp", "hsdp"))],
            [
                [
                    f"{ranks:,}",
                    *(
                        f"{points[kind, pairs, ranks].mfu:.1%}" if (kind, pairs, ranks) in points else ""
                        for pairs in SHARDED_BATCHES
                        for kind in ("fsdp", "hsdp")
                    ),
                ]
                for ranks in sharded
            ],
        ),
        takeover=fill(takeover, 120),
        network=scaling_long.table(
            [f"{big:,} pairs per step", "microbatches", "GB", "waits, s", "step, s", "pairs/s", "GiB of memory"],
            [
                [
                    f"{ranks:,} {kind.upper()}",
                    f"{points[kind, big, ranks].microbatches:.0f}",
                    f"{points[kind, big, ranks].sent_bytes / 1e9:,.0f}",
                    f"{points[kind, big, ranks].time.network:.2f}",
                    f"{points[kind, big, ranks].time.total:.2f}",
                    f"{points[kind, big, ranks].examples_per_s:,.0f}",
                    f"{points[kind, big, ranks].memory.total / GIB:.0f}",
                ]
                for kind, ranks in kinds
            ],
        ),
        planning=scaling_long.table(
            ["pairs per step", "1 rank", *(f"{ranks:,} ranks" for ranks in some[1:])],
            [[f"{pairs:,}", *(f"{planning_ms(pairs, ranks):.1f}" for ranks in some)] for pairs in BATCHES],
        ),
    )


def _faster(points: dict[tuple[str, int, int], Forecast], pairs: int, ranks: int) -> bool:
    hsdp = points.get(("hsdp", pairs, ranks))
    return hsdp is not None and hsdp.examples_per_s > 1.02 * points["fsdp", pairs, ranks].examples_per_s


if __name__ == "__main__":
    main()
