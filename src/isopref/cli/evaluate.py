"""`isopref eval`: its arguments. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from isopref.cli.arguments import ConfigFile, NumProcesses, Overrides, check_path, in_home, start_processes, words
from isopref.cli.judge import SkipFailed, Ties, check_judge
from isopref.config.load import load_config
from isopref.config.schema import Config
from isopref.errors import ConfigError

Model = Annotated[
    str,
    typer.Option(
        metavar="PATH", help="Model to evaluate: a run, or anything that model.path accepts.", show_default=False
    ),
]
Reference = Annotated[
    str | None, typer.Option(metavar="PATH", help="Reference model or run. Default: the config's reference.")
]
WinRate = Annotated[
    bool,
    typer.Option(
        "--win-rate", help="Sample answers to the held-out prompts from two models and let a judge (--by) compare them."
    ),
]
Against = Annotated[
    str | None, typer.Option(metavar="PATH", help="With --win-rate: the other model. Default: model.path.")
]
By = Annotated[str | None, typer.Option(metavar="JUDGE", help="With --win-rate: the judge, as in isopref judge.")]
TiesOrDefault = Annotated[
    Ties | None,
    typer.Option(help="With --win-rate and a judge URL: drop ties, or count them as half a win. Default: drop."),
]
Temperature = Annotated[
    float | None,
    typer.Option(min=0, metavar="T", help="With --win-rate: sampling temperature of both models. Default: 1."),
]
MaxTokens = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="With --win-rate: maximum tokens per answer. Default: 512.")
]
Folder = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="FOLDER",
        callback=in_home,
        help="With --win-rate: folder for answers and verdicts. Default: NAME.win-rate.",
    ),
]
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", callback=in_home, help="Also write the metrics to this file.")
]


@dataclass(frozen=True)
class WinRateOptions:
    """The options that --win-rate takes, as given; None and False stand for options that were not given."""

    against: str | None
    by: str | None
    ties: Ties | None
    skip_failed: bool
    temperature: float | None
    max_tokens: int | None
    folder: Path | None


def evaluate(
    config_file: ConfigFile,
    overrides: Overrides = None,
    *,
    model: Model,
    reference: Reference = None,
    win_rate: WinRate = False,
    against: Against = None,
    by: By = None,
    ties: TiesOrDefault = None,
    skip_failed: SkipFailed = False,
    temperature: Temperature = None,
    max_tokens: MaxTokens = None,
    folder: Folder = None,
    json_file: JsonFile = None,
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
    options = WinRateOptions(against, by, ties, skip_failed, temperature, max_tokens, folder)
    if win_rate:
        judge = _judge_of(options, reference, nproc)
        _measure_win_rate(config, options, name=config_file.stem, model=model, judge=judge, json_file=json_file)
        return
    _refuse_win_rate_options(options)
    named = {"--model": model, "--reference": reference, "--json": json_file}
    start_processes(nproc, ["eval", *words(named), str(config_file), *(overrides or ())])
    from isopref.build.evaluate import evaluate_model

    evaluate_model(config, name=config_file.stem, model=model, reference_model=reference, json_file=json_file)


def _judge_of(options: WinRateOptions, reference: str | None, nproc: int) -> str:
    """The judge for --win-rate. Raises ConfigError if there is none, or for options that --win-rate does not take."""
    if options.by is None:
        raise ConfigError("--win-rate: needs a judge. Set --by to a reward model, module:function or a URL.")
    if reference is not None:
        raise ConfigError("--reference: not with --win-rate, whose other model is --against. Remove it.")
    if nproc > 1:
        raise ConfigError(f"--nproc {nproc}: --win-rate runs in one process. Remove it.")
    return options.by


def _refuse_win_rate_options(options: WinRateOptions) -> None:
    """Raise ConfigError for an option that has no effect without --win-rate."""
    given = {
        "--against": options.against,
        "--by": options.by,
        "--ties": options.ties,
        "--skip-failed": options.skip_failed or None,
        "--temperature": options.temperature,
        "--max-tokens": options.max_tokens,
        "--out": options.folder,
    }
    for name, value in given.items():
        if value is not None:
            raise ConfigError(f"{name}: needs --win-rate. Add --win-rate, or remove {name}.")


def _measure_win_rate(
    config: Config, options: WinRateOptions, *, name: str, model: str, judge: str, json_file: Path | None
) -> None:
    start_processes(1, [])
    from isopref.build.judge import JudgeOptions
    from isopref.build.win_rate import win_rate_of
    from isopref.runs.write import write_json
    from isopref.sample.answers import Sampling

    temperature = 1.0 if options.temperature is None else options.temperature
    found = win_rate_of(
        config,
        name=name,
        model=model,
        against=options.against or config.model.path,
        judge=JudgeOptions(judge, ties=(options.ties or Ties.drop).value, skip_failed=options.skip_failed),
        sampling=Sampling(temperature, 1.0, options.max_tokens or 512, 0),
        folder=options.folder or Path(f"{name}.win-rate"),
    )
    if json_file is not None:
        write_json(json_file, found.as_json())
