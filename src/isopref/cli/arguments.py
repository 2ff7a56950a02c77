"""Arguments shared by several commands, and how a command starts several processes."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from isopref import __version__
from isopref.cli.launch import launch, torchrun
from isopref.config.section import path_must
from isopref.engine.quiet import quiet_engine
from isopref.errors import ConfigError

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="Config file (YAML).", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="SECTION.FIELD=VALUE",
        help="Set or override config fields, in YAML syntax. If a field is given twice, the last one wins.",
        show_default=False,
    ),
]
NumProcesses = Annotated[
    int,
    typer.Option("--nproc", min=1, metavar="N", help="Processes to start on this machine, usually one per GPU."),
]


def check_path(option: str, path: str | None) -> None:
    """Raise ConfigError if the value of an option cannot be a path."""
    must = None if path is None else path_must(path)
    if must is not None:
        raise ConfigError(f"{option}: must be {must}; found {path!r}.")


def in_home(path: Path | None) -> Path | None:
    """A path with ~ expanded: shells leave it alone in --out=~/FILE. Raises ConfigError if there is no such home."""
    try:
        return None if path is None else path.expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{path}: there is no such home folder. Write the path without ~.") from error


def words(options: Mapping[str, object]) -> list[str]:
    """Options as words of a command line. One that is None is left out; one with a tuple of values is repeated."""
    found: list[str] = []
    for name, value in options.items():
        for one in value if isinstance(value, tuple) else (value,):
            if one is not None:
                found += [name, str(one)]
    return found


def start_processes(nproc: int, arguments: Sequence[str]) -> None:
    """Run this command in `nproc` processes and exit with their exit code; with one process, continue here."""
    if nproc > 1:
        if "RANK" in os.environ:
            raise ConfigError(f"--nproc {nproc}: this process was started by torchrun. Remove --nproc.")
        say_opening(f"starting {nproc} processes")
        raise typer.Exit(launch(torchrun(nproc, "isopref.cli.main", arguments)))
    say_opening()
    quiet_engine()


def say_opening(what: str = "loading PyTorch and transformers", *, quiet: bool = False) -> None:
    """Print a command's first line immediately, because its imports take seconds.

    With several processes, only the launcher prints it. Prints nothing if torch is already imported, as it is in the
    stages of `isopref rounds`.
    """
    if "RANK" not in os.environ and not quiet and "torch" not in sys.modules:
        print(f"isopref {__version__}: {what}", flush=True)
