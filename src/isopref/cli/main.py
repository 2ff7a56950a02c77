"""The commands. They parse arguments and print; isopref.build, imported when a run starts, does the work.

`isopref --help` must stay fast: nothing here may import torch.
"""

import errno
import io
import os
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from isopref import __version__
from isopref.cli import cache, evaluate, judge, push, report, rounds, sample, score
from isopref.cli.arguments import ConfigFile, NumProcesses, Overrides, in_home, say_opening, start_processes
from isopref.cli.group import Commands
from isopref.cli.launch import end_with_parent, start_again
from isopref.cli.resume import parse_resume, spelled_out
from isopref.config.load import dump_config, load_config, to_yaml
from isopref.config.schema import run_id
from isopref.config.starter import demo, starter
from isopref.engine.quiet import quiet_engine
from isopref.errors import ConfigError, StartAgainError, UserError, is_echo
from isopref.objectives.registry import PARAMS, resolve
from isopref.threads import limit_spinning

FIRST_RANK_WAIT_S = 20  # for the first rank to hit the same error
END_WAIT_S = 60  # for the launcher to end this rank once the first one has failed
ECHO_WAIT_S = 15


app = typer.Typer(
    cls=Commands,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(cache.app, name="cache")
app.command("report")(report.report)
app.command("ls")(report.list_runs)
app.command("compare")(report.compare)
app.command("score")(score.score)
app.command("push")(push.push)
app.command("sample")(sample.sample)
app.command("judge")(judge.judge)
app.command("rounds")(rounds.rounds)
app.command("eval")(evaluate.evaluate)


def main() -> None:
    """Run the command line. A user error is one message and exit code 1; any other error keeps its traceback."""
    environment = dict(os.environ)
    _print_any_text()
    end_with_parent()
    limit_spinning()
    try:
        app(spelled_out(sys.argv[1:]), prog_name="isopref")
    except UserError as error:
        rank = os.environ.get("RANK", "0")
        again = isinstance(error, StartAgainError) and error.at_once
        code = StartAgainError.exit_code if again else 1
        if rank != "0" and _first_rank_reports():
            sys.exit(code)
        alone = "RANK" not in environment  # otherwise the launcher restarts it
        word = "warning" if again and alone else "error"
        print(f"{word}{'' if rank == '0' else f' on rank {rank}'}: {error}", file=sys.stderr)
        if again and alone:
            start_again({**environment, StartAgainError.variable: "1"})
        sys.exit(code)
    except Exception as error:
        if isinstance(error, OSError) and (way_out := _of_path(error)):
            sys.exit(f"error: {error.filename}: {error.strerror}. {way_out}")
        if "RANK" in os.environ and is_echo(error):
            time.sleep(ECHO_WAIT_S)  # the failed rank has said why, and usually ends this one first
        raise


def _print_any_text() -> None:
    """Print what the locale's encoding lacks as an escape: text from data and models may be anything."""
    out = sys.stdout
    if isinstance(out, io.TextIOWrapper) and (out.errors == "strict" or out.encoding.lower() != "utf-8"):
        out.reconfigure(errors="backslashreplace")


def _of_path(error: OSError) -> str | None:
    """The way out if the OS denies access to a path, or rejects one from the command line; None: it is our fault."""
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS) and error.filename is not None:
        return "Check its permissions, or choose another path."
    rejected = error.errno in (errno.ENAMETOOLONG, errno.ELOOP)
    of_argument = rejected and any(str(error.filename).startswith(one) for one in sys.argv[2:] if one)
    return "Choose another path." if of_argument else None


def _first_rank_reports() -> bool:
    """Whether the first rank hits this error too and reports it; its exit usually ends this process in here."""
    from isopref.engine.spokesman import first_rank_failed

    if not first_rank_failed(within_s=FIRST_RANK_WAIT_S):
        return False
    time.sleep(END_WAIT_S)
    return True


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"isopref {__version__}")
        raise typer.Exit


