"""A model's answers to a prompt: their keys and seeds, and the records of the output file.

The key of an answer is a digest of everything it depends on: the model's content, the prompt, the settings, the seed,
and its number. The file holds records of the shape `list` without scores, which `isopref judge` adds.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from isopref.errors import ConfigError, RunError
from isopref.sample.prompts import Prompt

LOWEST_TEMPERATURE = 1e-6


@dataclass(frozen=True)
class Sampling:
    """How answers are sampled. Temperature 0: the most likely token each time."""

    temperature: float
    top_p: float
    max_tokens: int
    seed: int

    def __post_init__(self) -> None:
        """Raise ConfigError for NaN and Inf, which pass the parser's check of limits, and if logits would overflow."""
        if not (self.temperature == 0 or LOWEST_TEMPERATURE <= self.temperature < math.inf):
            raise ConfigError(
                f"--temperature: must be 0 (always take the most likely token) or at least {LOWEST_TEMPERATURE:g}; "
                f"found {self.temperature:g}."
            )
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"--top-p: must be a number from 0.001 to 1; found {self.top_p:g}.")


class Asked(NamedTuple):
    """One requested answer of one model."""

    key: str
    prompt: Prompt
    number: int
    model: str  # its name, for people


class Answer(NamedTuple):
    """An answer. `tokens` is None if a server does not count them."""

    text: str
    ended: bool  # otherwise it was cut at max_tokens
    tokens: int | None


def answer_key(model: str, prompt: Prompt, rendered: str, sampling: Sampling, number: int) -> str:
    """`model` is the digest of a model's content, `rendered` the prompt as the model reads it."""
    content = json.dumps([model, prompt.digest, rendered, asdict(sampling), number])
    return blake2b(content.encode(), digest_size=16).hexdigest()


def answer_seed(prompt: Prompt, sampling: Sampling, number: int) -> int:
    """The seed of one answer, in 63 bits. It is the same for all models and temperatures."""
    content = json.dumps([prompt.digest, sampling.seed, number])
    return int.from_bytes(blake2b(content.encode(), digest_size=8).digest(), "little") >> 1


def records(asked: Sequence[Asked], known: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One record per prompt, in order, with its answers, model by model."""
    found: dict[str, dict[str, Any]] = {}
    for one in asked:
        answer = Answer(*known[one.key])
        record = found.setdefault(
            one.prompt.digest,
            {**one.prompt.record, "responses": [], "models": [], "ended": [], "tokens": [], "keys": []},
        )
        record["responses"].append(answer.text)
        record["models"].append(one.model)
        record["ended"].append(answer.ended)
        record["tokens"].append(answer.tokens)
        record["keys"].append(one.key)
    return list(found.values())


def read_answers(path: Path) -> dict[str, Answer]:
    """The answers of a finished file, by key. Raises RunError for any other file."""
    found: dict[str, Answer] = {}
    try:
        for line in path.read_bytes().splitlines():
            record = json.loads(line)
            columns = (record[name] for name in ("keys", "responses", "ended", "tokens"))
            found.update({key: Answer(*rest) for key, *rest in zip(*columns, strict=True)})
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"--out: {path} already exists and was not written by isopref sample. Choose another file."
        ) from error
    return found
