"""How `isopref data` shows a report: tables, and examples in colour, or with markers where there is no colour."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from isopref.build.data import left_out_note
from isopref.cli.plan import show_reaches
from isopref.engine.display import visible
from isopref.errors import shorter_pairs

if TYPE_CHECKING:
    from isopref.build.data import SourceUse
    from isopref.build.inspect import Report
    from isopref.data.statistics import ExampleSize, ExampleText, TableFigures
    from isopref.data.table_stats import SourceStats

PAIR_STYLES = {"prompt": "cyan", "chosen": "green", "rejected": "red"}
STYLES = PAIR_STYLES | {"good": "green", "bad": "red"}
CONTEXT_STYLE = "dim italic"
OTHER_STYLES = ("green", "yellow", "magenta", "blue")  # of the answers of a list, in turn
PARTS = {"sequence": "longest sequence", "example": "all, prompt once", "good": "good answer", "bad": "bad answer"}
# Why a record was dropped, where the word alone does not say it.
REASONS = {
    "lists": {
        "tie": "all scores equal, or closer than data.min_gap",
        "single": "fewer than two different answers with a score",
    },
    "labels": {"label": "not a label"},
}
MOST_COMPARISONS = 12  # of an example, that are written out
MANY_SHARED = 0.1  # of the examples: a prompt in common is worth a note


def to_json(report: Report) -> str:
    """The report as JSON."""
    return json.dumps(asdict(report), indent=2, ensure_ascii=False)


def show(report: Report, console: Console) -> None:
    """The report for people."""
    for source in report.sources:
        _show_source(source, console)
    if report.num_left_out:
        console.print(f"\nnote: {left_out_note(report.num_left_out, report.train.unit)}", markup=False)
    for name, figures in (("to train on", report.train), ("held out", report.held_out)):
        if figures is not None:
            _show_figures(name, figures, console)
            _show_over_context(figures, report.context_length, console)
    if report.reaches is not None:
        console.print(Text(f"\non {report.card}", "bold"))
        show_reaches(report.reaches, report.train.unit, console)
    _show_samples(report.samples, report.train.unit, console)


def _show_source(source: SourceUse, console: Console) -> None:
    found = source.found
    lines = {
        "found": f"{found.format}, shape {found.shape}",
        "taken to be the prompt": source.prompt_from,
        "columns not used": ", ".join(found.unused_columns) or "none",
        "records read": str(found.read),
        "dropped": ", ".join(_dropped(found)) or "0",
        **({"joined to an earlier record's prompt": str(found.grouped)} if found.grouped else {}),
        "kept": f"{found.kept} prompts" if found.grouped else str(found.kept),
        **(_left_out(found) if found.holds == "lists" else {}),
        "  cut to data.max_length": str(found.truncated),
        "  prompt ends inside a token of the answer": str(found.boundary_backoffs),
        "  generation prompt not before the answer": str(found.generation_prompt_backoffs),
        "  two BOS tokens": str(found.double_bos),
        "  end token added, the template has none": str(found.added_ends),
        "  no end token, the template has plain text": str(found.missing_eos),
        "in the mix": str(source.mixed),
        "  trained on": str(source.train),
        "  held out": str(source.held_out),
    }
    console.print(Text.assemble("\n", (f"{source.field}  {source.path}", "bold")))
    for name, value in lines.items():
        console.print(Text.assemble("  ", (f"{name:<44}", "dim"), value))


def _dropped(found: SourceStats) -> list[str]:
    why = REASONS.get(found.holds, {})
    return [
        f"{count} {reason}" + (f" ({why[reason]})" if reason in why else "") for reason, count in found.dropped.items()
    ]


def _left_out(found: SourceStats) -> dict[str, str]:
    return {
        "  answers without a score, left out": str(found.unscored_answers),
        "  answers that repeat another, left out": str(found.repeated_answers),
    }


def _show_figures(name: str, figures: TableFigures, console: Console) -> None:
    console.print(Text(f"\n{figures.examples} {figures.unit}s {name}: {', '.join(_counts(figures))}", "bold"))
    for line in _remarks(figures):
        console.print(f"  {line}", markup=False)
    table = Table("tokens", box=box.SIMPLE_HEAD, pad_edge=False)
    heads = [{0: "least", 50: "median", 100: "most"}.get(at, f"{at}%") for at in figures.lengths["prompt"].percentiles]
    for head in ("mean", *heads):
        table.add_column(head, justify="right")
    for part, lengths in figures.lengths.items():
        table.add_row(
            PARTS.get(part, part), f"{lengths.mean:.1f}", *(str(value) for value in lengths.percentiles.values())
        )
    console.print(table)
    saved = 1 - figures.tokens_shared / figures.tokens
    console.print(
        f"  prompt sharing computes {figures.tokens_shared:,} tokens in place of {figures.tokens:,}: {saved:.0%} less"
    )
    if figures.with_context:
        console.print(
            f"  {figures.with_context:,} of {figures.answers:,} answers hold context: {figures.trained_tokens:,} of "
            f"{figures.answer_tokens:,} answer tokens are trained"
        )
    console.print(f"  the {len(figures.longest)} longest:")
    for size in figures.longest:
        console.print(f"    {_size(size)}", markup=False)


def _counts(figures: TableFigures) -> Iterator[str]:
    labels = figures.good + figures.bad
    if figures.unit != "pair" and labels < figures.answers:
        yield f"{figures.answers} answers"
        yield f"{figures.comparisons} comparisons"
    elif figures.unit == "prompt":
        yield f"{figures.answers} answers"
    if labels:
        yield f"{figures.good} good"
        yield f"{figures.bad} bad"
    if figures.unit != "prompt" or figures.prompts < figures.examples:
        yield f"{figures.prompts} different prompts"
    yield f"{figures.repeated} repeated {_judgements(figures)}"


def _remarks(figures: TableFigures) -> Iterator[str]:
    least, mean, most = figures.answers_per_prompt
    if figures.unit != "pair":
        yield f"answers per prompt: {least} to {most}, {mean:.1f} on average"
    if figures.contradicted:
        yield (
            f"warning: {figures.contradicted} {_judgements(figures)} contradict another one: the same "
            + ("answer is good and bad" if figures.good + figures.bad else "two answers, the other way round")
        )
    shared = figures.examples - figures.prompts
    if figures.unit in ("pair", "answer") and shared > MANY_SHARED * figures.examples:
        yield (
            f"{shared} {figures.unit}s have the prompt of an earlier one; data.group_by_prompt: true would compute "
            "each prompt once"
        )


def _judgements(figures: TableFigures) -> str:
    """What is repeated or contradicted."""
    if figures.unit == "prompt":
        return "comparisons" if figures.comparisons else "answers"
    return f"{figures.unit}s"


def _show_over_context(figures: TableFigures, context: int | None, console: Console) -> None:
    over = figures.over_context
    if over is None:
        return
    unit, longest = figures.unit, over.longest
    examples = f"1 {unit} is" if over.examples == 1 else f"{over.examples} {unit}s are"
    tokens = longest.prompt + max(longest.answers.values())
    console.print(
        f"  warning: {examples} longer than the model's context length, {context} tokens; the longest, "
        f"{visible(longest.origin)}, has {tokens} in prompt and longest answer. isopref train refuses that. "
        f"{shorter_pairs(context)}",
        style="bold red",
        markup=False,
    )


def _size(size: ExampleSize) -> str:
    total = size.prompt + sum(size.answers.values())
    parts = ", ".join(f"{name} {count}" for name, count in size.answers.items())
    if not size.answers.keys() <= STYLES.keys():
        parts = f"answers {', '.join(map(str, size.answers.values()))}"
    return f"{visible(size.origin)}: {total} tokens (prompt {size.prompt}, {parts})"


def _with_context(said: str, context: list[tuple[int, int]], style: str, *, coloured: bool) -> Text:
    """An answer, in which context is dim; or in braces where there is no colour."""
    text, end = Text(), 0
    for start, stop in context:
        text.append(visible(said[end:start]), style)
        read = visible(said[start:stop])
        text.append(read if coloured else f"{{{{context: {read}}}}}", CONTEXT_STYLE)
        end = stop
    return text.append(visible(said[end:]), style)


def _show_samples(samples: list[ExampleText], unit: str, console: Console) -> None:
    coloured = console.color_system is not None and not console.no_color
    pairs_alone = all(sample.answers.keys() <= PAIR_STYLES.keys() for sample in samples)
    what = f"{unit} as the model sees it" if len(samples) == 1 else f"{unit}s as the model sees them"
    console.print(Text(f"\n{len(samples)} {what}", "bold"), end="")
    if coloured and pairs_alone:
        console.print(Text.assemble(": ", *((f"{part} ", style) for part, style in PAIR_STYLES.items())), end="")
    console.print()
    for sample in samples:
        console.print(Text(f"\n{_size(sample.size)}", "dim"))
        parts = {"prompt": sample.prompt, **sample.answers}
        for number, (part, said) in enumerate(parts.items()):
            marker = "" if coloured and part in PAIR_STYLES else f"[[{part}]]"
            text = _with_context(said, sample.context.get(part, []), _style(part, number), coloured=coloured)
            console.print(Text.assemble(marker, text), end="" if part == "prompt" else "\n")
        if not sample.answers.keys() <= STYLES.keys() and sample.comparisons:
            console.print(Text(_comparisons(sample.comparisons), "dim"))


def _style(part: str, number: int) -> str:
    """Of a part of an example: by what is known of it, else by its number."""
    return STYLES.get(part.rpartition(", ")[-1], OTHER_STYLES[(number - 1) % len(OTHER_STYLES)])


def _comparisons(every: list[tuple[int, int]]) -> str:
    told = ", ".join(f"{better} over {worse}" for better, worse in every[:MOST_COMPARISONS])
    more = len(every) - MOST_COMPARISONS
    return f"compared: answer {told}{f' and {more} more' if more > 0 else ''}"
