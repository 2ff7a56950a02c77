"""What a run shows on the terminal. Ranks other than 0 show nothing."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

Advance = Callable[[int, str], None]


class Display:
    """A console for people: bars that move on a terminal, plain lines elsewhere."""

    def __init__(self, *, quiet: bool = False):
        self.console = Console(quiet=quiet, highlight=False, soft_wrap=True)

    def say(self, text: str) -> None:
        self.console.print(text, markup=False)

    @contextmanager
    def bar(self, what: str, total: int | None) -> Iterator[Advance]:
        """A progress bar. The function it gives takes how much was done and a line to show beside the bar."""
        if not self.console.is_terminal:
            yield lambda count, note: None
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("<"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
        )
        with Progress(*columns, console=self.console, transient=False) as progress:
            task = progress.add_task(what, total=total, note="")
            yield lambda count, note: progress.update(task, advance=count, note=note)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        table = Table(
            title=title,
            title_justify="left",
            title_style="bold",
            show_lines=len(columns) > 1 and len(rows) < 8,
        )
        for number, column in enumerate(columns):
            table.add_column(column, overflow="fold", ratio=2 if number else 1)
        for row in rows:
            table.add_row(*row)
        self.console.print(table)


def brief(metrics: Mapping[str, float]) -> str:
    """The figures of a log step that fit on one line."""
    shown = (
        ("loss", "train/loss", ".4f"),
        ("accuracy", "train/accuracy", ".2f"),
        ("margin", "train/margin", ".2f"),
    )
    parts = [f"{label} {metrics[name]:{spec}}" for label, name, spec in shown if name in metrics]
    if "speed/pairs_per_s" in metrics:
        parts.append(f"{metrics['speed/pairs_per_s']:.2f} pairs/s")
    return "  ".join(parts)
