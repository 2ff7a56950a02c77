"""Messages in other forms than OpenAI's current one mean the same."""

from __future__ import annotations

from typing import Any

import pytest

from isopref.data.conversations import is_empty
from isopref.data.messages import DefectError, read_messages

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}


def read(**message: Any) -> dict[str, Any]:
    (found,) = read_messages(message, "chosen")
    return found


@pytest.mark.parametrize("value", [{"train": False}, {"weight": 0}, {"weight": 0, "train": None}])
def test_a_turn_of_sharegpt_has_a_weight(value: dict[str, Any]) -> None:
    assert read(**{"from": "gpt", "value": "x", **value}) == {"role": "assistant", "content": "x", "weight": 0}
    call = '{"name": "add", "arguments": {"a": 2}}'
    assert read(**{"from": "function_call", "value": call, **value})["weight"] == 0


def test_only_the_assistant_of_sharegpt_is_trained() -> None:
    assert read(**{"from": "human", "value": "x", "weight": 0}) == {"role": "user", "content": "x"}
    with pytest.raises(DefectError, match="only assistant turns can be trained"):
        read(**{"from": "human", "value": "x", "weight": 1})


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_has_several_names(key: str) -> None:
    expected = {"role": "assistant", "content": "x", "reasoning_content": "so"}
    assert read(role="assistant", content="x", **{key: "so"}) == expected
    assert read(role="assistant", content="x", **{"reasoning_content": "so", key: "so"}) == expected
    assert read(role="assistant", content="x", **{"reasoning_content": "", key: "so"}) == expected
    assert read(**{"from": "gpt", "value": "x", key: "so"}) == expected
    assert read(role="assistant", content=None, **{key: "so"}) == expected | {"content": ""}


@pytest.mark.parametrize("role", ["system", "user", "tool"])
@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
def test_only_the_assistant_reasons(role: str, key: str) -> None:
    for value in (True, {"effort": "high"}, "so"):
        message = {"role": role, "content": "x", key: value}
        assert read(**message) == message
        assert not is_empty([message])


def test_reasoning_that_differs_is_refused() -> None:
    with pytest.raises(DefectError, match=r"'reasoning_content' and 'reasoning' differ; keep one"):
        read(role="assistant", content="x", reasoning_content="a", reasoning="b")
    with pytest.raises(DefectError, match=r"'reasoning' is not text but dict"):
        read(role="assistant", content="x", reasoning={"effort": "high"})


@pytest.mark.parametrize("content", [{"content": None}, {"content": ""}, {}])
@pytest.mark.parametrize("arguments", ['{"a": 2}', {"a": 2}])
def test_a_function_call_is_a_tool_call(content: dict[str, Any], arguments: Any) -> None:
    """OpenAI's old form."""
    called = read(role="assistant", function_call={"name": "add", "arguments": arguments}, **content)
    assert called == {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert read(role="function", name="add", content="4") == {"role": "tool", "name": "add", "content": "4"}


@pytest.mark.parametrize("none", [None, {}, {"name": None, "arguments": None}])
def test_a_turn_without_a_function_call(none: Any) -> None:
    assert read(role="assistant", content="x", function_call=none) == {"role": "assistant", "content": "x"}


@pytest.mark.parametrize("wrong", ["add", ["add"], {"arguments": "{}"}])
def test_a_function_call_without_a_name_is_refused(wrong: Any) -> None:
    with pytest.raises(DefectError, match=r"chosen\[0\]: 'function_call' needs a 'name', but this is"):
        read(role="assistant", content="", function_call=wrong)
    with pytest.raises(DefectError, match="both 'tool_calls' and 'function_call'; keep one"):
        read(role="assistant", content="", function_call={"name": "add"}, tool_calls=[CALL])
