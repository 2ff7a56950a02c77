"""`isopref eval`: its arguments. Imports no torch."""

from pathlib import Path
from typing import Annotated

import typer

from isopref.cli.arguments import ConfigFile, NumProcesses, Overrides, check_path, in_home, start_processes
from isopref.cli.judge import SkipFailed, Ties, check_judge
from isopref.config.load import load_config
from isopref.errors import ConfigError


def evaluate(
    config_file: ConfigFile,
    overrides: Overrides = None,
    *,
    model: Annotated[
        str,
        typer.Option(
            metavar="PATH", help="Model to evaluate: a run, or anything that model.path accepts.", show_default=False
        ),
    ],
    reference: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Reference model or run. Default: the config's reference."),
    ] = None,
    win_rate: Annotated[
        bool,
        typer.Option(
            "--win-rate",
            help="Sample answers to the held-out prompts from two models and let a judge (--by) compare them.",
        ),
    ] = False,
    against: Annotated[
        str | None, typer.Option(metavar="PATH", help="With --win-rate: the other model. Default: model.path.")
    ] = None,
    by: Annotated[
        str | None, typer.Option(metavar="JUDGE", help="With --win-rate: the judge, as in isopref judge.")
    ] = None,
    ties: Annotated[
        Ties | None,
        typer.Option(help="With --win-rate and a judge URL: drop ties, or count them as half a win. Default: drop."),
    ] = None,
    skip_failed: SkipFailed = False,
    temperature: Annotated[
        float | None,
        typer.Option(min=0, metavar="T", help="With --win-rate: sampling temperature of both models. Default: 1."),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="With --win-rate: maximum tokens per answer. Default: 512.")
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FOLDER",
            callback=in_home,
            help="With --win-rate: folder for answers and verdicts. Default: NAME.win-rate.",
        ),
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", callback=in_home, help="Also write the metrics to this file."),
    ] = None,
    nproc: NumProcesses = 1,
) -> None:
    """Evaluate a model on the config's held-out pairs (data.eval).

    Prints preference accuracy, reward margins, loss and length bias with 95% intervals. Reference log-probabilities
    are cached. With --win-rate, prints instead how often a judge prefers the model's answers to the held-out prompts
    over those of another model, raw and length-controlled.

    \b
    Examples:
      isopref eval my.yaml --model runs/my-1a2b3c4d5e6f
      isopref eval my.yaml --model other/model --reference some/model --json figures.json
      isopref eval my.yaml --model runs/first --win-rate --by http://localhost:8000/v1
    """
    config = load_config(config_file, overrides or ())
    check_path("--model", model)
    check_path("--reference", reference)
    check_path("--against", against)
    if by is not None:
        check_judge(by)
    if win_rate:
        if by is None:
            raise ConfigError("--win-rate: needs a judge. Set --by to a reward model, module:function or a URL.")
        if reference is not None or nproc > 1:
            option = (
                "--reference: not with --win-rate, whose other model is --against"
                if reference is not None
                else (f"--nproc {nproc}: --win-rate runs in one process")
            )
            raise ConfigError(f"{option}. Remove it.")
        start_processes(1, [])
        from isopref.build.judge import JudgeOptions
        from isopref.build.win_rate import win_rate_of
        from isopref.runs.write import write_json
        from isopref.sample.answers import Sampling

        found = win_rate_of(
            config,
            name=config_file.stem,
            model=model,
            against=against or config.model.path,
            judge=JudgeOptions(by, ties=(ties or Ties.drop).value, skip_failed=skip_failed),
            sampling=Sampling(1.0 if temperature is None else temperature, 1.0, max_tokens or 512, 0),
            folder=folder or Path(f"{config_file.stem}.win-rate"),
        )
        if json_file is not None:
            write_json(json_file, found.as_json())
        return
    only_win_rate = {
        "--against": against,
        "--by": by,
        "--ties": ties,
        "--skip-failed": skip_failed or None,
        "--temperature": temperature,
        "--max-tokens": max_tokens,
        "--out": folder,
    }
    for name, given in only_win_rate.items():
        if given is not None:
            raise ConfigError(f"{name}: needs --win-rate. Add --win-rate, or remove {name}.")
    options = ["--model", model]
    options += [] if reference is None else ["--reference", reference]
    options += [] if json_file is None else ["--json", str(json_file)]
    start_processes(nproc, ["eval", *options, str(config_file), *(overrides or ())])
    from isopref.build.evaluate import evaluate_model

    evaluate_model(config, name=config_file.stem, model=model, reference_model=reference, json_file=json_file)
