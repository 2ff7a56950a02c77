"""`isopref judge`: scores for the answers of a file, by a reward model, a Python function, or a language model.

Each judge is a class with `scores`: the scores of every record's answers, None for an answer without one. Expensive
judgements are saved as they arrive (ledger.py).
"""

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Protocol

from isopref.build.requests import in_parallel
from isopref.build.sample import REQUESTS, model_path
from isopref.build.score import score_file
from isopref.data.messages import DefectError, Turns, kind, read_prompt, read_text
from isopref.data.shapes import with_system
from isopref.data.sources import read_source
from isopref.engine.display import Display
from isopref.errors import ConfigError, DataError
from isopref.judge.comparing import (
    Comparison,
    NoVerdictError,
    Tally,
    Ties,
    Verdict,
    comparisons,
    question,
    read_rubric,
    read_verdict,
    scores_of,
    verdict_of,
)
from isopref.judge.functions import is_function, load_function
from isopref.judge.functions import scores_of as function_scores
from isopref.ledger import Ledger, check_out
from isopref.models.reward import is_reward_model
from isopref.remote import Server, server

ANSWERS = ("responses", "generations", "answers", "completions")
JUDGE_TOKENS = 512
ASKS = 3  # attempts to get a verdict from a judge
HOPELESS = 32  # judging stops if the first comparisons, this many, all end without a verdict
NAMED = 5  # prompts named in a message

Scores = list[float | None]


class Judged(NamedTuple):
    """A record with answers."""

    prompt: Turns
    answers: list[str]
    fields: Mapping[str, Any]


class Judge(Protocol):
    """Assigns scores to answers."""

    def scores(self, records: Sequence[Judged], ledger: Ledger, display: Display) -> list[Scores]: ...

    @property
    def counts(self) -> Mapping[str, int]:
        """What a user should know about the judgements."""
        ...

    @property
    def failed(self) -> Collection[int]:
        """The records with a comparison that has no verdict and was skipped."""
        ...


@dataclass(frozen=True)
class JudgeOptions:
    """Settings for any judge."""

    by: str
    model: str | None = None  # a model name on the server
    rubric: Path | None = None
    ties: Ties = "drop"
    parallel: int | None = None
    skip_failed: bool = False  # leave out comparisons without a verdict
    overrides: tuple[str, ...] = ()
    prefix: str = ""  # of --model and --parallel on the command line, for messages


def judge_file(file: str, out: Path, options: JudgeOptions) -> None:
    """Score the answers of every record of a file and write `out`. Raises UserError."""
    check_out(out)
    with Ledger(out).alone():
        _judge_file(file, out, options, Display())


def _judge_file(file: str, out: Path, options: JudgeOptions, display: Display) -> None:
    records = read_records(file)
    judge = open_judge(options)
    found = judge.scores(records, Ledger(out), display)
    written, counts = judged_lines(records, found, options.by)
    for what, count in {**judge.counts, **counts}.items():
        if count:
            display.say(f"judge {count} {what}")
    if not written:
        raise DataError(
            f"{file}: no record has two answers with different scores, so there is nothing to train on. Sample more "
            "answers per prompt, or use another judge."
        )
    Ledger(out).finish(written)
    display.say(f"wrote {out}: {len(written)} of {len(records)} prompts, with scores by {options.by}")


def read_records(file: str | Path) -> list[Judged]:
    """The records of a file of answers. Raises DataError."""
    found = []
    for record in read_source(str(file)):
        column = next((name for name in ANSWERS if isinstance(record.fields.get(name), list)), None)
        prompt: Any = record.fields.get("prompt", record.fields.get("instruction"))
        answers = record.fields[column] if column else []
        if column is None or kind(prompt) not in ("text", "messages") or not all(isinstance(a, str) for a in answers):
            raise DataError(
                f"{record.origin}: expected prompt and responses (a list of texts), found "
                f"{', '.join(record.fields) or 'nothing'}. isopref sample writes such a file."
            )
        if ignored := [name for name in ("input", "history") if record.fields.get(name)]:
            raise DataError(
                f"{record.origin}: the judge would not read {', '.join(ignored)}. Put everything that was asked into "
                "prompt, as isopref sample does."
            )
        rest = {name: value for name, value in record.fields.items() if name not in (column, "scores")}
        found.append(Judged(_asked(prompt, rest.get("system"), record.origin), list(answers), rest))
    return found


def _asked(prompt: Any, system: Any, origin: str) -> Turns:
    """The prompt that a judge reads, with the column 'system' as its first turn. Raises DataError."""
    try:
        turns: Turns = read_text(prompt, "prompt") if isinstance(prompt, str) else read_prompt(prompt, "prompt")
        return with_system(turns, read_text(system, "system")) if system else turns
    except DefectError as defect:
        raise DataError(f"{origin}: {defect.args[-1]}.") from None


