"""Answers of several turns: where they diverge, and which of their turns are trained.

Owns `data.train_on` and the weights of messages. templates.py and chat.py locate turns in the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from isopref.data.messages import REASONING, DefectError, Message, Turns

TrainOn = Literal["assistant", "last", "final"]
WEIGHT = "weight"  # of a message: the weight of its tokens. Templates never see it.


class Trained(NamedTuple):
    """A trained turn."""

    number: int  # in the conversation
    weight: float
    final: bool  # whether only the text after its reasoning is trained


class Conversation(NamedTuple):
    """A prompt with one answer, up to the last trained turn."""

    messages: list[Message]
    num_prompt: int  # turns of the prompt
    trained: tuple[Trained, ...]
    trains_last: bool  # whether the last assistant turn is trained


def conversation(prompt: list[Message], answer: list[Message], train_on: TrainOn, name: str) -> Conversation:
    """The trained turns of an answer. Raises DefectError if there are none."""
    messages = [*prompt, *answer]
    spoken = [n for n in range(len(prompt), len(messages)) if messages[n]["role"] == "assistant"]
    chosen = spoken if train_on == "assistant" else spoken[-1:]
    trained = tuple(
        Trained(n, float(messages[n].get(WEIGHT, 1.0)), train_on == "final")
        for n in chosen
        if messages[n].get(WEIGHT, 1.0) != 0
    )
    if not trained:
        which = "only assistant turns" if train_on == "assistant" else "a last assistant turn"
        found = f"{which} of weight 0" if spoken else "no assistant turn"
        raise DefectError("weight", f"'{name}' has {found}, so there is nothing to train on")
    # Turns after the last trained one have no effect, and templates render a last turn the way the model sees it.
    last = trained[-1].number
    return Conversation(messages[: last + 1], len(prompt), trained, trains_last=last == spoken[-1])


def part(prompt: list[Message], answers: Sequence[list[Message]]) -> tuple[list[Message], list[list[Message]]]:
    """The prompt plus the turns that all answers begin with, and the rest of each answer. Raises DefectError."""
    shared = 0
    while all(len(answer) > shared for answer in answers) and all(
        plain(answer[shared]) == plain(answers[0][shared]) for answer in answers
    ):
        shared += 1
    rest = [answer[shared:] for answer in answers]
    if not any(rest):
        raise DefectError(
            "tie", "the answers differ only in the weights of their messages, so their tokens are the same"
        )
    if not all(rest):
        raise DefectError("diverging", "one answer is the beginning of another, so it has no turn of its own")
    return [*prompt, *map(plain, answers[0][:shared])], rest


def split_whole(sides: Sequence[list[Message]]) -> tuple[list[Message], list[list[Message]]]:
    """The prompt that all conversations begin with, and the rest of each. Raises DefectError."""
    prompt, answers = part([], sides)
    if not any(turn["role"] == "user" for turn in prompt):
        raise DefectError("diverging", "the conversations differ before the end of their first user turn")
    return prompt, answers


def plain(message: Message) -> Message:
    """A message as a template sees it."""
    return {key: value for key, value in message.items() if key != WEIGHT}


def is_conversation(answer: Turns) -> bool:
    """Whether an answer has several turns."""
    return not isinstance(answer, str) and len(answer) > 1


def is_empty(turns: Turns) -> bool:
    """Whether there is neither text, nor reasoning, nor a tool call."""
    if isinstance(turns, str):
        return not turns.strip()
    spoken = [turn["content"] for turn in turns]
    thought = [turn.get(REASONING, "") for turn in turns if turn["role"] == "assistant"]
    return not any(text.strip() for text in spoken + thought) and not any(turn.get("tool_calls") for turn in turns)
