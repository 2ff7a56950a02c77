"""How `isopref plan` prints a plan: memory, step, time, alternatives that fit, and scaling to more ranks."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from isopref.cards import GIB
from isopref.errors import ConfigError

if TYPE_CHECKING:
    from isopref.build.run_plan import Hardware, RunPlan
    from isopref.plan.long_rows import Reach
    from isopref.plan.scale import Forecast

PARTS = {
    "weights": "weights",
    "gathered": "weights gathered by FSDP",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "activations": "activations per microbatch",
    "logits": "logits, or one layer's backward",
    "cache": "reference cache",
}


def parse_ranks(text: str) -> list[int]:
    """Numbers of ranks from "8,64,1024". Raises ConfigError."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise ConfigError(f"--ranks {text}: must be positive whole numbers separated by commas, e.g. 8,64,1024.")
    return [int(part) for part in parts]


def to_json(plan: RunPlan) -> str:
    """The plan as JSON."""
    return json.dumps(plan.as_json(), indent=2)


def show(plan: RunPlan, hardware: Hardware, console: Console) -> None:
    """Print the plan for people."""
    run = plan.run
    takes = f"{plan.largest_fit:,}" if plan.largest_fit else "none"
    console.print(Text(f"{plan.parameters / 1e9:.2f} B parameters on {hardware.gpus} x {hardware.card_name}", "bold"))
    _show_memory(plan, hardware, console)
    _lines(
        console,
        f"one step of {run.batch_size:.0f} {plan.unit}s",
        {
            "layout": f"{run.parallel}, {_together(run)}grad_sync {plan.grad_sync}, "
            f"{plan.recompute} of {plan.layers} layers recompute" + _long_rows(plan),
            "attention": plan.attention,
            "microbatches": f"{run.microbatches:.1f} per rank, the largest with {run.largest_tokens:,.0f} tokens "
            f"(limit {plan.microbatch_tokens:,}; memory allows {takes})",
            "row fill": f"{run.fill:.1%}",
            "prompt sharing": f"computes {plan.saved_by_sharing:.0%} fewer tokens (layout.rows: shared)",
            "rank balance": f"{run.balance:.1%}",
            "useful work": f"{run.flops / 1e12:,.3g} TFLOP" if run.flops < 1e15 else f"{run.flops / 1e15:,.3g} PFLOP",
            "sent per rank": f"{run.sent_bytes / 1e9:.2f} GB"
            + (f", of which {run.exchanged_bytes / 1e9:.2f} GB inside layers" if _together(run) else ""),
        },
    )
    if plan.hours is None:
        _show_way_out(plan, console)
    else:
        _show_time(plan, plan.hours, console)
    show_reaches(plan.reaches, plan.unit, console)
    for note in plan.notes:
        console.print(f"note: {note}", markup=False)
    if plan.scale:
        _show_scale(plan.scale, plan.unit, console)