def judged_lines(
    records: Sequence[Judged], scores: Sequence[Scores], by: str
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """The records that can be trained on, with their scores, and how many cannot."""
    written = []
    for record, mine in zip(records, scores, strict=True):
        usable = {one for one in mine if one is not None}
        if len(usable) > 1:
            written.append({**record.fields, "responses": record.answers, "scores": mine, "judge": by})
    return written, {"prompts without two answers of different scores, left out": len(records) - len(written)}


def open_judge(options: JudgeOptions) -> Judge:
    """The judge that --by names. Raises ConfigError."""
    if "://" in options.by:
        return LanguageModel(server(options.by, setting="--by"), options)
    only_servers = {
        f"--{options.prefix}model": options.model,
        "--rubric": options.rubric,
        f"--{options.prefix}parallel": options.parallel,
        "--skip-failed": options.skip_failed or None,
    }
    for name, value in only_servers.items():
        if value is not None:
            raise ConfigError(f"{name}: applies only to a judge at a URL, but --by is {options.by}. Remove it.")
    if options.ties != "drop":
        raise ConfigError(f"--ties: applies only to a judge at a URL, but --by is {options.by}. Remove it.")
    if is_function(options.by):
        if options.overrides:
            raise ConfigError(
                f"{options.overrides[0]}: settings apply only to a reward model, but --by is a function. Remove it."
            )
        return Function(options.by)
    if options.by.endswith(".py"):
        raise ConfigError(f"--by: {options.by} names a file, but no function in it. Write {options.by}:FUNCTION.")
    path = model_path(options.by)
    if not is_reward_model(path, trust_remote_code="model.trust_remote_code=true" in options.overrides, setting="--by"):
        raise ConfigError(
            f"--by: {path} is not a reward model (the folder of a sequence-classification model). Pass one, "
            "module:function, or a URL."
        )
    return RewardModel(path, options.overrides)


class Function:
    """A Python function."""

    def __init__(self, name: str):
        self.name, self.function = name, load_function(name)
        self.counts: Counter[str] = Counter()
        self.failed: Collection[int] = ()

    def scores(self, records: Sequence[Judged], ledger: Ledger, display: Display) -> list[Scores]:
        found: list[Scores] = []
        for record in records:
            asked = [one for one in record.answers if one]
            given = function_scores(self.function, self.name, record.prompt, asked) if asked else []
            found.append(_with_gaps(record.answers, iter(given), self.counts))
        return found


def _with_gaps(answers: Sequence[str], scores: Iterable[float], counts: Counter[str]) -> Scores:
    """Scores of all answers; None for empty ones, which cannot be trained on."""
    given = iter(scores)
    counts["empty answers, without a score"] += sum(not one for one in answers)
    return [next(given) if one else None for one in answers]


class RewardModel:
    """A reward model: the answers are scored as `isopref score` does."""

    def __init__(self, path: str, overrides: Sequence[str]):
        self.path, self.overrides = path, overrides
        self.counts: Counter[str] = Counter()
        self.failed: Collection[int] = ()

    def scores(self, records: Sequence[Judged], ledger: Ledger, display: Display) -> list[Scores]:
        with TemporaryDirectory(dir=ledger.out.absolute().parent, prefix=".judging-") as folder:
            asked, given = Path(folder) / "answers.jsonl", Path(folder) / "rewards.jsonl"
            write_labelled(asked, records)
            score_file(str(asked), self.path, given, self.overrides, is_kept=False)
            rewards = iter([json.loads(line)["rewards"][0] for line in given.read_text().splitlines()])
        return [_with_gaps(record.answers, rewards, self.counts) for record in records]


def write_labelled(path: Path, records: Sequence[Judged]) -> None:
    """Every non-empty answer as a separate record for `isopref score`."""
    kept = ("tools", "chat_template_kwargs")
    with path.open("w", encoding="utf-8") as file:
        for record in records:
            more = {name: record.fields[name] for name in kept if name in record.fields}
            for answer in filter(None, record.answers):
                completion = answer if isinstance(record.prompt, str) else [{"role": "assistant", "content": answer}]
                line = {"prompt": record.prompt, "completion": completion, "label": True, **more}
                file.write(json.dumps(line) + "\n")


class LanguageModel:
    """A language model on a server that compares two answers at a time, in both orders."""

    def __init__(self, remote: Server, options: JudgeOptions):
        if options.overrides:
            raise ConfigError(
                f"{options.overrides[0]}: settings apply only to a reward model, but --by is a URL. Remove it."
            )
        self.remote, self.ties, self.rubric = remote, options.ties, read_rubric(options.rubric)
        self.parallel = options.parallel or REQUESTS
        self.skip_failed = options.skip_failed
        self.asked_model, self.model_option = options.model, f"--{options.prefix}model"
        self.tally = Tally()
        self.empty: Counter[str] = Counter()
        self.failed: set[int] = set()

    @property
    def counts(self) -> Mapping[str, int]:
        word = "kept as ties" if self.ties == "keep" else "dropped"
        counts = self.tally.counts
        return {
            "comparisons decided, both orders agreeing": counts["decided"],
            f"comparisons tied, {word}": counts["ties"],
            f"comparisons in which the orders disagree, {word}": counts["disagreements"],
            "comparisons without a verdict, left out": counts["failed"],
            **self.empty,
        }

    def scores(self, records: Sequence[Judged], ledger: Ledger, display: Display) -> list[Scores]:
        model = self.asked_model or next(iter(self.remote.models()), None)
        if model is None:
            raise ConfigError(f"--by: {self.remote.url} lists no models. Name one: {self.model_option} NAME.")
        judge = blake2b(json.dumps([self.remote.url, model, self.rubric]).encode(), digest_size=16).hexdigest()
        asked = [
            one
            for number, record in enumerate(records)
            for one in comparisons(number, record.prompt, record.answers, judge)
        ]
        known = ledger.read({one.key for one in asked})
        if known:
            display.say(f"resume: {len(known)} of {len(asked)} comparisons are already judged")
        missing = [one for one in asked if one.key not in known]

        replies: list[str] = []  # without a verdict

        def ask(one: Comparison) -> Verdict | None:
            try:
                return self._ask(model, records[one.record], one)
            except NoVerdictError as error:
                replies.append(str(error))
                if not known and len(replies) >= HOPELESS:
                    raise self._hopeless(model, replies) from error
                return None

        with display.bar("judge", len(missing)) as advance:
            for one, verdict in in_parallel(ask, missing, self.parallel):
                if verdict is not None:
                    known[one.key] = verdict
                    ledger.append({one.key: verdict})
                advance(1, "")
        if replies and not self.skip_failed:
            raise self._incomplete(model, records, asked, known, replies[-1])
        of_record: list[list[Comparison]] = [[] for _ in records]
        for one in asked:
            of_record[one.record].append(one)
        self.failed = {one.record for one in asked if one.key not in known}
        return [self._joined(record, mine, known) for record, mine in zip(records, of_record, strict=True)]

    def _ask(self, model: str, record: Judged, one: Comparison) -> Verdict:
        first, second = record.answers[one.first], record.answers[one.second]
        a, b = (second, first) if one.swapped else (first, second)
        text = question(self.rubric, record.prompt, a, b)
        for attempt in range(ASKS):
            reply = self.remote.complete(
                model,
                [{"role": "user", "content": text}],
                temperature=0.0 if attempt == 0 else 0.7,
                max_tokens=JUDGE_TOKENS,
                seed=attempt,
            )
            letter = read_verdict(reply.text)
            if letter is not None:
                return verdict_of(letter, one.swapped)
        raise NoVerdictError(repr(reply.text[-100:]))

    def _hopeless(self, model: str, replies: Sequence[str]) -> NoVerdictError:
        return NoVerdictError(
            f"--by: {model} gave no verdict on any of the first {len(replies)} comparisons, in {ASKS} replies each; "
            f"the last one ends with {replies[-1]}. Simplify the question (--rubric), or use another model."
        )

    def _incomplete(
        self,
        model: str,
        records: Sequence[Judged],
        asked: Sequence[Comparison],
        known: Mapping[str, Verdict],
        reply: str,
    ) -> NoVerdictError:
        """The comparisons without a verdict, counted, and their prompts."""
        every = {one[1:4] for one in asked}
        failed = {one[1:4] for one in asked if one.key not in known}
        numbers = sorted({record for record, *_ in failed})
        named = [
            f"record {number + 1} ({json.dumps(records[number].prompt, ensure_ascii=False)[:60]})"
            for number in numbers[:NAMED]
        ]
        more = f" and {len(numbers) - NAMED} more" if len(numbers) > NAMED else ""
        return NoVerdictError(
            f"--by: {model} gave no verdict on {len(failed)} of {len(every)} comparisons, in {ASKS} replies each: "
            f"{', '.join(named)}{more}. A reply ends with {reply}. Nothing was written, and all other verdicts are "
            "kept: run the command again to ask only about the missing ones, or add --skip-failed to leave them out."
        )

    def _joined(self, record: Judged, asked: Sequence[Comparison], known: Mapping[str, Verdict]) -> Scores:
        both: dict[tuple[int, int], list[Verdict | None]] = {}
        for one in asked:
            both.setdefault((one.first, one.second), []).append(known.get(one.key))
        verdicts: dict[tuple[int, int], Verdict | None] = {}
        for pair, (one_order, other_order) in both.items():
            if one_order is None or other_order is None:
                self.tally.counts["failed"] += 1
            else:
                verdicts[pair] = self.tally.joined(one_order, other_order)
        self.empty["empty answers, without a score"] += sum(not one for one in record.answers)
        return scores_of(len(record.answers), verdicts, self.ties)
