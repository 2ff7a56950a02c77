"""Terminal output of a run. Ranks other than 0 print nothing."""

import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column, Table
from rich.text import Text

Advance = Callable[[int, str], None]
LINE_EVERY_S = 30
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all except tab and line feed: they would move the cursor


class _Console(Console):
    """A console that goes silent if its reader is gone, as with `| head`, while the run continues."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Display:
    """Output for people: progress bars on a terminal, plain lines elsewhere."""

    def __init__(self, *, quiet: bool = False):
        self.console: Console = _Console(quiet=quiet, highlight=False, soft_wrap=True)
        self._progress: Progress | None = None  # of the outermost bar

    def say(self, text: str) -> None:
        self.console.print(text, markup=False)

    @contextmanager
    def bar(self, what: str, total: int | None, *, lines: bool = True, below: bool = False) -> Iterator[Advance]:
        """A progress bar. Yields a function that takes the progress and a note to show next to the bar, or `below` it.

        Without a terminal, long work prints a line now and then, unless `lines` is off. A nested bar appears below the
        outer one and disappears when done: a terminal supports one live display at a time.
        """
        if not self.console.is_terminal:
            yield _Lines(self, what, total).advance if lines else lambda count, note: None
            return
        if self._progress is not None:
            outer = self._progress
            inner = outer.add_task(what, total=total, note="")
            yield lambda count, note: outer.update(inner, advance=count, note=note)
            outer.remove_task(inner)
            return
        bar_width = 28 if self.console.width >= 120 else 10
        # If space is short, truncate the note, never the counts and times: 44 columns, plus the bar.
        note = Column(no_wrap=True, overflow="ellipsis", max_width=max(8, self.console.width - bar_width - 44))
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=bar_width),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("<"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}", table_column=note),
        )
        progress = Progress(*columns, console=self.console)
        task = progress.add_task(what, total=total, note="")
        under = Text(no_wrap=False, overflow="fold")  # the console itself does not wrap

        def advance(count: int, note: str) -> None:
            if below:
                under.plain = f"      {note}"
            progress.update(task, advance=count, note="" if below else note)

        self._progress = progress
        try:
            with Live(Group(progress, under) if below else progress, console=self.console, refresh_per_second=10):
                yield advance
        finally:
            self._progress = None

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table. Cells are text from models and files, so markup in them is not interpreted."""
        table = Table(
            title=Text(title),
            title_justify="left",
            title_style="bold",
            show_lines=len(columns) > 1 and len(rows) < 8,
        )
        for number, column in enumerate(columns):
            table.add_column(Text(column), overflow="fold", ratio=2 if number else 1)
        for row in rows:
            table.add_row(*(Text(visible(cell)) for cell in row))
        self.console.print(table)


class _Lines:
    """Progress without a terminal."""

    def __init__(self, display: Display, what: str, total: int | None):
        self.display, self.what, self.total = display, what, total
        self.done = 0
        self.started = self.said = time.monotonic()

    def advance(self, count: int, note: str) -> None:
        self.done += count
        now = time.monotonic()
        if now - self.said >= LINE_EVERY_S:
            self.said = now
            left = ""
            if self.total and 0 < self.done <= self.total:
                seconds = int((now - self.started) / self.done * (self.total - self.done))
                left = f"  {seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02} left"
            self.display.say(f"{self.what}  {self.done}{f'/{self.total}' if self.total else ''}  {note}{left}")


def visible(text: str) -> str:
    """Text with control characters escaped, so the terminal does not interpret them."""
    return CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def brief(metrics: Mapping[str, float], unit: str = "pair") -> str:
    """The metrics of a logged step on one line; `unit` is what to call an example."""
    shown = (
        ("loss", "train/loss", ".4f"),
        ("accuracy", "train/accuracy", ".2f"),
        ("margin", "train/margin", ".2f"),
    )
    parts = [f"{label} {metrics[name]:{spec}}" for label, name, spec in shown if name in metrics]
    if "eval/accuracy" in metrics:
        parts.append(f"held-out accuracy {metrics['eval/accuracy']:.2f} loss {metrics['eval/loss']:.4f}")
    if "speed/pairs_per_s" in metrics:
        parts.append(f"{metrics['speed/pairs_per_s']:.2f} {unit}s/s")
    if "speed/mfu" in metrics:
        parts.append(f"MFU {100 * metrics['speed/mfu']:.0f}%")
    if "speed/peak_memory_gib" in metrics:
        parts.append(f"{metrics['speed/peak_memory_gib']:.1f} GiB")
    return "  ".join(parts)