def _show_memory(plan: RunPlan, hardware: Hardware, console: Console) -> None:
    memory = plan.run.memory
    table = Table("memory per rank", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("GiB", justify="right")
    for name, label in PARTS.items():
        table.add_row(label, f"{getattr(memory, name) / GIB:.2f}")
    table.add_section()
    table.add_row("peak", f"{memory.total / GIB:.1f}")
    table.add_row("during loading", f"{plan.run.loading / GIB:.1f}")
    table.add_row(f"usable, of {hardware.card.memory / GIB:.1f}", f"{plan.usable / GIB:.1f}")
    console.print(table)
    fits = plan.run.fits
    console.print(Text("it fits" if fits else "it does not fit", "green" if fits else "bold red"))


def show_reaches(reaches: list[Reach], unit: str, console: Console) -> None:
    """How long an example may be, by setting."""
    table = Table(f"longest {unit} that fits", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("tokens", justify="right")
    table.add_column("too long", justify="right")
    before = ""
    for one in reaches:
        added = one.overrides.removeprefix(f"{before} ").replace("layout.", "")
        label = f"  and {added}" if before and one.overrides.startswith(before) else added
        table.add_row(label, f"{one.tokens:,}", f"{one.too_long:,} {unit}s")
        if "context_parallel" not in one.overrides:  # each of these replaces the one before, instead of adding to it
            before = one.overrides
    console.print(table)


def _show_way_out(plan: RunPlan, console: Console) -> None:
    console.print(Text("\nto make it fit", "bold"))
    for other in plan.alternatives:
        told = f"  {other.overrides} ({other.memory_gib:.1f} GiB, {_speed(other.examples_per_s)} {plan.unit}s/s)"
        console.print(told, markup=False)
    if not plan.alternatives:
        console.print("  no layout on up to 1,024 GPUs fits; use shorter data (data.max_length) or a smaller model")


def _show_time(plan: RunPlan, hours: float, console: Console) -> None:
    time = plan.run.time
    shares = ", ".join(f"{name} {seconds / time.total:.0%}" for name, seconds in vars(time).items() if seconds)
    lines = {
        "one step": f"{time.total:.3f} s: {shares}",
        "speed": f"{_speed(plan.run.examples_per_s)} {plan.unit}s/s, MFU {plan.run.mfu:.1%}",
        "the run": f"{_duration(3600 * hours)} for {plan.steps:,} steps over {plan.examples:,} {plan.unit}s",
    }
    if plan.score_hours:
        lines["before it"] = f"{_duration(3600 * plan.score_hours)} to score the reference, unless it is cached"
    _lines(console, "time", lines)


def _show_scale(points: list[Forecast], unit: str, console: Console) -> None:
    table = Table("ranks", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in ("rows", "balance", "GB sent", "wait s", "step s", f"{unit}s/s", "MFU", "GiB"):
        table.add_column(name, justify="right", no_wrap=True)
    for point in points:
        timed = (
            f"{point.time.exchange + point.time.network:.3f}",
            f"{point.time.total:.3f}",
            _speed(point.examples_per_s, digits=0),
            f"{point.mfu:.1%}",
        )
        table.add_row(
            f"{point.ranks} {point.parallel}{f' {point.shard}' if point.parallel == 'hsdp' else ''}",
            f"{point.microbatches:.1f}",
            f"{point.balance:.1%}",
            f"{point.sent_bytes / 1e9:.2f}",
            *(timed if point.fits else "-" * len(timed)),
            f"{point.memory.total / GIB:.1f}",
        )
    console.print(table)
    console.print("rows: microbatches per rank; wait: network time not hidden by compute")
    if not all(point.fits for point in points):
        console.print("-: does not fit")


def _long_rows(plan: RunPlan) -> str:
    """What is done for long rows, if anything is."""
    offloaded = f", {plan.offloaded} offload their inputs" if plan.offloaded else ""
    return offloaded + (f", MLPs in tiles of {plan.tile} tokens" if plan.tile is not None else "")


def _together(run: Forecast) -> str:
    """How many ranks compute each layer or each row together, if more than one."""
    layer = f"{run.tensor} ranks per layer, " if run.tensor > 1 else ""
    return layer + (f"{run.context} ranks per row, " if run.context > 1 else "")


def _speed(per_s: float, digits: int = 1) -> str:
    """A speed, with three significant digits if it is low, as with long pairs."""
    return f"{per_s:,.{digits}f}" if per_s >= 100 else f"{per_s:.3g}"


def _duration(seconds: float) -> str:
    for name, length in (("hours", 3600), ("minutes", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {name}"
    return f"{seconds:.1f} seconds"


def _lines(console: Console, head: str, lines: dict[str, str]) -> None:
    console.print(Text(f"\n{head}", "bold"))
    for name, value in lines.items():
        console.print(Text.assemble("  ", (f"{name:<18}", "dim"), value))
