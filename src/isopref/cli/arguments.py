"""Arguments that several commands take, and how a command starts on several processes."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from isopref.cli.launch import launch, torchrun
from isopref.config.section import path_must
from isopref.engine.quiet import quiet_engine
from isopref.errors import ConfigError

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="Config file (YAML).", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="SECTION.FIELD=VALUE",
        help="Values to use instead of the file's, written as in YAML. For one field, the last one wins.",
        show_default=False,
    ),
]
NumProcesses = Annotated[
    int,
    typer.Option("--nproc", min=1, metavar="N", help="Processes to start on this machine, usually one for each GPU."),
]


def check_path(option: str, path: str | None) -> None:
    """Raise ConfigError for the value of an option that cannot be a path."""
    must = None if path is None else path_must(path)
    if must is not None:
        raise ConfigError(f"{option}: must be {must}; found {path!r}.")


def start_processes(nproc: int, arguments: Sequence[str]) -> None:
    """Run this very command in so many processes and end with their exit code; for one process, go on here."""
    if nproc > 1:
        if "RANK" in os.environ:
            raise ConfigError(f"--nproc {nproc}: torchrun has started this process already. Leave --nproc out.")
        raise typer.Exit(launch(torchrun(nproc, "isopref.cli.main", arguments)))
    quiet_engine()
