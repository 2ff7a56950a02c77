"""Spot checks of a run: what the model answers and how likely it finds plain text, before and after training."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from isopref.batch.packing import RowKind
from isopref.batch.rows import build_microbatch
from isopref.build.run import Run
from isopref.data.chat import PairEncoder, TokenizeOptions
from isopref.data.spot_checks import SpotChecks, read_spot_checks
from isopref.data.template_files import NO_TEMPLATE
from isopref.errors import DataError
from isopref.examples import Example
from isopref.models.generate import greedy_answers
from isopref.models.hf import context_length
from isopref.models.policy import Policy
from isopref.report.cost import cost_of
from isopref.runs.files import SPOT_CHECKS_FILE
from isopref.runs.write import write_json
from isopref.score import score
from isopref.types import IntArray


@dataclass(frozen=True)
class Tokenised:
    """Spot checks with the tokens of their prompts and texts."""

    checks: SpotChecks
    prompts: list[IntArray]
    texts: list[IntArray]


@dataclass(frozen=True)
class Measured:
    """One model's answers, and the mean log-probability of a token of the texts, in nats (None without texts)."""

    answers: list[str]
    logp: float | None


def check_file(run: Run) -> None:
    """Raise DataError if the file of run.spot_checks cannot be used, before anything is computed."""
    if run.config.run.spot_checks is not None:
        read_spot_checks(run.config.run.spot_checks)


def tokenised(run: Run, policy: Policy, tokenizer: Any) -> Tokenised | None:
    """The file of run.spot_checks, if the config names one. Raises DataError."""
    spec = run.config.run.spot_checks
    if spec is None:
        return None
    checks = read_spot_checks(spec)
    prompts = _encoder(tokenizer, run.config.data.template).encode_prompts([one.prompt for one in checks.questions])
    texts = _encoder(tokenizer, NO_TEMPLATE).encode_prompts(checks.texts)
    most = context_length(policy.model.config.get_text_config())
    for number, tokens in enumerate(texts, start=1):
        if len(tokens) < 2:
            raise DataError(
                f"{spec}: text {number} has only one token, so there is nothing to predict. Use a longer text."
            )
        if most is not None and len(tokens) > most:
            raise DataError(
                f"{spec}: text {number} has {len(tokens)} tokens, but the model's max_position_embeddings is {most}. "
                "Split it into shorter texts."
            )
    return Tokenised(checks, prompts, texts)


def measure(run: Run, policy: Policy, tokenizer: Any, tokens: Tokenised) -> Measured:
    """Answer the questions greedily and score the texts, on this rank alone."""
    with policy.plain() as model:
        answers = greedy_answers(model, tokenizer, tokens.prompts)
    logp = text_logp(policy, tokens.texts, run.config.layout.rows) if tokens.texts else None
    return Measured(answers, logp)


@torch.no_grad()
def text_logp(policy: Policy, texts: Sequence[IntArray], kind: RowKind) -> float:
    """Mean log-probability of a token of the texts, each given those before it; a text's first token is not scored."""
    device = next(policy.parameters()).device
    total = 0.0
    for tokens in texts:
        alone = Example(tokens[:1], (tokens[1:],))
        total += score(policy, build_microbatch([alone], kind).to(device)).logp.item()
    return total / sum(len(tokens) - 1 for tokens in texts)


def say_cost(run: Run, tokens: Tokenised, before: Measured, after: Measured) -> None:
    """Print what was kept and what was lost as a table, and write it to the run folder."""
    questions = [
        {
            "prompt": question.prompt,
            "expect": list(question.expect),
            "before": old,
            "after": new,
            "correct_before": question.is_answered_by(old),
            "correct_after": question.is_answered_by(new),
        }
        for question, old, new in zip(tokens.checks.questions, before.answers, after.answers, strict=True)
    ]
    text = None
    if tokens.texts:
        num_tokens = sum(len(one) - 1 for one in tokens.texts)
        text = {"tokens": num_tokens, "logp_before": before.logp, "logp_after": after.logp}
    found = {"questions": questions, "text": text}
    write_json(run.folder / SPOT_CHECKS_FILE, found)
    cost = cost_of(found)
    rows = [*cost.rows(), *((f"lost: {one['prompt']}", one["before"], one["after"]) for one in cost.lost)]
    run.display.table("spot checks: what it cost", ("", "before", "after"), rows)


def _encoder(tokenizer: Any, template: str | None) -> PairEncoder:
    return PairEncoder(
        tokenizer, TokenizeOptions(template=template, max_length=None, truncation="drop", on_bad="error")
    )
