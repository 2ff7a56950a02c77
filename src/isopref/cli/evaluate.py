"""`isopref eval`: its arguments. Imports no torch."""

from pathlib import Path
from typing import Annotated

import typer

from isopref.cli.arguments import ConfigFile, NumProcesses, Overrides, check_path, start_processes
from isopref.cli.judge import SkipFailed, Ties
from isopref.config.load import load_config
from isopref.errors import ConfigError


def evaluate(
    config_file: ConfigFile,
    overrides: Overrides = None,
    *,
    model: Annotated[
        str,
        typer.Option(
            metavar="PATH", help="Model to evaluate: a run, or anything that model.path takes.", show_default=False
        ),
    ],
    reference: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Reference model, or a run. Default: the config's reference."),
    ] = None,
    win_rate: Annotated[
        bool, typer.Option("--win-rate", help="Let two models answer the held-out prompts, and judge them (--by).")
    ] = False,
    against: Annotated[
        str | None, typer.Option(metavar="PATH", help="With --win-rate: the other model. Default: model.path.")
    ] = None,
    by: Annotated[
        str | None, typer.Option(metavar="JUDGE", help="With --win-rate: the judge, as isopref judge takes it.")
    ] = None,
    ties: Annotated[
        Ties | None, typer.Option(help="With --win-rate and a URL: what to do with ties. Default: drop.")
    ] = None,
    skip_failed: SkipFailed = False,
    temperature: Annotated[
        float | None, typer.Option(min=0, metavar="T", help="With --win-rate: for both models. Default: 1.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="With --win-rate: longest answer, in tokens. Default: 512.")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--out", metavar="FOLDER", help="With --win-rate: where to save answers.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write the metrics to this file.")
    ] = None,
    nproc: NumProcesses = 1,
) -> None:
    """Evaluate a model on the config's held-out pairs (data.eval).

    Prints preference accuracy, reward margins, loss and length bias with 95% intervals. Reference log-probabilities
    come from the cache if they have been scored before. With --win-rate, prints how often a judge prefers the model's
    answers to the held-out prompts over those of another model, also length-controlled.

    \b
    Examples:
      isopref eval my.yaml --model runs/my-1a2b3c4d5e6f
      isopref eval my.yaml --model other/model --reference some/model --json figures.json
      isopref eval my.yaml --model runs/first --win-rate --by http://localhost:8000/v1
    """
    config = load_config(config_file, overrides or ())
    check_path("--model", model)
    check_path("--reference", reference)
    if win_rate:
        if by is None:
            raise ConfigError("--win-rate: needs a judge. Name one: --by module:function, a reward model, or a URL.")
        if reference is not None or nproc > 1:
            raise ConfigError("--win-rate: takes --against in place of --reference, and one process. Remove the other.")
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
            raise ConfigError(f"{name}: is for --win-rate. Add it, or remove {name}.")
    options = ["--model", model]
    options += [] if reference is None else ["--reference", reference]
    options += [] if json_file is None else ["--json", str(json_file)]
    start_processes(nproc, ["eval", *options, str(config_file), *(overrides or ())])
    from isopref.build.evaluate import evaluate_model

    evaluate_model(config, name=config_file.stem, model=model, reference_model=reference, json_file=json_file)
