"""How `isopref data` shows a report: tables, and examples in colour, or with markers where there is no colour."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from isopref.build.data import left_out_note, source_notes
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
UNITS = {"pairs": "pairs", "lists": "lists", "labels": "answers"}
PARTS = {
    "sequence": "prompt + longest answer",  # what data.max_length and the context length limit
    "example": "prompt + all answers",
    "good": "good answer",
    "bad": "bad answer",
}
COLUMNS = {50: "median", 90: "90%", 99: "99%", 100: "max"}  # the percentiles that are printed; JSON has more
MOST_LONGEST = 3  # of the longest examples, how many are named
MOST_TEXT, TEXT_END = 1200, 400  # characters of a text that are printed, and how many of these come from its end
# Why a record was dropped, if the word alone does not say it.
REASONS = {
    "lists": {
        "tie": "all scores equal, or closer than data.min_gap",
        "single": "fewer than two different answers with a score",
    },
    "labels": {"label": "not a label"},
}
MOST_COMPARISONS = 12  # comparisons of an example that are printed
MANY_SHARED = 0.1  # share of examples that repeat a prompt, above which a note recommends data.group_by_prompt


def to_json(report: Report) -> str:
    """The report as JSON."""
    return json.dumps(asdict(report), indent=2, ensure_ascii=False)


def show(report: Report, console: Console) -> None:
    """The report for people. What needs attention comes last, where a terminal shows it."""
    for source in report.sources:
        _show_source(source, console)
    if report.num_left_out:
        console.print(f"\nnote: {left_out_note(report.num_left_out, report.train.unit)}", markup=False)
    _show_figures("to train on", report.train, console)
    _show_lengths(report.train, console)
    _show_over_context(report.train, report.context_length, console)
    if report.held_out is not None:
        _show_figures("held out", report.held_out, console)
        _show_over_context(report.held_out, report.context_length, console)
    if report.reaches is not None:
        console.print(Text(f"\non {report.card}", "bold"))
        show_reaches(report.reaches, report.train.unit, console)
    _show_samples(report.samples, report.train.unit, console)
    if report.warnings:
        console.print()
    for warning in report.warnings:
        console.print(f"warning: {warning}", markup=False)


def _show_source(source: SourceUse, console: Console) -> None:
    """One source: what was found and used. Counts of what did not happen are left out."""
    found = source.found
    lines = {
        "format": f"{found.format}, shape {found.shape}",
        "prompt": source.prompt_from,
        "records": "; ".join([f"{found.read} read", *_dropped(found)]),
        "prompts" if found.grouped else UNITS[found.holds]: ", ".join(_uses(source)),
    }
    console.print(Text.assemble("\n", (f"{source.field}  {source.path}", "bold")))
    for name, value in lines.items():
        console.print(Text.assemble("  ", (f"{name:<9}", "dim"), value))
    for note in (*source_notes(found), *_left_out(found)):
        console.print(Text(f"  {note}"))


def _uses(source: SourceUse) -> Iterator[str]:
    """How many examples of a source were kept and where they go, each count once."""
    kept = source.found.kept
    if kept not in (source.train, source.held_out):
        yield f"{kept} kept"
    if source.mixed < kept:
        yield f"{source.mixed} in the mix"
    if source.train:
        yield f"{source.train} to train on"
    if source.held_out:
        yield f"{source.held_out} held out"


def _dropped(found: SourceStats) -> Iterator[str]:
    """What was dropped and why, if anything was."""
    why = REASONS.get(found.holds, {})
    reasons = [
        f"{count} {reason}" + (f" ({why[reason]})" if reason in why else "") for reason, count in found.dropped.items()
    ]
    if reasons:
        yield f"dropped: {', '.join(reasons)}"


def _left_out(found: SourceStats) -> Iterator[str]:
    if found.unscored_answers:
        yield f"answers without a score, left out: {found.unscored_answers}"
    if found.repeated_answers:
        yield f"answers that repeat another, left out: {found.repeated_answers}"


def _show_figures(name: str, figures: TableFigures, console: Console) -> None:
    unit = _plural(figures.examples, figures.unit)
    console.print(Text(f"\n{', '.join([f'{unit} {name}', *_counts(figures)])}", "bold"))
    for line in _remarks(figures):
        console.print(f"  {line}", markup=False)


def _show_lengths(figures: TableFigures, console: Console) -> None:
    table = Table("tokens", box=box.SIMPLE_HEAD, pad_edge=False)
    for head in ("mean", *COLUMNS.values()):
        table.add_column(head, justify="right")
    for part, lengths in figures.lengths.items():
        cells = (f"{lengths.percentiles[at]:,}" for at in COLUMNS)
        table.add_row(PARTS.get(part, part), f"{lengths.mean:,.1f}", *cells)
    console.print(table)
    longest = (f"{size.origin} ({size.prompt + sum(size.answers.values()):,} tokens)" for size in figures.longest)
    console.print(f"  longest: {visible(', '.join(islice(longest, MOST_LONGEST)))}", markup=False)
    if figures.tokens_shared < figures.tokens:
        saved = 1 - figures.tokens_shared / figures.tokens
        told = f"{figures.tokens_shared:,} tokens instead of {figures.tokens:,}"
        console.print(f"  shared prompts are computed once: {told} ({saved:.0%} fewer)")
    if figures.with_context:
        console.print(
            f"  {figures.with_context:,} of {figures.answers:,} answers contain context: {figures.trained_tokens:,} of "
            f"{figures.answer_tokens:,} answer tokens are trained"
        )


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
    if figures.prompts < figures.examples:
        yield _plural(figures.prompts, "different prompt")
    if figures.repeated:
        yield f"{figures.repeated} repeated {_judgements(figures)}"


def _remarks(figures: TableFigures) -> Iterator[str]:
    least, mean, most = figures.answers_per_prompt
    if figures.unit != "pair":
        spread = f"{least}" if least == most else f"{least} to {most}, {mean:.1f} on average"
        yield f"answers per prompt: {spread}"
    if figures.contradicted:
        yield (
            f"warning: {figures.contradicted} {_judgements(figures)} contradict another one: the same "
            + ("answer is good and bad" if figures.good + figures.bad else "two answers in the opposite order")
        )
    if figures.unit in ("pair", "answer") and figures.joinable > MANY_SHARED * figures.examples:
        yield (
            f"{_plural(figures.joinable, figures.unit)} repeat an earlier prompt; data.group_by_prompt: true computes "
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
    examples = f"{_plural(over.examples, unit)} {'is' if over.examples == 1 else 'are'}"
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


def _with_weights(said: str, weights: list[tuple[int, int, float]], style: str, *, coloured: bool) -> Text:
    """An answer with its context dimmed, or in braces if there is no colour; and other weights in braces."""
    text, end = Text(), 0
    for start, stop, weight in weights:
        text.append(_abridged(said[end:start]), style)
        part = _abridged(said[start:stop])
        if weight:
            text.append(f"{{{{weight {weight:g}: {part}}}}}", style)
        else:
            text.append(part if coloured else f"{{{{context: {part}}}}}", CONTEXT_STYLE)
        end = stop
    return text.append(_abridged(said[end:]), style)


def _abridged(text: str) -> str:
    """A text without its middle if it is long: mistakes of a template are at the ends. JSON has all of it."""
    if len(text) > MOST_TEXT:
        begin = text[: MOST_TEXT - TEXT_END]
        text = f"{begin}\n[... {len(text) - MOST_TEXT:,} characters ...]\n{text[-TEXT_END:]}"
    return visible(text)


def _plural(count: int, unit: str) -> str:
    """A count with its unit."""
    return f"{count:,} {unit}" if count == 1 else f"{count:,} {unit}s"


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
            text = _with_weights(said, sample.weights.get(part, []), _style(part, number), coloured=coloured)
            console.print(Text.assemble(marker, text), end="" if part == "prompt" else "\n")
        if not sample.answers.keys() <= STYLES.keys() and sample.comparisons:
            console.print(Text(_comparisons(sample.comparisons), "dim"))


def _style(part: str, number: int) -> str:
    """The style of a part of an example: by its name (chosen, bad, ...), else by its number."""
    return STYLES.get(part.rpartition(", ")[-1], OTHER_STYLES[(number - 1) % len(OTHER_STYLES)])


def _comparisons(every: list[tuple[int, int]]) -> str:
    told = ", ".join(f"{better} over {worse}" for better, worse in every[:MOST_COMPARISONS])
    more = len(every) - MOST_COMPARISONS
    return f"compared: answer {told}{f' and {more} more' if more > 0 else ''}"
