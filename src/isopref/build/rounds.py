"""`isopref rounds`: sample, judge and train, n times. Each stage is an isopref command that leaves its result on disk.

A stage is skipped if its result exists, so the command resumes wherever it was stopped, and a result edited by hand is
used as it is. To repeat a stage, remove its result and the results of later stages.
"""

import gc
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np

from isopref.build.judge import Judged, JudgeOptions, judge_file, open_judge, read_records, write_labelled
from isopref.build.score import score_file
from isopref.build.win_rate import FIGURES_FILE, contest, one_source
from isopref.config.load import load_config, to_yaml
from isopref.config.schema import Config
from isopref.data.shapes import DETECT_RECORDS, detect_shape
from isopref.data.sources import read_source
from isopref.data.template_files import NO_TEMPLATE
from isopref.engine.display import Display
from isopref.errors import ConfigError, DataError, RunError
from isopref.evaluate.intervals import Figure, figure, means
from isopref.judge.comparing import read_rubric
from isopref.objectives.registry import weights
from isopref.report.cost import cost_of
from isopref.report.rounds import Round, page, table
from isopref.runs.files import MODEL_FOLDER, REPORT_FILE
from isopref.runs.read import read_run
from isopref.runs.write import make_folder, write_json
from isopref.sample.answers import Sampling

SETTINGS_FILE = "rounds.json"
SAMPLED, JUDGED, RUN, ANSWERS, KL_FILE = "sampled.jsonl", "judged.jsonl", "run", "answers.jsonl", "kl.json"
SIDE_BY_SIDE = 12  # prompts in the report

Execute = Callable[[Sequence[str]], None]  # runs an isopref command, given its arguments


@dataclass(frozen=True)
class Plan:
    """The arguments of `isopref rounds`."""

    config_file: Path
    overrides: tuple[str, ...]
    rounds: int
    answers: int
    sampling: Sampling
    judge: JudgeOptions
    reference: Literal["start", "previous"]

    @property
    def config(self) -> Config:
        return load_config(self.config_file, self.overrides)

    @property
    def folder(self) -> Path:
        return Path(self.config.run.folder or f"runs/{self.config_file.stem}-rounds").expanduser()

    def round_folder(self, number: int) -> Path:
        """Round 0 is the start model."""
        return self.folder / ("start" if number == 0 else f"round-{number}")

    def model(self, number: int) -> str:
        """The model after a round."""
        if number > 0:
            return str(self.round_folder(number) / RUN / MODEL_FOLDER)
        model = self.config.model
        return model.path if model.adapter is None or model.adapter.path is None else model.adapter.path


def run_rounds(plan: Plan, execute: Execute) -> None:
    """Run all stages that are not done yet, then write the report. Raises UserError."""
    display = Display()
    config = plan.config
    prompts, held_out = (one_source(getattr(config.data, name), f"data.{name}") for name in ("train", "eval"))
    make_folder("run.folder", plan.folder)
    _check_settings(plan)
    has_answers = _has_answers(held_out, config)
    _sample(plan, 0, held_out, ANSWERS, 1 if has_answers else plan.answers, execute)
    compared = held_out if has_answers else _judged(plan, 0, ANSWERS)
    rounds = [_figures(plan, 0, compared)]
    for number in range(1, plan.rounds + 1):
        display.say(f"round {number} of {plan.rounds}: {plan.round_folder(number)}")
        _sample(plan, number - 1, prompts, SAMPLED, plan.answers, execute, into=number)
        _train(plan, number, _judged(plan, number, SAMPLED), compared, execute)
        _sample(plan, number, held_out, ANSWERS, 1, execute)
        rounds.append(_figures(plan, number, compared))
        _report(plan, rounds, display)


