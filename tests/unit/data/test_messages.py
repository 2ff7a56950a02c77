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
