"""`isopref judge`: its arguments. Imports no torch."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from isopref.cli.arguments import Overrides, check_path, in_home, start_processes


class Ties(StrEnum):
    """What to do with ties and disagreements."""

    drop = "drop"
    keep = "keep"


By = Annotated[
    str,
    typer.Option(
        metavar="JUDGE",
        help="Judge: a reward model (folder or run), a Python function (module:function or file.py:function), or the "
        "URL of an OpenAI-compatible server.",
        show_default=False,
    ),
]

SkipFailed = Annotated[
    bool,
    typer.Option(
        "--skip-failed",
        help="With a judge URL: leave out comparisons without a verdict, instead of failing at the end.",
    ),
]


def check_judge(by: str) -> None:
    """Raise ConfigError if --by is neither a URL nor anything that could be a path. A URL may hold a password."""
    if "://" not in by:
        check_path("--by", by)


def judge(
    file: Annotated[str, typer.Argument(metavar="FILE", help="Prompts with answers, as isopref sample writes them.")],
    overrides: Overrides = None,
    *,
    by: By,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="With a judge URL: the model that judges.")] = None,
    rubric: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            callback=in_home,
            help="With a judge URL: file with the question, containing {prompt}, {a} and {b}. Default: built in.",
        ),
    ] = None,
    ties: Annotated[
        Ties, typer.Option(help="With a judge URL: drop ties and disagreements, or count them as half a win each.")
    ] = Ties.drop,
    parallel: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="With a judge URL: requests in flight. Default: 16.")
    ] = None,
    skip_failed: SkipFailed = False,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", callback=in_home, help="Output file. Default: NAME.judged.jsonl in the current folder."
        ),
    ] = None,
) -> None:
    """Score sampled answers, to train on them.

    A Python function takes the prompt and the list of answers and returns a score for each. A language model compares
    all pairs of answers, in both orders; an answer's score is the share of its comparisons that it wins. Records with
    fewer than two distinct scores cannot be trained on and are dropped. To resume a stopped command, run it again. The
    API key is read from ISOPREF_API_KEY or OPENAI_API_KEY.

    \b
    Examples:
      isopref judge prompts.answers.jsonl --by runs/reward/model
      isopref judge prompts.answers.jsonl --by my_rewards:brevity
      isopref judge prompts.answers.jsonl --by http://localhost:8000/v1 --rubric rubric.txt --ties keep
    """
    check_path("FILE", file)
    check_judge(by)
    out = out or Path(f"{Path(file).stem.removesuffix('.answers')}.judged.jsonl")
    start_processes(1, [])
    from isopref.build.judge import JudgeOptions, judge_file

    options = JudgeOptions(by, model, rubric, ties.value, parallel, skip_failed, tuple(overrides or ()))
    judge_file(file, out, options)
