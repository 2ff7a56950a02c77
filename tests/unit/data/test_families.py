"""Random conversations under the templates of current model families: what is trained, to the last token."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from isopref.data.chat import EncodedPair, PairEncoder, TokenizeOptions
from isopref.data.shapes import BadPairError, PreferencePair
from support.chat_templates import FAMILIES, Family, trained_texts

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
WORDS = st.text(alphabet="abc xyz.,?\n'\"{}<é你", min_size=1, max_size=12)
SAID = st.builds(lambda start, text, end: start + text + end, st.sampled_from("AB"), WORDS, st.sampled_from("yz."))


def turn(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


@st.composite
def replies(draw: Any, family: Family) -> list[dict[str, Any]]:
    """What an assistant does after a question: perhaps calls with their results, then an answer."""
    messages = []
    thought = st.one_of(st.none(), SAID) if family.thinks else st.none()

    def thinking() -> dict[str, Any]:
        why = draw(thought)
        return {} if why is None else {"reasoning_content": why}

    for number in range(draw(st.integers(0, 2)) if family.tools else 0):
        count = draw(st.integers(1, 2)) if family.many_calls else 1
        calls = [
            {"type": "function", "function": {"name": f"look{number}", "arguments": {"at": draw(SAID), "n": k}}}
            for k in range(count)
        ]
        messages.append(turn("assistant", "", tool_calls=calls, **thinking()))
        messages += [turn("tool", f"{number}{k} {draw(SAID)}") for k in range(count)]
    return [*messages, turn("assistant", draw(SAID), **thinking())]


@st.composite
def pairs(draw: Any, family: Family) -> PreferencePair:
    prompt = [turn("system", draw(SAID))] if family.system and draw(st.booleans()) else []
    prompt.append(turn("user", draw(SAID)))

    def answer(name: str) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = draw(replies(family))
        for _ in range(draw(st.integers(0, 2))):
            messages += [turn("user", draw(SAID)), *draw(replies(family))]
        messages[-1]["content"] = name + messages[-1]["content"]
        return messages

    uses_tools = family.tools and draw(st.booleans())
    return PreferencePair(prompt, answer("C"), answer("R"), TOOLS if uses_tools else None, 1.0, "file:7")


@cache
def encoder(name: str, train_on: Any = "assistant") -> PairEncoder:
    family = FAMILIES[name]
    tokenizer = family.tokenizer()
    stops = tuple(tokenizer.convert_tokens_to_ids(list(family.stops)))
    options = TokenizeOptions(
        template=None, max_length=None, truncation="drop", on_bad="error", stops=stops, train_on=train_on
    )
    return PairEncoder(tokenizer, options)


def moves_tools(name: str, pair: PreferencePair, answer: list[dict[str, Any]]) -> bool:
    """Mistral's tools stand before the last question, so that earlier turns are not what the model was given."""
    return name == "mistral" and bool(pair.tools) and any(one["role"] == "user" for one in answer)


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_trained_tokens_are_the_assistants_turns_with_their_ends(name: str, data: Any) -> None:
    family = FAMILIES[name]
    pair = data.draw(pairs(family))
    encoded = encoder(name)
    (result,) = encoded.encode([pair])
    prompt: Any = pair.prompt
    sides: list[Any] = [pair.chosen, pair.rejected]
    refused = any(family.refuses([*prompt, *side], len(prompt)) or moves_tools(name, pair, side) for side in sides)
    if refused:
        assert isinstance(result, BadPairError)
        assert result.reason in ("boundary", "left_out")
        assert "data.train_on: last" in str(result)
        return
    assert isinstance(result, EncodedPair), result
    for number, side in enumerate(sides):
        spoken = [n for n, one in enumerate(side) if one["role"] == "assistant"]
        expected = [family.turn(side[n], n == len(side) - 1) for n in spoken]
        assert trained_texts(result.tokens, number, encoded._tokenizer) == expected


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_the_last_turn_alone(name: str, data: Any) -> None:
    family = FAMILIES[name]
    pair = data.draw(pairs(family))
    encoded = encoder(name, "last")
    (result,) = encoded.encode([pair])
    sides: list[Any] = [pair.chosen, pair.rejected]
    assert isinstance(result, EncodedPair), result
    for number, side in enumerate(sides):
        last: Any = side[-1]
        assert trained_texts(result.tokens, number, encoded._tokenizer) == [family.turn(last, True)]
