"""Random conversations under the templates of current model families: what is trained, to the last token."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from isopref.data.chat import EncodedPair, PairEncoder, TokenizeOptions
from isopref.data.judged import BadPairError, PreferencePair
from isopref.data.shapes import detect_shape, to_pair
from isopref.data.sources import Record
from support.families import FAMILIES
from support.family import Family, weighted_texts

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
WORDS = st.text(alphabet="abc xyz.,?\n'\"{}<é你", min_size=1, max_size=12)
SAID = st.builds(lambda start, text, end: start + text + end, st.sampled_from("AB"), WORDS, st.sampled_from("yz."))
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]


def turn(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


@st.composite
def assistant_turns(draw: Any, family: Family, calls: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """An answer or calls, perhaps with text beside them, reasoning in one of its forms, and a weight of its own."""
    says = not calls or (family.text_with_calls and draw(st.booleans()))
    message = turn("assistant", draw(SAID) if says else "")
    if calls:
        message["tool_calls"] = list(calls)
    forms = ["", *["beside"] * family.thinks, *["inline"] * bool(says and family.inline)]
    form = draw(st.sampled_from(forms))
    if form == "beside":
        message["reasoning_content"] = draw(SAID)
    elif form == "inline":
        message["content"] = f"<think>\n{draw(SAID)}\n</think>\n\n{message['content']}"
    weight = draw(st.sampled_from([None, None, 0.5, 2.0] + [0.0] * (not form)))
    return message if weight is None else {**message, "weight": weight}


@st.composite
def replies(draw: Any, family: Family) -> list[dict[str, Any]]:
    """What an assistant does after a question: perhaps calls with their results, then an answer."""
    messages = []
    for number in range(draw(st.integers(0, 2)) if family.tools else 0):
        calls = [
            {
                "type": "function",
                "id": f"functions.look{number}:{k}",
                "function": {"name": f"look{number}", "arguments": {"at": draw(SAID), "n": k}},
            }
            for k in range(draw(st.integers(1, 2)) if family.many_calls else 1)
        ]
        messages.append(draw(assistant_turns(family, calls)))
        messages += [turn("tool", f"{number} {draw(SAID)}", tool_call_id=call["id"]) for call in calls]
    return [*messages, draw(assistant_turns(family))]


def without_weight(message: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key != "weight"}


@st.composite
def pairs(draw: Any, family: Family) -> PreferencePair:
    """Two conversations that share their first question, perhaps also turns after it."""
    start = [turn("system", draw(SAID))] if family.system and draw(st.booleans()) else []
    start.append(turn("user", draw(SAID)))
    if draw(st.booleans()):
        shared = [*draw(replies(family)), turn("user", draw(SAID))]
        start += shared[: draw(st.integers(1, len(shared)))]
        while start[-1]["role"] == "assistant":  # two turns of it in a row are tested in test_rewriting.py
            start.pop()

    def side(name: str) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = draw(replies(family))
        for _ in range(draw(st.integers(0, 2))):
            messages += [turn("user", draw(SAID)), *draw(replies(family))]
        last = without_weight(messages[-1])
        head, end, said = last["content"].rpartition("</think>\n\n")
        return [*start, *messages[:-1], {**last, "content": f"{head}{end}{name}{said}"}]

    sides = {"chosen": side("C"), "rejected": side("R")}
    if family.tools and draw(st.booleans()) and draw(st.booleans()):  # a call is the last turn of one side
        while sides["rejected"][-1]["role"] != "tool" and len(sides["rejected"]) > len(start) + 1:
            sides["rejected"].pop()
        if sides["rejected"][-1]["role"] == "tool":
            while sides["rejected"][-1]["role"] == "tool":
                sides["rejected"].pop()
            sides["rejected"][-1] = without_weight(sides["rejected"][-1])
        else:
            sides["rejected"] = side("R")
    uses_tools = family.tools and draw(st.booleans())
    fields = sides | {
        "tools": TOOLS if uses_tools else None,
        "chat_template_kwargs": draw(st.sampled_from(family.kwargs)),
    }
    record = Record(fields, "file:7")
    try:
        found = to_pair(record, detect_shape([record], raw=False), raw=False)
    except BadPairError as error:
        if error.reason != "diverging":
            raise
        reject()  # one side ends with a call that the other begins with
    assert isinstance(found, PreferencePair)
    return found


@cache
def encoder(name: str, train_on: Any = "assistant") -> PairEncoder:
    family = FAMILIES[name]
    tokenizer = family.tokenizer()
    stops = tuple(tokenizer.convert_tokens_to_ids(list(family.stops)))
    options = TokenizeOptions(
        template=None, max_length=None, truncation="drop", on_bad="error", stops=stops, train_on=train_on
    )
    return PairEncoder(tokenizer, options)


def sides_of(pair: PreferencePair) -> list[tuple[list[dict[str, Any]], list[int]]]:
    """The conversation of each side, and the numbers of its turns with a weight."""
    found = []
    for side in pair.answers:
        messages: Any = [*pair.prompt, *side]
        start = len(pair.prompt)
        spoken = [n for n in range(start, len(messages)) if messages[n]["role"] == "assistant"]
        found.append((messages, [n for n in spoken if messages[n].get("weight", 1) != 0]))
    return found


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=20, deadline=None, suppress_health_check=SLOW)
@given(data=st.data())
def test_trained_tokens_are_the_assistants_turns_with_their_ends(name: str, data: Any) -> None:
    family = FAMILIES[name]
    pair = data.draw(pairs(family))
    encoded = encoder(name)
    (result,) = encoded.encode([pair])
    sides = sides_of(pair)
    if any(family.refuses(*side, tools=bool(pair.tools)) for side in sides):
        assert isinstance(result, BadPairError)
        assert result.reason in ("boundary", "left_out")
        (alone,) = encoder(name, "last").encode([pair])
        assert ("data.train_on: last" in str(result)) == isinstance(alone, EncodedPair) or len(sides[0][1]) == 1
        return
    assert isinstance(result, EncodedPair), result
    for number, (messages, trained) in enumerate(sides):
        expected = [
            (family.turn(messages, n, dict(pair.template_kwargs)), messages[n].get("weight", 1.0)) for n in trained
        ]
        assert weighted_texts(result.tokens, number, encoded._tokenizer) == expected


@pytest.mark.parametrize("train_on", ["last", "final"])
@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=20, deadline=None, suppress_health_check=SLOW)
@given(data=st.data())
def test_the_last_turn_alone(name: str, train_on: str, data: Any) -> None:
    family = FAMILIES[name]
    pair = data.draw(pairs(family))
    encoded = encoder(name, train_on)
    (result,) = encoded.encode([pair])
    sides = sides_of(pair)
    if any(family.refuses(messages, [len(messages) - 1], tools=bool(pair.tools)) for messages, _ in sides):
        assert isinstance(result, BadPairError)
        assert result.reason in ("boundary", "left_out")
        assert "data.train_on" not in str(result)
        return
    assert isinstance(result, EncodedPair), result
    for number, (messages, _) in enumerate(sides):
        last = len(messages) - 1
        own = family.turn(messages, last, dict(pair.template_kwargs))
        expected = own if train_on == "last" else family.final(messages[-1])
        assert weighted_texts(result.tokens, number, encoded._tokenizer) == [(expected, 1.0)]