def _check_settings(plan: Plan) -> None:
    """Raise RunError if the folder holds rounds with different settings.

    Adding rounds is allowed, and so is adding --skip-failed, which does not change existing verdicts.
    """
    content = {
        "config": plan.config.model_dump(mode="json", exclude={"layout": True, "run": True}),
        "answers": plan.answers,
        "sampling": asdict(plan.sampling),
        "by": plan.judge.by,
        "judge_model": plan.judge.model,
        "rubric": None if plan.judge.rubric is None else read_rubric(plan.judge.rubric),
        "ties": plan.judge.ties,
        "skip_failed": plan.judge.skip_failed,
        "reference": plan.reference,
    }
    path = plan.folder / SETTINGS_FILE
    found = json.loads(path.read_bytes()) if path.exists() else content
    if found not in (content, {**content, "skip_failed": False}):
        raise RunError(f"{plan.folder} has rounds with other settings ({path}). Set another run.folder, or remove it.")
    if not path.exists() or found != content:
        write_json(path, content)


def _has_answers(source: str, config: Config) -> bool:
    """Whether held-out records have preferences, not only prompts."""
    try:
        first = list(islice(read_source(source, columns=config.data.columns), DETECT_RECORDS))
        detect_shape(first, raw=config.data.template == NO_TEMPLATE, columns=config.data.columns)
    except DataError:
        return False
    return True


def _sample(
    plan: Plan, number: int, prompts: str, name: str, answers: int, execute: Execute, into: int | None = None
) -> None:
    """Answers of the model after round `number`, in the folder of that round or another."""
    out = plan.round_folder(number if into is None else into) / name
    if out.exists():
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    sampling = plan.sampling
    # Prompts repeat in every round, and each round should draw different answers.
    seed = sampling.seed + (0 if into is None else into)
    options = ["--prompts", prompts, "--answers", str(answers), "--model", plan.model(number), "--out", str(out)]
    options += ["--temperature", str(sampling.temperature), "--top-p", str(sampling.top_p)]
    options += ["--max-tokens", str(sampling.max_tokens), "--seed", str(seed)]
    execute(["sample", *options, str(plan.config_file), *plan.overrides])


def _judged(plan: Plan, number: int, name: str) -> str:
    """The file with the scored answers of file `name`, which is judged if it has not been yet."""
    folder = plan.round_folder(number)
    if not (folder / JUDGED).exists():
        judge_file(str(folder / name), folder / JUDGED, plan.judge)
    return str(folder / JUDGED)


def _train(plan: Plan, number: int, train: str, held_out: str, execute: Execute) -> None:
    """Train the previous round's model on this round's answers."""
    folder = plan.round_folder(number) / RUN
    if (folder / MODEL_FOLDER).exists():
        return
    start, before = plan.model(0), plan.model(number - 1)
    adapter = plan.config.model.adapter
    settings: dict[str, Any] = {"data.train": _ours(plan, train), "run.folder": str(folder)}
    if held_out != one_source(plan.config.data.eval, "data.eval"):
        settings["data.eval"] = _ours(plan, held_out)
    if adapter is None:
        settings["model.path"] = before
    elif number > 1:
        settings["model.adapter"] = {"path": before, "quantize": adapter.quantize}  # its rank is in the folder
    if plan.reference == "start" and number > 1:
        settings["model.reference"] = start
    words = [f"{name}={to_yaml(value)}" for name, value in settings.items()]
    execute(["train", "--resume=auto", str(plan.config_file), *plan.overrides, *words])
    gc.collect()
    if not (folder / MODEL_FOLDER).exists():
        raise RunError(
            f"{folder}: the run exported no model, so the next round cannot start. Set run.export: true and run the "
            "command again."
        )


def _ours(plan: Plan, file: str) -> Any:
    """A source with isopref's own column names, even if the config's files have others."""
    return {"path": file, "columns": {}} if plan.config.data.columns else file


