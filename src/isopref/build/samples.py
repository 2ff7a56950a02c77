"""Answers before and after training: to some held-out prompts, and to the spot checks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from isopref.build import spot_checks
from isopref.build.data import sample_prompts
from isopref.build.model import from_host, load_exported
from isopref.build.run import Run
from isopref.build.spot_checks import Measured, Tokenised
from isopref.data.surprises import special_token_pattern
from isopref.data.table import ExampleTable
from isopref.models.generate import Answer, answers
from isopref.models.policy import Policy
from isopref.runs.write import write_samples
from isopref.types import IntArray

CELL = 400  # characters


@dataclass(frozen=True)
class Before:
    """The model's answers before training: to some held-out prompts and to the spot checks."""

    prompts: list[IntArray]
    answers: list[Answer]
    checks: Tokenised | None
    measured: Measured | None  # on the first rank


def first_answers(run: Run, policy: Policy, tokenizer: Any, held_out: ExampleTable | None) -> Before:
    """Answers before training; none if the model does not fit on one device."""
    prompts, checks = sample_prompts(run, held_out), spot_checks.tokenised(run, policy, tokenizer)
    asked = [what for what, given in (("sample answers", prompts), ("spot checks", checks)) if given]
    if asked and from_host(run, policy):
        run.display.say(f"note: skipping {' and '.join(asked)}: the full model does not fit on one device")
        prompts, checks = [], None
    with policy.plain() as model:
        answers = sample(run, model, tokenizer, prompts)
    measured = None
    if checks is not None and run.env.is_first:
        measured = spot_checks.measure(run, policy, tokenizer, checks)
    return Before(prompts, answers, checks, measured)


def say_answers(run: Run, model: nn.Module, tokenizer: Any, before: Before) -> None:
    """Print answers of the exported model, loaded as a user would, next to the earlier ones; then the spot checks."""
    if not run.env.is_first or not (before.prompts or before.checks):
        return
    model.to("cpu")  # makes room for the exported model
    exported: Any = load_exported(run)
    exported.to(run.env.device)
    if before.prompts:
        _say_samples(run, exported, tokenizer, before)
    if before.checks is not None and before.measured is not None:
        after = spot_checks.measure(run, Policy(exported), tokenizer, before.checks)
        spot_checks.say_cost(run, before.checks, before.measured, after)


def _say_samples(run: Run, exported: Any, tokenizer: Any, before: Before) -> None:
    after = sample(run, exported, tokenizer, before.prompts)
    questions = [last_turn(tokenizer, prompt) for prompt in before.prompts]
    every = list(zip(questions, before.answers, after, strict=True))
    lines = [
        {
            "prompt": question,
            "greedy_before": old.greedy,
            "greedy_after": new.greedy,
            "sampled_before": old.sampled,
            "sampled_after": new.sampled,
        }
        for question, old, new in every
    ]
    write_samples(run.folder, lines)
    rows = [(_end_of(question), old.greedy, new.greedy) for question, old, new in every]
    run.display.table("greedy answers to held-out prompts", ("prompt", "before", "after"), rows)


def sample(run: Run, model: Any, tokenizer: Any, prompts: Sequence[IntArray]) -> list[Answer]:
    """Answers to some prompts, sampled with the config's seed."""
    return answers(model, tokenizer, prompts, seed=run.config.optim.seed)


def last_turn(tokenizer: Any, prompt: IntArray) -> str:
    """The last question in a prompt: the last turn that is not the beginning of the answer."""
    special, text = special_token_pattern(tokenizer), str(tokenizer.decode(prompt))
    turns = [part.strip().partition("\n") for part in (special.split(text) if special else [text])]
    asked = [(role, rest) for role, _, rest in turns if role not in ("", "assistant", "model")]
    role, rest = asked[-1] if asked else ("", text)
    return (rest if role in ("user", "human") else f"{role}\n{rest}").strip()


def _end_of(text: str) -> str:
    """Text shortened to fit a table cell on the terminal."""
    return text if len(text) <= CELL else f"...{text[-CELL:]}"
