"""The answers of a model to a prompt: their keys and seeds, and the records of the file that they go to.

The key of an answer is a digest of what decides it: the model's content, the prompt, the settings, the seed, and its
number. The file is made of records of the shape `list` without scores, which `isopref judge` adds.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from isopref.errors import RunError
from isopref.sample.prompts import Prompt


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn. Temperature 0: the most likely token each time."""

    temperature: float
    top_p: float
    max_tokens: int
    seed: int


class Asked(NamedTuple):
    """One answer that is wanted of one model."""

    key: str
    prompt: Prompt
    number: int
    model: str  # its name, for people


class Answer(NamedTuple):
    """An answer. `tokens` is None where a server does not count them."""

    text: str
    ended: bool  # else it was cut at max_tokens
    tokens: int | None


def answer_key(model: str, prompt: Prompt, rendered: str, sampling: Sampling, number: int) -> str:
    """`model` is the digest of a model's content, `rendered` what it is given of the prompt."""
    content = json.dumps([model, prompt.digest, rendered, asdict(sampling), number])
    return blake2b(content.encode(), digest_size=16).hexdigest()


def answer_seed(prompt: Prompt, sampling: Sampling, number: int) -> int:
    """The seed of one answer, in 63 bits. All models and temperatures share it."""
    content = json.dumps([prompt.digest, sampling.seed, number])
    return int.from_bytes(blake2b(content.encode(), digest_size=8).digest(), "little") >> 1


def records(asked: Sequence[Asked], known: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One record for each prompt, in order, with its answers: those of the first model, then of the next."""
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
    """The answers of a finished file, by their keys. Raises RunError for another file."""
    found: dict[str, Answer] = {}
    try:
        for line in path.read_bytes().splitlines():
            record = json.loads(line)
            columns = (record[name] for name in ("keys", "responses", "ended", "tokens"))
            found.update({key: Answer(*rest) for key, *rest in zip(*columns, strict=True)})
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"--out: {path} exists already and was not written by isopref sample. Choose another."
        ) from error
    return found
