"""What a run shows on the terminal. Ranks other than 0 show nothing."""

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
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tab and line feed: they would move the cursor


class _Console(Console):
    """One that falls silent when nobody reads any more, as after `| head`: the run goes on."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Display:
    """A console for people: bars that move on a terminal, plain lines elsewhere."""

    def __init__(self, *, quiet: bool = False):
        self.console: Console = _Console(quiet=quiet, highlight=False, soft_wrap=True)
        self._progress: Progress | None = None  # of the outermost bar

    def say(self, text: str) -> None:
        self.console.print(text, markup=False)

    @contextmanager
    def bar(self, what: str, total: int | None, *, lines: bool = True, below: bool = False) -> Iterator[Advance]:
        """A progress bar. The function it gives takes how much was done and a note to show beside the bar, or `below`.

        Without a terminal, long work says a line now and then, unless `lines` is off. A bar inside another one stands
        below it and goes when it is done: a terminal shows one display at a time.
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
        # What is too long is cut from the note, never from the counts and times: 44 columns, and the bar.
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
        under = Text(no_wrap=False, overflow="fold")  # the console itself wraps nothing

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
        """Cells are text from models and files: nothing in them is markup."""
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
    """Progress where there is no terminal."""

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
    """Text in which control characters, which a terminal would obey, are written out as escapes."""
    return CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def brief(metrics: Mapping[str, float], unit: str = "pair") -> str:
    """The figures of a log step that fit on one line; `unit` is what an example is called."""
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
