"""The prompts of a source, whose records hold only a prompt, or a prompt with answers in any shape isopref reads."""

import json
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import islice
from typing import Any, NamedTuple

from isopref.data.judged import BadPairError, Preference
from isopref.data.messages import Message, Turns, kind
from isopref.data.shapes import DETECT_RECORDS, Shape, detect_shape, to_pair
from isopref.data.source import Record, Source
from isopref.data.templates import as_messages
from isopref.errors import DataError

FORMS = (
    'A prompt is {"prompt": text or messages}, optionally with system and tools; {"messages": [...]}; '
    '{"instruction": ..., "input": ...}; or a record with answers, as data.train takes'
)


class Prompt(NamedTuple):
    """A prompt, and where it was found."""

    turns: Turns
    tools: list[dict[str, Any]] | None
    template_kwargs: Mapping[str, Any]
    origin: str

    @property
    def messages(self) -> list[Message]:
        return as_messages(self.turns, "user")

    @property
    def digest(self) -> str:
        """A digest of the prompt: the same for every model, template and file."""
        text = json.dumps([self.messages, self.tools, dict(self.template_kwargs)], sort_keys=True)
        return blake2b(text.encode(), digest_size=16).hexdigest()

    @property
    def record(self) -> dict[str, Any]:
        """The columns of a record with this prompt."""
        found: dict[str, Any] = {"prompt": self.turns}
        if self.tools:
            found["tools"] = self.tools
        if self.template_kwargs:
            found["chat_template_kwargs"] = dict(self.template_kwargs)
        return found


class Prompts(NamedTuple):
    """The distinct prompts of a source, in order, and how many records were dropped."""

    prompts: list[Prompt]
    repeated: int
    dropped: int  # unusable


def read_prompts(source: Source, *, raw: bool, on_bad: str) -> Prompts:
    """The prompts of a source. `raw`: no chat template. Raises DataError."""
    shape = _shape(list(islice(source, DETECT_RECORDS)), source, raw)
    found: dict[str, Prompt] = {}
    read = dropped = 0
    for record in source:
        read += 1
        try:
            pair = _alone(record, raw) if shape is None else to_pair(record, shape, raw=raw)
        except BadPairError:
            if on_bad == "error":
                raise
            dropped += 1
            continue
        prompt = Prompt(pair.prompt, pair.tools, pair.template_kwargs, pair.origin)
        found.setdefault(prompt.digest, prompt)
    return Prompts(list(found.values()), read - dropped - len(found), dropped)


def _shape(first: Sequence[Record], source: Source, raw: bool) -> Shape | None:
    """The shape of records with answers; None for prompts without answers."""
    try:
        return detect_shape(first, raw=raw, columns=source.columns)
    except DataError:
        return None


def _alone(record: Record, raw: bool) -> Preference:
    """A prompt without answers, parsed like a pair. Raises BadPairError."""
    completed = _completed(record)
    try:
        shape = detect_shape([completed], raw=raw)
    except DataError:
        columns = ", ".join(record.fields) or "(none)"
        raise BadPairError(record.origin, "prompt", f"no prompt in the columns {columns}. {FORMS}") from None
    return to_pair(completed, shape, raw=raw)


def _completed(record: Record) -> Record:
    """The record with two placeholder answers."""
    fields = dict(record.fields)
    if fields.get("prompt") is None and kind(fields.get("messages")) == "messages":
        fields["prompt"] = _asked(fields.pop("messages"))
    of_messages = kind(fields.get("prompt")) == "messages"
    for side in ("chosen", "rejected"):
        fields[side] = [{"role": "assistant", "content": side}] if of_messages else side
    used = (
        "prompt",
        "instruction",
        "input",
        "system",
        "history",
        "tools",
        "chat_template_kwargs",
        "chosen",
        "rejected",
    )
    return Record({name: fields[name] for name in used if name in fields}, record.origin)


def _asked(messages: Any) -> Any:
    """A conversation up to the last turn that is not the assistant's."""
    turns = [messages] if isinstance(messages, dict) else list(messages)
    while turns and turns[-1].get("role", turns[-1].get("from")) in ("assistant", "gpt"):
        turns.pop()
    return turns


def every(prompts: Sequence[Prompt], answers: int) -> Iterator[tuple[Prompt, int]]:
    """Every requested answer: its prompt, and its number."""
    for prompt in prompts:
        for number in range(answers):
            yield prompt, number
