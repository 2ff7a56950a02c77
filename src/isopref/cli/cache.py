"""`isopref cache`: stores of reference log-probabilities, and a check of everything cached.

Only filling a store imports torch.
"""

import sys
import time
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from isopref.cli.arguments import ConfigFile, NumProcesses, Overrides, start_processes
from isopref.config.load import load_config
from isopref.errors import ConfigError
from isopref.places import reference_folder, table_folder
from isopref.reference.store import Store, find_store, stores

FILL = "fill"


class _FillByDefault(TyperGroup):
    """`isopref cache CONFIG` is short for `isopref cache fill CONFIG`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ours = {*self.commands, *ctx.help_option_names}
        is_config = bool(args) and ("." in args[0] or not get_close_matches(args[0], ours))
        return super().parse_args(ctx, [FILL, *args] if is_config else args)


app = typer.Typer(cls=_FillByDefault, no_args_is_help=True, rich_markup_mode=None)


@app.callback(subcommand_metavar="CONFIG | COMMAND [ARGS]...")
def cache() -> None:
    """Precompute reference log-probabilities and manage the cache.

    Reference log-probabilities are cached between runs, keyed by the model's weights and the pairs' tokens. Any later
    run with the same reference hits the cache, whatever its layout, learning rate or folder.

    \b
    Examples:
      isopref cache my.yaml --nproc 8     score what is not cached yet
      isopref cache ls                    list stores
      isopref cache verify                check every byte
      isopref cache rm 3f9a               remove a store
    """


@app.command(FILL)
def fill(config_file: ConfigFile, overrides: Overrides = None, nproc: NumProcesses = 1) -> None:
    """Score a config's pairs with its reference. Short form: isopref cache CONFIG.

    You can stop it at any time; it resumes where it left off.
    """
    config = load_config(config_file, overrides or ())
    start_processes(nproc, ["cache", FILL, str(config_file), *(overrides or ())])
    from isopref.build.cache import fill_cache

    fill_cache(config, name=config_file.stem)


@app.command("ls")
def list_stores() -> None:
    """List the stores: key, answers, size, last use, reference."""
    root = reference_folder()
    every = stores(root)
    if not every:
        print(f"No stores in {root}.")
        return
    print(f"{'key':12}  {'answers':>9}  {'size':>9}  {'last use':16}  reference")
    for store in every:
        print(
            f"{store.key[:12]}  {store.num_answers():>9}  {_size(store.size()):>9}  {_when(store):16}  "
            f"{store.manifest().get('reference', '(unknown)')}"
        )


@app.command()
def verify(
    key: Annotated[
        str | None,
        typer.Argument(metavar="KEY", help="Key of a store, or a prefix of it. Default: all stores and token tables."),
    ] = None,
) -> None:
    """Check every byte of the stores and token tables. If anything is damaged, name it and exit with 1.

    Changes nothing. A run that needs a damaged shard removes it and rescores its pairs; one that needs a damaged token
    table rebuilds it.
    """
    root = reference_folder()
    chosen = stores(root) if key is None else [find_store(root, key)]
    tables = sorted(table_folder().glob("*.arrow")) if key is None else []
    for old in (path for path in tables if _is_of_earlier_version(path)):
        print(f"{old.stem[:12]}  unused: a token table from an earlier version. To remove it: rm {old}")
    tables = [path for path in tables if not _is_of_earlier_version(path)]
    problems = [_verdict(store.key, store.problems()) for store in chosen]
    problems += [_verdict(path.stem, _table_problems(path), "  token table") for path in tables]
    if not problems:
        print(f"No stores in {root}.")
    if any(problems):
        raise typer.Exit(1)


def _verdict(name: str, problems: list[str], kind: str = "") -> bool:
    """Print whether a store or a table is damaged, and how."""
    print(f"{name[:12]}  {'damaged' if problems else 'intact'}{kind}")
    for text in problems:
        print(f"error: {text}", file=sys.stderr)
    return bool(problems)


def _is_of_earlier_version(path: Path) -> bool:
    """Whether a table is a plain Arrow file, the format before digests."""
    with suppress(OSError), path.open("rb") as file:
        return file.read(6) == b"ARROW1"
    return False


def _table_problems(path: Path) -> list[str]:
    from isopref.data.table import ExampleTable
    from isopref.data.table_file import DamagedTableError

    try:
        ExampleTable.open(path, []).check()
    except DamagedTableError as error:
        return [f"{error}. Delete it; a run that needs it will rebuild it"]
    except OSError as error:
        return [f"{path}: read failed ({error.strerror})"]
    return []


@app.command("rm")
def remove(
    key: Annotated[
        str | None, typer.Argument(metavar="KEY", help="Key of a store, or a prefix of it.", show_default=False)
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Remove all stores.")] = False,
) -> None:
    """Remove a store, or all of them. Later runs rescore what they need."""
    if (key is None) == (not everything):
        raise ConfigError("isopref cache rm: pass the KEY of a store, or --all. To list them: isopref cache ls")
    # Keep the locks of token tables: a process waiting on a removed lock would build its table concurrently with one
    # that recreated the lock, and lose its file.
    root = reference_folder()
    for store in stores(root) if key is None else [find_store(root, key)]:
        store.remove()
        print(f"removed {store.key}")


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} GiB"


def _when(store: Store) -> str:
    last = store.last_use()
    return "(unknown)" if last is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(last))
