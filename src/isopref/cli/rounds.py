"""`isopref rounds`: its arguments, and how its stages run. Imports no torch."""

from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from isopref.cli.arguments import ConfigFile, NumProcesses, Overrides, in_home, start_processes
from isopref.cli.judge import By, SkipFailed, Ties, check_judge
from isopref.cli.launch import launch, torchrun
from isopref.cli.sample import MaxTokens, Seed, Temperature, TopP
from isopref.errors import ConfigError


class Reference(StrEnum):
    """The reference model of a round's training."""

    start = "start"
    previous = "previous"


JudgeModel = Annotated[str | None, typer.Option(metavar="NAME", help="With a judge URL: the model that judges.")]
JudgeParallel = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="With a judge URL: requests in flight. Default: 16.")
]
Rubric = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", callback=in_home, help="With a judge URL: file with the question, as in isopref judge."
    ),
]


def rounds(
    config_file: ConfigFile,
    overrides: Overrides = None,
    *,
    by: By,
    num_rounds: Annotated[int, typer.Option("--rounds", min=1, metavar="N", help="Number of rounds.")] = 2,
    answers: Annotated[int, typer.Option(min=2, metavar="K", help="Answers per prompt.")] = 4,
    reference: Annotated[
        Reference,
        typer.Option(help="DPO reference: the start model in every round, or the model of the previous round."),
    ] = Reference.start,
    temperature: Temperature = 1.0,
    top_p: TopP = 1.0,
    max_tokens: MaxTokens = 512,
    seed: Seed = 0,
    judge_model: JudgeModel = None,
    judge_parallel: JudgeParallel = None,
    rubric: Rubric = None,
    ties: Annotated[
        Ties, typer.Option(help="With a judge URL: drop ties and disagreements, or count them as half a win each.")
    ] = Ties.drop,
    skip_failed: SkipFailed = False,
    nproc: NumProcesses = 1,
) -> None:
    """Sample, judge and train in a loop.

    Each round samples answers from the previous round's model, judges them, and trains the model on them. Prompts come
    from data.train and held-out prompts from data.eval; answers in data.train are ignored. Results go to run.folder
    (default: runs/NAME-rounds), with a report: reward, win rate against the start model, KL divergence from it, answer
    length, held-out accuracy, answers side by side. To resume, or to add rounds, run the command again.

    \b
    Examples:
      isopref rounds my.yaml --by my_rewards:brevity --rounds 2 --answers 4 --max-tokens 128
      isopref rounds my.yaml --by http://localhost:8000/v1 --judge-model NAME --rubric rubric.txt
    """
    check_judge(by)
    start_processes(1, [])
    from isopref.build.judge import JudgeOptions
    from isopref.build.rounds import Plan, check_plan, run_rounds
    from isopref.sample.answers import Sampling

    plan = Plan(
        config_file,
        tuple(overrides or ()),
        num_rounds,
        answers,
        Sampling(temperature, top_p, max_tokens, seed),
        JudgeOptions(by, judge_model, rubric, ties.value, judge_parallel, skip_failed, prefix="judge-"),
        reference.value,
    )
    check_plan(plan)
    run_rounds(plan, _executes(nproc))


def _executes(nproc: int) -> Callable[[Sequence[str]], None]:
    """A function that runs an isopref command: in this process, or in several."""

    def execute(arguments: Sequence[str]) -> None:
        if nproc > 1:
            code = launch(torchrun(nproc, "isopref.cli.main", arguments))
        else:
            from isopref.cli.main import app

            code = app(list(arguments), prog_name="isopref", standalone_mode=False) or 0
        if code:
            if nproc > 1 and code < 128:
                raise ConfigError(
                    f"isopref {arguments[0]} failed; its message is above. Fix the cause and run the command again."
                )
            raise typer.Exit(code)

    return execute
