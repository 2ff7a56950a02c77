"""How `isopref data` shows a report: tables, and pairs in colour, or with markers where there is no colour."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from isopref.build.data import left_out_note
from isopref.engine.display import visible
from isopref.errors import shorter_pairs

if TYPE_CHECKING:
    from isopref.build.data import SourceUse
    from isopref.build.inspect import Report
    from isopref.data.statistics import OverContext, PairSize, PairText, TableFigures

STYLES = {"prompt": "cyan", "chosen": "green", "rejected": "red"}
PARTS = {
    "prompt": "prompt",
    "chosen": "chosen",
    "rejected": "rejected",
    "sequence": "longer sequence",
    "pair": "pair, prompt once",
}


def to_json(report: Report) -> str:
    """The report as JSON."""
    return json.dumps(asdict(report), indent=2, ensure_ascii=False)


def show(report: Report, console: Console) -> None:
    """The report for people."""
    for source in report.sources:
        _show_source(source, console)
    if report.num_left_out:
        console.print(f"\nnote: {left_out_note(report.num_left_out)}", markup=False)
    for name, figures in (("to train on", report.train), ("held out", report.held_out)):
        if figures is not None:
            _show_figures(name, figures, console)
            _show_over_context(figures.over_context, report.context_length, console)
    _show_samples(report.samples, console)


def _show_source(source: SourceUse, console: Console) -> None:
    found = source.found
    dropped = ", ".join(f"{count} {reason}" for reason, count in found.dropped.items())
    lines = {
        "found": f"{found.format}, shape {found.shape}",
        "taken to be the prompt": source.prompt_from,
        "columns not used": ", ".join(found.unused_columns) or "none",
        "records read": str(found.read),
        "dropped": dropped or "0",
        "pairs kept": str(found.kept),
        "  cut to data.max_length": str(found.truncated),
        "  prompt ends inside a token of the answer": str(found.boundary_backoffs),
        "  generation prompt not before the answer": str(found.generation_prompt_backoffs),
        "  two BOS tokens": str(found.double_bos),
        "  end token added, the template has none": str(found.added_ends),
        "  no end token, the template has plain text": str(found.missing_eos),
        "pairs in the mix": str(source.mixed),
        "  trained on": str(source.train),
        "  held out": str(source.held_out),
    }
    console.print(Text.assemble("\n", (f"{source.field}  {source.path}", "bold")))
    for name, value in lines.items():
        console.print(Text.assemble("  ", (f"{name:<44}", "dim"), value))


def _show_figures(name: str, figures: TableFigures, console: Console) -> None:
    different = f"{figures.prompts} different prompts, {figures.repeated} repeated pairs"
    console.print(Text(f"\n{figures.pairs} pairs {name}: {different}", "bold"))
    table = Table("tokens", box=box.SIMPLE_HEAD, pad_edge=False)
    heads = [{0: "least", 50: "median", 100: "most"}.get(at, f"{at}%") for at in figures.lengths["pair"].percentiles]
    for head in ("mean", *heads):
        table.add_column(head, justify="right")
    for part, lengths in figures.lengths.items():
        table.add_row(PARTS[part], f"{lengths.mean:.1f}", *(str(value) for value in lengths.percentiles.values()))
    console.print(table)
    saved = 1 - figures.tokens_shared / figures.tokens
    console.print(
        f"  prompt sharing computes {figures.tokens_shared:,} tokens in place of {figures.tokens:,}: {saved:.0%} less"
    )
    console.print(f"  the {len(figures.longest)} longest:")
    for size in figures.longest:
        console.print(f"    {_size(size)}", markup=False)


def _show_over_context(over: OverContext | None, context: int | None, console: Console) -> None:
    if over is None:
        return
    longest, pairs = over.longest, "1 pair is" if over.pairs == 1 else f"{over.pairs} pairs are"
    tokens = longest.prompt + max(longest.chosen, longest.rejected)
    console.print(
        f"  warning: {pairs} longer than the model's context length, {context} tokens; the longest, "
        f"{visible(longest.origin)}, has {tokens} in prompt and longer answer. isopref train refuses that. "
        f"{shorter_pairs(context)}",
        style="bold red",
        markup=False,
    )


def _size(size: PairSize) -> str:
    total = size.prompt + size.chosen + size.rejected
    parts = f"prompt {size.prompt}, chosen {size.chosen}, rejected {size.rejected}"
    return f"{visible(size.origin)}: {total} tokens ({parts})"


def _show_samples(samples: list[PairText], console: Console) -> None:
    coloured = console.color_system is not None and not console.no_color
    console.print(Text(f"\n{len(samples)} pairs as the model sees them", "bold"), end="")
    if coloured:
        console.print(Text.assemble(": ", *((f"{part} ", style) for part, style in STYLES.items())), end="")
    console.print()
    for sample in samples:
        console.print(Text(f"\n{_size(sample.size)}", "dim"))
        for part, style in STYLES.items():
            marker = "" if coloured else f"[[{part}]]"
            text = Text.assemble(marker, (visible(getattr(sample, part)), style))
            console.print(text, end="" if part == "prompt" else "\n")
