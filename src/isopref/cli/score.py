"""`isopref score`: its arguments. Imports no torch."""

from pathlib import Path
from typing import Annotated

import typer

from isopref.cli.arguments import NumProcesses, Overrides, check_path, in_home, start_processes


def score(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="Prompts with answers: a file, folder or hub name, like data.train.",
            show_default=False,
        ),
    ],
    overrides: Overrides = None,
    *,
    model: Annotated[
        str,
        typer.Option(
            metavar="PATH", help="Model to score with: a folder or hub name, like model.path.", show_default=False
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", callback=in_home, help="Output file. Default: NAME.scores.jsonl in the current folder."
        ),
    ] = None,
    nproc: NumProcesses = 1,
) -> None:
    """Score the answers in a file: rewards, or log-probabilities.

    A reward model (a sequence-classification model, or an adapter on one) gives rewards; a language model gives
    log-probabilities. Writes one JSON line per record, in file order. To resume a stopped command, run it again.

    \b
    Examples:
      isopref score pairs.jsonl --model runs/reward/model
      isopref score pairs.jsonl --model runs/reward/model --out rewards.jsonl model.dtype=bfloat16 --nproc 8
      isopref score lists.jsonl --model Qwen/Qwen3-0.6B data.columns={responses:candidates}
    """
    check_path("FILE", file)
    check_path("--model", model)
    out = out or Path(f"{Path(file).stem}.scores.jsonl")
    start_processes(nproc, ["score", "--model", model, "--out", str(out), file, *(overrides or ())])
    from isopref.build.score import score_file

    score_file(file, model, out, overrides or ())
