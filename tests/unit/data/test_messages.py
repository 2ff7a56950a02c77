"""Messages in other forms than OpenAI's current one mean the same."""

from __future__ import annotations

from typing import Any

import pytest

from isopref.data.messages import DefectError, read_messages


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


def test_reasoning_that_differs_is_refused() -> None:
    with pytest.raises(DefectError, match=r"'reasoning_content' and 'reasoning' differ; keep one"):
        read(role="assistant", content="x", reasoning_content="a", reasoning="b")
    with pytest.raises(DefectError, match=r"'reasoning' is not text but dict"):
        read(role="assistant", content="x", reasoning={"effort": "high"})
