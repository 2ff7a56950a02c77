"""`isopref report`, `ls` and `compare`, based on what runs wrote to their folders. None imports torch."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from isopref.cli.arguments import in_home
from isopref.engine.display import visible
from isopref.errors import RunError, UserError
from isopref.places import write_whole
from isopref.report.compare import compute_dtype, final_figures, last_window, math_that_differs, parting
from isopref.report.elements import number
from isopref.report.figures import entries, shown
from isopref.report.html import page
from isopref.report.markdown import markdown
from isopref.runs.files import REPORT_FILE
from isopref.runs.folder import find_runs
from isopref.runs.read import RunRecord, read_run

ANY_WIDTH = 10_000
NUMBERS = ("step", "loss", "accuracy", "held-out\naccuracy")  # right-aligned columns of `isopref ls`
# What a narrow terminal omits, in this order: some columns, the middle of names, then more columns.
SPARE, LAST = ("started", "accuracy"), ("loss", "held-out\naccuracy", "step")
LEAST_NAME = 24  # characters of a name that are always shown


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Run folders.", show_default=False)],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            callback=in_home,
            help=f"Output file. Default: {REPORT_FILE} in the run folder, for a single run.",
        ),
    ] = None,
    as_markdown: Annotated[
        bool,
        typer.Option(
            "--markdown", help="Write Markdown instead, for a pull request; to the terminal unless --out is given."
        ),
    ] = False,
) -> None:
    """Write an HTML report of one or more runs.

    A single self-contained file with curves, held-out metrics, answers and the config; several runs are overlaid. Works
    while a run is still in progress.

    \b
    Examples:
      isopref report runs/my-1a2b3c4d5e6f
      isopref report runs/a runs/b --out both.html
      isopref report runs/a --markdown
    """
    records = [read_run(folder) for folder in runs]
    if as_markdown and out is None:
        sys.stdout.write(markdown(records))
        return
    if out is None and len(runs) > 1:
        raise RunError("isopref report: several runs need an output file. Try: --out FILE")
    path = out or runs[0] / REPORT_FILE
    text = markdown(records) if as_markdown else page(records)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text.encode())
    except OSError as error:
        raise RunError(f"--out: {path} cannot be written ({error}). Choose another location.") from error
    print(f"Wrote {path}.")


def list_runs(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where to look for runs.")] = Path("runs"),
) -> None:
    """List the runs in a folder: state, steps, loss, accuracy.

    \b
    Examples:
      isopref ls
      isopref ls experiments
    """
    if not folder.is_dir():
        raise RunError(f"{folder}: no such folder. Pass a folder that contains runs: isopref ls FOLDER")
    found = list(find_runs(folder))
    if not found:
        print(f"No runs in {folder}.")
        return
    rows = []
    for place in found:
        try:
            run = read_run(place)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            continue
        rows.append({"run": visible(str(place)), **_cells(run)})
    if rows:
        _show_runs(rows)


def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="Run folder.", show_default=False)],
    b: Annotated[Path, typer.Argument(metavar="B", help="Run folder.", show_default=False)],
) -> None:
    """Compare two runs: same math, or where they diverge.

    Prints the config fields and data that differ, the step at which the losses diverge, and each run's final metrics.

    \b
    Example:
      isopref compare runs/one-gpu runs/eight-gpus
    """
    runs = [read_run(a), read_run(b)]
    labels = [entry.label for entry in entries(runs)]
    differing = math_that_differs(runs)
    if differing:
        print(f"Different math, in {len(differing)} {'place' if len(differing) == 1 else 'places'}:")
        _show(("", *labels), [[row.name, *map(shown, row.values)] for row in differing])
    else:
        print("Same math: model, data, objective and optimizer match, so the runs may differ only by rounding.")
        if not all(run.starts for run in runs):
            print("(Based on the configs alone: a run from an older version did not record its pairs and reference.)")
    print(_parting_text(runs))
    ends = [final_figures(run) for run in runs]
    rows = [
        [name, *(number(end[name]) for end in ends)] for name in ends[0] if any(end[name] is not None for end in ends)
    ]
    _show(("at the end", *labels), [["state", *(run.status for run in runs)], *rows], right=labels)
    windows = [last_window(run) for run in runs]
    if all(windows) and windows[0] != windows[1]:
        print(f"Training metrics are means since the last line (run.log_every): {windows[0]} and {windows[1]} steps.")


def _cells(run: RunRecord) -> dict[str, str]:
    ends, state = final_figures(run), run.state
    return {
        "state": "unknown" if state is None else state.outcome,
        "step": str(run.last_step) if state is None else f"{max(run.last_step, state.step)}/{state.steps}",
        "loss": number(ends["training loss"]),
        "accuracy": number(ends["training accuracy"]),
        "held-out\naccuracy": number(ends["held-out preference accuracy"]),
        "started": str(run.starts[0]["time"])[:16].replace("T", " ") if run.starts else "-",
    }


def _show_runs(rows: list[dict[str, str]]) -> None:
    """One line per run: complete in a file or pipe, as much as fits on a terminal."""
    columns, console = list(rows[0]), _console()
    longest = max(len(row["run"]) for row in rows)

    def table() -> Table:
        return _table(columns, [[row[name] for name in columns] for row in rows], right=NUMBERS)

    def width() -> int:
        return console.measure(table(), options=console.options.update(width=ANY_WIDTH)).maximum

    for names, cut in ((SPARE, 0), (LAST, max(0, longest - LEAST_NAME))):
        for name in names:
            if console.is_terminal and width() - cut > console.width:
                columns.remove(name)
    size = max(LEAST_NAME, longest + console.width - width())
    told = [name.replace("\n", " ") for name in rows[0] if name not in columns]
    notes = [f"Not shown in {console.width} columns: {', '.join(told)}."] if told else []
    if console.is_terminal and size < longest:
        rows = [{**row, "run": _shortened(row["run"], size)} for row in rows]
        notes.append("To see full names: isopref ls | cat")
    Console(highlight=False, width=max(width(), console.width)).print(table())
    for note in notes:
        print(note)


def _shortened(name: str, size: int) -> str:
    """A name shortened in the middle to at most `size` characters."""
    end = size // 2
    return name if len(name) <= size else f"{name[: size - end - 1]}…{name[-end:]}"


def _parting_text(runs: list[RunRecord]) -> str:
    found = parting(runs[0], runs[1])
    if found is None:
        return "The two runs have no logged step in common, so their curves cannot be compared."
    kinds = " and ".join(dict.fromkeys(compute_dtype(run) for run in runs))
    rounding = f"rounding in {kinds} ({found.tolerance:g})"
    largest = f"The largest difference at the {found.num_steps} steps that both logged is {found.largest:.1e}."
    if found.step is None or found.losses is None:
        return f"The losses agree up to {rounding}. {largest}"
    first, second = (f"{loss:.6g}" for loss in found.losses)
    return f"The losses diverge at step {found.step}: {first} and {second}, further apart than {rounding}. {largest}"


def _show(columns: Sequence[str], rows: list[list[str]], right: Sequence[str] = ()) -> None:
    _console().print(_table(columns, rows, right))


def _table(columns: Sequence[str], rows: list[list[str]], right: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(Text(visible(column)), justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(visible(cell)) for cell in row))
    return table


def _console() -> Console:
    console = Console(highlight=False)
    if not console.is_terminal:  # files and pipes take lines of any length
        console = Console(highlight=False, width=max(console.width, 200))
    return console
