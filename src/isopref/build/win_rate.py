"""`isopref eval --win-rate`: two models answer held-out prompts, a judge compares, and win rates get intervals."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from isopref.build.judge import Judged, JudgeOptions, Scores, open_judge, read_records
from isopref.build.sample import Job, sample_file
from isopref.config.schema import Config
from isopref.config.values import SourceConfig, SourcesOrShare
from isopref.engine.display import Display
from isopref.errors import ConfigError, DataError
from isopref.evaluate.win_rate import WinRate, win_rate
from isopref.ledger import Ledger
from isopref.runs.write import make_folder, write_json
from isopref.sample.answers import Sampling

FIGURES_FILE = "figures.json"
JUDGED_FILE = "judged.jsonl"


@dataclass(frozen=True)
class Contest:
    """The result of comparing two models' answers to the same prompts. `reward`: mean scores, if the judge gives any.

    `rate` is None if no comparison counts.
    """

    rate: WinRate | None
    tokens: tuple[float, float]  # mean tokens of an answer
    reward: tuple[float, float] | None
    dropped: int  # prompts with a tie or a disagreement that does not count
    failed: int = 0  # prompts without a verdict

    def as_json(self) -> dict[str, Any]:
        rate = {"win_rate": None, "length_controlled": None} if self.rate is None else self.rate.as_json()
        return {**rate, "tokens": self.tokens, "reward": self.reward, "dropped": self.dropped, "failed": self.failed}


def one_source(sources: SourcesOrShare | None, setting: str) -> str:
    """The prompt file that a config field names. Raises ConfigError if it is not a single path."""
    if isinstance(sources, SourceConfig):
        plain = SourceConfig(path=sources.path)
        sources = sources.path if sources == plain else [sources]
    if not isinstance(sources, str):
        raise ConfigError(
            f"{setting}: prompts are read from one file, folder or data set. Name it, as {setting}: FILE."
        )
    return sources


def win_rate_of(
    config: Config, *, name: str, model: str, against: str, judge: JudgeOptions, sampling: Sampling, folder: Path
) -> Contest:
    """Let both models answer the prompts of data.eval, and judge them. Everything is saved in `folder`, to resume."""
    prompts = one_source(config.data.eval, "data.eval")
    make_folder("--out", folder)
    files = [folder / "model.jsonl", folder / "against.jsonl"]
    for path, file in zip((model, against), files, strict=True):
        sample_file(config, Job(prompts, file, sampling, 1, (path,)), name=name)
    found = contest(files[0], files[1], judge, folder)
    if found.rate is None:
        raise DataError(
            f"{folder}: no comparison counts: {found.dropped} ties or disagreements (try --ties keep), {found.failed} "
            "without a verdict."
        )
    say_contest(found, model, against, Display())
    return found


def contest(file: Path, other: Path, options: JudgeOptions, folder: Path) -> Contest:
    """Judge the first answers of two files to the same prompts. Writes the judged answers and the win rates."""
    mine, theirs = _first_answers(file), _first_answers(other)
    if mine.keys() != theirs.keys():
        raise DataError(f"{file} and {other} have answers to different prompts. Sample both from the same file.")
    records = [Judged(one.prompt, [one.answers[0], theirs[key].answers[0]], one.fields) for key, one in mine.items()]
    folder.mkdir(parents=True, exist_ok=True)
    judge, ledger = open_judge(options), Ledger(folder / JUDGED_FILE)
    with ledger.alone():
        scores = judge.scores(records, ledger, Display())
    outcomes = [outcome(record.answers, pair) for record, pair in zip(records, scores, strict=True)]
    tokens = np.array([[_tokens(mine[key]), _tokens(theirs[key])] for key in mine])
    counted = np.array([one is not None for one in outcomes])
    won = np.array([one for one in outcomes if one is not None])
    rate = win_rate(won, *tokens[counted].T) if len(won) else None
    failed = len(judge.failed)
    found = Contest(rate, _pair(tokens.mean(axis=0)), _rewards(options, scores), int((~counted).sum()) - failed, failed)
    lines = [
        {"prompt": record.prompt, "responses": record.answers, "scores": pair, "won": one}
        for record, pair, one in zip(records, scores, outcomes, strict=True)
    ]
    ledger.finish(lines)
    write_json(folder / FIGURES_FILE, found.as_json())
    return found


def outcome(answers: Sequence[str], scores: Scores) -> float | None:
    """The score of the first of two answers: 1, 0.5 or 0; None if the comparison does not count."""
    first, second = answers
    if first == second:
        return 0.5
    if not first or not second:
        return 1.0 if first else 0.0
    if scores[0] is None or scores[1] is None:
        return None
    return 0.5 + 0.5 * float(np.sign(scores[0] - scores[1]))


def _first_answers(file: Path) -> dict[str, Judged]:
    """The records of a file, keyed by what `isopref sample` distinguishes prompts by."""
    asked = ("tools", "chat_template_kwargs")
    return {json.dumps([one.prompt, *map(one.fields.get, asked)]): one for one in read_records(file)}


def _tokens(record: Judged) -> float:
    """Tokens of the first answer, or its words if the server did not count tokens."""
    counted = record.fields.get("tokens", [None])[0]
    return float(len(record.answers[0].split()) if counted is None else counted)


def _rewards(options: JudgeOptions, scores: Sequence[Scores]) -> tuple[float, float] | None:
    if "://" in options.by:
        return None  # such a judge compares answers and gives no rewards
    both = np.array([pair for pair in scores if None not in pair], dtype=float)
    return _pair(both.mean(axis=0)) if len(both) else None


def _pair(values: Any) -> tuple[float, float]:
    return float(values[0]), float(values[1])


def say_contest(found: Contest, model: str, against: str, display: Display) -> None:
    """The figures, as a table."""
    rate = found.rate
    assert rate is not None
    rows = [
        (f"win rate of {model}", _cell(rate.win_rate)),
        ("win rate, length-controlled", _cell(rate.length_controlled)),
        ("wins, ties, losses", f"{rate.wins}, {rate.ties}, {rate.losses}"),
        ("mean tokens per answer", f"{found.tokens[0]:.1f}, against {found.tokens[1]:.1f}"),
    ]
    if found.reward is not None:
        rows.append(("mean reward", f"{found.reward[0]:.3f}, against {found.reward[1]:.3f}"))
    if found.dropped:
        rows.append(("ties and disagreements dropped", str(found.dropped)))
    if found.failed:
        rows.append(("comparisons without a verdict, left out", str(found.failed)))
    display.table(f"{rate.prompts} held-out prompts, against {against}, with 95% intervals", ("", "value"), rows)


def _cell(figure: Any) -> str:
    return f"{figure.value:.3f} [{figure.low:.2f}, {figure.high:.2f}]"
