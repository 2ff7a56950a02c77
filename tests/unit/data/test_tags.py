"""{% generation %} tags of a template: believed where they prove the end of a turn, and only there."""

from __future__ import annotations

from typing import Any

import pytest

from isopref.data.chat import EncodedPair, PairEncoder, TokenizeOptions
from isopref.data.judged import PreferencePair
from isopref.testing.tokenizers import tiny_tokenizer
from support.family import trained_texts

OPEN, CLOSE = "{% generation %}", "{% endgeneration %}"
CALLS = "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}</call>{% endfor %}"


def template(turn: str) -> str:
    return (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}" + turn + "{% else %}"
        "{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


def turn(role: str, content: str = "", **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


CALL = turn("assistant", tool_calls=[{"type": "function", "function": {"name": "add", "arguments": {}}}])
THOUGHT = turn("assistant", "4", reasoning_content="so")


def trained(template: str, *answer: dict[str, Any]) -> tuple[list[str], set[str]]:
    """What is trained of an answer, and what was noted."""
    tokenizer = tiny_tokenizer(None)
    tokenizer.chat_template = template
    options = TokenizeOptions(template=None, max_length=None, truncation="drop", on_bad="error")
    pair = PreferencePair([turn("user", "2 + 2?")], list(answer), "no", None, 1.0, "file:7")
    (result,) = PairEncoder(tokenizer, options).encode([pair])
    assert isinstance(result, EncodedPair), result
    return trained_texts(result.tokens, 0, tokenizer), set(result.notes)


@pytest.mark.parametrize(
    "written",
    [
        # Reasoning and text are tagged one by one and calls are not: as many blocks as turns, but not one for each.
        "{% if m.reasoning_content %}" + OPEN + "<think>{{ m.reasoning_content }}</think>" + CLOSE + "{% endif %}"
        "{% if m.content %}" + OPEN + "{{ m.content }}" + CLOSE + "{% endif %}" + CALLS + "<|im_end|>\n",
        # The text alone is tagged.
        "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
        + OPEN + "{{ m.content }}" + CLOSE + CALLS + "<|im_end|>\n",
        # All but the end token is tagged.
        OPEN + "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
        + CALLS + CLOSE + "<|im_end|>\n",
    ],
)  # fmt: skip
def test_tags_that_leave_out_a_part_of_the_turn_are_not_believed(written: str) -> None:
    texts, notes = trained(template(written), CALL, turn("tool", "it is 4"), THOUGHT)
    assert texts == ["<call>add</call><|im_end|>", "<think>so</think>4<|im_end|>"]
    assert not notes


def test_the_end_token_is_trained_where_tags_exclude_it_and_it_is_not_eos() -> None:
    texts, notes = trained(
        template(OPEN + "{{ m.content }}" + CLOSE + "<|eot|>"), *2 * [turn("assistant", "4"), turn("user", "why?")]
    )
    assert texts == ["4<|eot|>", "4<|eot|>"]
    assert not notes


def test_tags_prove_an_end_where_marks_cannot() -> None:
    """This template writes the calls that it knows by name, so a mark in the name changes the text."""
    known = (
        OPEN + "{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ '<sum>' if c.function.name == 'add' else '<other>' ~ c.function.name }}{% endfor %}<|im_end|>"
        + CLOSE
        + "\n"
    )
    texts, notes = trained(template(known), CALL, turn("tool", "it is 4"), turn("assistant", "4"))
    assert texts == ["<sum><|im_end|>", "4<|im_end|>"]
    assert not notes