def _figures(plan: Plan, number: int, compared: str) -> Round:
    """Metrics of the model after a round; for the start model, only those that need no comparison."""
    folder, start = plan.round_folder(number), plan.round_folder(0)
    records = read_records(folder / ANSWERS)
    if not (folder / FIGURES_FILE).exists():
        contest(folder / ANSWERS, start / ANSWERS, plan.judge, folder / "contest")
        shutil.copy(folder / "contest" / FIGURES_FILE, folder / FIGURES_FILE)
    found = json.loads((folder / FIGURES_FILE).read_text())
    answers = [(one.prompt, one.answers[0]) for one in records]
    ended = float(np.mean([one.fields.get("ended", [True])[0] for one in records]))
    base = Round("start model" if number == 0 else f"round {number}", answers, found["tokens"][0], ended)
    base = replace(base, reward=None if found["reward"] is None else found["reward"][0])
    if number == 0:
        return base
    run = read_run(folder / RUN)
    cost = cost_of(run.spot_checks)
    return replace(
        base,
        win_rate=found["win_rate"],
        length_controlled=found["length_controlled"],
        failed=found["failed"],
        kl=_kl(plan, number, records),
        accuracy=run.figure("accuracy"),
        accuracy_before=run.figure("accuracy", "before"),
        correct=(cost.num_kept + cost.num_gained, len(cost.questions)) if cost.questions else None,
        correct_before=(len(cost.known), len(cost.questions)) if cost.questions else None,
    )


def _kl(plan: Plan, number: int, records: Sequence[Judged]) -> dict[str, float] | None:
    """The mean of log(model / start model) over the model's own answers that ended, in nats per answer.

    Estimates the KL divergence from the start model at temperature 1, but leaves out answers cut at the token limit.
    """
    path = plan.round_folder(number) / KL_FILE
    ended = [one for one in records if one.answers[0] and one.fields.get("ended", [True])[0]]
    if plan.sampling.temperature != 1 or plan.sampling.top_p != 1 or len(ended) < 2:
        return None
    if not path.exists():
        texts = path.with_name("kl_answers.jsonl")
        write_labelled(texts, [one._replace(answers=one.answers[:1]) for one in ended])
        logps = [_logps(plan, texts, plan.model(n), path.with_name(f"kl_{n}.jsonl")) for n in (number, 0)]
        write_json(path, asdict(_mean(logps[0] - logps[1])))
    found: dict[str, float] = json.loads(path.read_text())
    return found


def _mean(values: Any) -> Figure:
    return figure(means(values[:, None], np.ones(len(values)))[:, 0])


def _logps(plan: Plan, texts: Path, model: str, out: Path) -> Any:
    config = plan.config
    settings: dict[str, Any] = {
        "model.dtype": config.model.dtype,
        "data.template": config.data.template,
        "run.device": config.run.device,
    }
    settings |= {"layout.rows": config.layout.rows, "model.trust_remote_code": config.model.trust_remote_code}
    out.unlink(missing_ok=True)
    score_file(str(texts), model, out, [f"{name}={to_yaml(value)}" for name, value in settings.items()])
    return np.array([json.loads(line)["logps"][0] for line in out.read_text().splitlines()])


def _report(plan: Plan, rounds: Sequence[Round], display: Display) -> None:
    """One report for all rounds so far."""
    first = rounds[1]
    every = [replace(rounds[0], accuracy=first.accuracy_before, correct=first.correct_before), *rounds[1:]]
    count = f"{len(rounds) - 1} round{'s' if len(rounds) > 2 else ''}"
    title = f"{plan.config_file.stem}: {count}, judged by {plan.judge.by}"
    (plan.folder / REPORT_FILE).write_text(page(title, every, SIDE_BY_SIDE), encoding="utf-8")
    write_json(plan.folder / FIGURES_FILE, {one.name: one.as_json() for one in every})
    display.table(title, *table(every))
    display.say(f"report {plan.folder / REPORT_FILE}")


def check_plan(plan: Plan) -> None:
    """Raise ConfigError for settings that cannot work, before any work is done."""
    if plan.answers < 2:
        raise ConfigError(f"--answers: {plan.answers} answer per prompt leaves nothing to compare. Use 2 or more.")
    config = plan.config
    if config.model.reference is not None:
        raise ConfigError("model.reference: the rounds choose the reference. Remove it, and use --reference.")
    if not config.run.export:
        raise ConfigError("run.export: false leaves no model for the next round. Remove it.")
    if config.objective.trains_reward_model:
        names = ", ".join(weights(config.objective.loss))
        raise ConfigError(f"objective.loss: {names} trains a reward model, which writes no answers. Use another loss.")
    if config.data.group_by_prompt:
        raise ConfigError("data.group_by_prompt: judged answers are grouped by prompt already. Set it to false.")
    open_judge(plan.judge)  # raises for options that are not for this judge