@app.callback()
def isopref(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Tune language models on preferences (DPO and related objectives), and train reward models.

    The global batch defines the math; how it is split over hardware never changes the result.

    \b
    A first run, on any machine:
      isopref init --demo demo
      isopref train demo/demo.yaml
    """


@app.command()
def train(
    config_file: ConfigFile,
    overrides: Overrides = None,
    resume: Annotated[
        str,
        typer.Option(
            metavar="[auto]",
            help="Resume from the last intact checkpoint. auto: resume the run if it exists, start it otherwise.",
            show_default=False,
        ),
    ] = "no",
    nproc: NumProcesses = 1,
) -> None:
    """Train a model from a config file.

    \b
    Examples:
      isopref train my.yaml
      isopref train my.yaml optim.lr=2e-6 objective.beta=0.3
      isopref train my.yaml optim.betas=[0.9,0.99] data.eval=null
      isopref train my.yaml data.columns.prompt=question
      isopref train my.yaml layout.microbatch_tokens=16384 --nproc 8
      isopref train my.yaml --resume
      isopref train my.yaml --resume auto

    On SIGTERM or Ctrl-C, the run saves a checkpoint and exits with 143 or 130.

    To train on several machines, run torchrun on each of them:

    \b
      torchrun --nnodes 2 --nproc_per_node 8 ... -m isopref train my.yaml
    """
    how = parse_resume(resume)
    config = load_config(config_file, overrides or ())
    start_processes(nproc, ["train", f"--resume={how}", str(config_file), *(overrides or ())])
    from isopref.build.train import train as train_run

    stopped_by = train_run(config, name=config_file.stem, resume=how)
    if stopped_by is not None:
        raise typer.Exit(128 + stopped_by)


@app.command()
def merge(
    adapter: Annotated[
        Path,
        typer.Argument(
            metavar="ADAPTER", help="A run that trained an adapter, or an adapter folder.", show_default=False
        ),
    ],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="Folder to write; it must not exist yet.", show_default=False)
    ],
    dtype: Annotated[
        str | None, typer.Option(metavar="TYPE", help="float32, bfloat16 or float64. Default: the base model's dtype.")
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that ships with the base model.")
    ] = False,
) -> None:
    """Merge an adapter into its base model.

    Writes an ordinary Hugging Face folder. The adapter's config names the base model. An adapter trained on a 4-bit
    base is merged into the full-precision weights: close to what was trained, but not identical.

    \b
    Example:
      isopref merge runs/my-1a2b3c4d5e6f merged
    """
    if dtype not in (None, "float32", "bfloat16", "float64"):
        raise ConfigError(f"--dtype: must be one of float32, bfloat16, float64; found {dtype}.")
    quiet_engine()
    from isopref.build.merge import merge as merge_folders

    merge_folders(adapter, out, dtype=dtype, trust_remote_code=trust_remote_code)
    print(f"Wrote {out}, a Hugging Face folder.")


@app.command()
def data(
    config_file: ConfigFile,
    overrides: Overrides = None,
    *,
    card: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Also show how many pairs are too long for this GPU, e.g. H100."),
    ] = None,
    gpus: Annotated[int, typer.Option(min=1, metavar="N", help="Number of GPUs, with --card.")] = 1,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, with more statistics and the full text of the pairs.")
    ] = False,
) -> None:
    """Show a config's data as the model would see it.

    Tokenises the data as train would. Prints what each source contains, what was dropped and why, lengths, three
    tokenised pairs (without the middle of long texts) and warnings about likely mistakes. Loads the model's tokenizer
    and config, not its weights.

    \b
    Examples:
      isopref data my.yaml
      isopref data my.yaml data.on_bad=drop data.max_length=2048
      isopref data my.yaml --card H100 --gpus 8
      isopref data my.yaml --json
    """
    config = load_config(config_file, overrides or ())
    say_opening(quiet=as_json)
    quiet_engine()
    from isopref.build.inspect import inspect
    from isopref.build.run_plan import Hardware
    from isopref.cli.data import show, to_json
    from isopref.engine.display import Display

    display = Display(quiet=as_json)
    report = inspect(config, display, None if card is None else Hardware.named(card, gpus))
    if as_json:
        print(to_json(report))
    else:
        show(report, display.console)


@app.command()
def plan(
    config_file: ConfigFile,
    overrides: Overrides = None,
    *,
    gpus: Annotated[int, typer.Option(min=1, metavar="N", help="Number of GPUs, eight per machine.")] = 1,
    card: Annotated[str, typer.Option(metavar="NAME", help="GPU model: H200, H100, A100, L40S, ...")] = "H100",
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Memory per GPU, if it is not the card's usual size, e.g. 40GB."),
    ] = None,
    network: Annotated[
        float, typer.Option(min=1, metavar="GBIT", help="Network bandwidth per GPU to other machines, in Gb/s.")
    ] = 400,
    ranks: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="Also plan the run on these numbers of GPUs, e.g. 8,64,1024.")
    ] = None,
    lengths: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            callback=in_home,
            help="Read lengths (prompt, chosen, rejected) from a .npy file instead of tokenising the data.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Estimate a run's memory, speed and duration; needs no GPU.

    Prints a memory breakdown, expected speed and hours; if the run does not fit, prints overrides that make it fit.
    Tokenises the data as train would, and reads the model's config, not its weights.

    \b
    Examples:
      isopref plan my.yaml --card H100 --gpus 8
      isopref plan my.yaml layout.checkpointing=full --card A100 --memory 40GB
      isopref plan my.yaml --ranks 8,64,1024
      isopref plan my.yaml --lengths lengths.npy --json
    """
    config = load_config(config_file, overrides or ())
    say_opening(quiet=as_json)
    quiet_engine()
    from isopref.build.planner import make_plan
    from isopref.build.run_plan import Hardware
    from isopref.cli.plan import parse_ranks, show, to_json
    from isopref.engine.display import Display

    hardware = Hardware.named(card, gpus, memory, network)
    counts = [] if ranks is None else parse_ranks(ranks)
    display = Display(quiet=as_json)
    found = make_plan(config, hardware, display, lengths_file=lengths, ranks=counts)
    if as_json:
        print(to_json(found))
    else:
        show(found, hardware, display.console)


@app.command()
def init(
    path: Annotated[
        Path | None,
        typer.Argument(
            metavar="PATH",
            callback=in_home,
            help="File to write (default: isopref.yaml); with --demo, the folder (default: demo).",
            show_default=False,
        ),
    ] = None,
    with_demo: Annotated[
        bool, typer.Option("--demo", help="Write a small complete example: a config and its data.")
    ] = False,
) -> None:
    """Write a starter config.

    The file lists every field with its default and its meaning. Existing files are never overwritten.

    \b
    Examples:
      isopref init my.yaml
      isopref init --demo demo
    """
    if not with_demo:
        path = path or Path("isopref.yaml")
        _refuse_existing(path)
        _write(path, starter())
        print(f"Wrote {path}. Set model.path and data.train in it, then run:")
        print(f"  isopref data {path}     # look at the data as the model will see it")
        print(f"  isopref train {path}")
        return

    from isopref.demo import FILES, write

    folder = path or Path("demo")
    config_file = folder / "demo.yaml"
    _refuse_existing(config_file, *(folder / name for name in FILES))
    _write(config_file, demo(folder))
    write(folder)
    print(f"Wrote {', '.join(str(folder / name) for name in ('demo.yaml', *FILES))}. Now run:")
    print(f"  isopref train {config_file}")


@app.command()
def config(config_file: ConfigFile, overrides: Overrides = None) -> None:
    """Check a config file and print it with all defaults filled in.

    Prints YAML, preceded by the run id and by the parameters of the loss. The run id identifies the math: configs that
    differ only in the layout and run sections have the same one and train the same model.

    \b
    Example:
      isopref config my.yaml optim.lr=2e-6
    """
    resolved = load_config(config_file, overrides or ())
    print(f"# run id: {run_id(resolved)}")
    objective = resolved.objective.model_dump()
    for loss, params in resolve(objective["loss"], **{name: objective.get(name) for name in PARAMS}).items():
        if params:
            print(f"# {loss}: {', '.join(f'{name} {to_yaml(value)}' for name, value in params.items())}")
    print(dump_config(resolved), end="")


def _refuse_existing(*paths: Path) -> None:
    for path in paths:
        if path.exists():
            raise ConfigError(f"{path}: already exists and will not be overwritten. Choose another name, or remove it.")


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error}). Choose another location.") from error


if __name__ == "__main__":
    main()
