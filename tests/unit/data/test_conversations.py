"""Answers that are conversations: where they part, which turns are trained, with which weights, and real records."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from isopref.data.chat import EncodedPair, TokenizeOptions
from isopref.data.judged import BadPairError
from isopref.data.messages import read_messages
from isopref.data.pairs import SourceSpec, build_table
from isopref.errors import ConfigError
from support.dialogues import ADD, AGAIN, BAD, CALL, GOOD, NEXT, RESULT, TOOLS, Q, answers, encode, read, shown, turn
from support.families import FAMILIES
from support.family import trained_texts

SAMPLES = os.environ.get("ISOPREF_SAMPLES")  # folder with the sample files of LLaMA-Factory


# --- where conversations part --------------------------------------------------------------------------------


def test_turns_in_common_are_the_prompt_and_the_rest_is_the_answer() -> None:
    pair = read(chosen=[Q, GOOD, AGAIN, NEXT], rejected=[Q, GOOD, AGAIN, BAD, Q, NEXT])
    assert pair.prompt == [Q, GOOD, AGAIN]
    assert list(pair.answers) == [[NEXT], [BAD, Q, NEXT]]
    result = encode(pair)
    assert isinstance(result, EncodedPair)
    assert shown(result.tokens, 0) == "[done<|im_end|>]"
    assert shown(result.tokens, 1) == (
        "[no<|im_end|>]\n<|im_start|>user\nwhy?<|im_end|>\n<|im_start|>assistant\n[done<|im_end|>]"
    )


def test_conversations_may_part_at_a_tools_result_or_a_users_turn() -> None:
    start = [Q, ADD]
    chosen, rejected = answers(
        chosen=[*start, RESULT, GOOD], rejected=[*start, turn("tool", "error"), BAD], tools=TOOLS
    )
    assert chosen.endswith("it is 4\n</tool_response><|im_end|>\n<|im_start|>assistant\n[because<|im_end|>]")
    assert rejected.endswith("error\n</tool_response><|im_end|>\n<|im_start|>assistant\n[no<|im_end|>]")
    assert "<tool_call>" not in chosen + rejected  # shared, so it is in the prompt
    chosen, rejected = answers(chosen=[Q, GOOD, AGAIN, NEXT], rejected=[Q, GOOD, turn("user", "but why?"), NEXT])
    assert chosen.endswith("and then?<|im_end|>\n<|im_start|>assistant\n[done<|im_end|>]")
    assert rejected.endswith("but why?<|im_end|>\n<|im_start|>assistant\n[done<|im_end|>]")


def test_a_turn_begins_after_its_generation_prompt_where_the_other_side_goes_on_with_a_question() -> None:
    """One side answers at once, the other after one more question. Role marks are never trained."""
    chosen, rejected = answers(chosen=[Q, AGAIN, GOOD], rejected=[Q, BAD])
    assert chosen == "user\nand then?<|im_end|>\n<|im_start|>assistant\n[because<|im_end|>]"
    assert rejected == "assistant\n[no<|im_end|>]"  # <|im_start|> is shared


def test_a_call_may_be_named_again_by_its_result() -> None:
    """As gpt-oss does."""
    chosen, _ = answers("harmony", chosen=[Q, ADD, RESULT, GOOD], rejected=[Q, BAD], tools=TOOLS)
    assert chosen == (
        '[<|channel|>commentary to=functions.add<|message|>{"a": 2}<|call|>]'
        "<|start|>functions.add to=assistant<|message|>it is 4<|end|>"
        "<|start|>assistant[<|channel|>final<|message|>because<|return|>]"
    )


def test_common_turns_after_a_prompt_column_join_the_prompt() -> None:
    pair = read(prompt=[Q], chosen=[ADD, RESULT, GOOD], rejected=[ADD, RESULT, BAD])
    assert [message["role"] for message in pair.prompt] == ["user", "assistant", "tool"]  # type: ignore[index]
    assert list(pair.answers) == [[GOOD], [BAD]]


def test_answers_of_a_list_may_be_conversations() -> None:
    texts = answers(prompt=[Q], responses=[[GOOD], [BAD, AGAIN, NEXT], [NEXT]], scores=[3, 2, 1])
    assert texts[0] == "[because<|im_end|>]"
    assert texts[1].startswith("[no<|im_end|>]\n<|im_start|>user")
    assert texts[1].endswith("[done<|im_end|>]")


def test_a_step_is_an_answer_after_correct_steps() -> None:
    """Step-DPO: the correct steps are shared, so the next one alone is trained."""
    steps = "Step 1: 2 + 2 = 4.\n"
    pair = read(prompt=[Q], chosen=steps + "Step 2: 4 * 2 = 8.", rejected=steps + "Step 2: 4 * 2 = 6.")
    result = encode(pair)
    assert isinstance(result, EncodedPair)  # as text, the steps are trained in both: their gradients cancel in a margin
    texts = answers(
        chosen=[Q, turn("assistant", steps), turn("user", "go on"), turn("assistant", "Step 2: 8")],
        rejected=[Q, turn("assistant", steps), turn("user", "go on"), turn("assistant", "Step 2: 6")],
    )
    assert texts == ["[Step 2: 8<|im_end|>]", "[Step 2: 6<|im_end|>]"]


def numbered(call_id: str) -> list[dict[str, Any]]:
    return [ADD | {"tool_calls": [CALL | {"id": call_id}]}, RESULT | {"tool_call_id": call_id}]


def test_calls_with_different_ids_are_different() -> None:
    """Each side keeps its own ids, which its results refer to."""
    call = '[<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>]'
    sides: dict[str, Any] = {"chosen": [Q, *numbered("call_1"), GOOD], "rejected": [Q, *numbered("call_2"), BAD]}
    pair = read(**sides, tools=TOOLS)
    assert pair.prompt == [Q]
    chosen, rejected = answers(**sides, tools=TOOLS)
    assert chosen.startswith(call)
    assert rejected.startswith(call)
    sides["rejected"] = [Q, *numbered("call_1"), BAD]
    assert answers(**sides, tools=TOOLS) == ["[because<|im_end|>]", "[no<|im_end|>]"]


def test_results_in_another_order_are_different() -> None:
    calls = ADD | {"tool_calls": [CALL | {"id": "call_1"}, CALL | {"id": "call_2"}]}
    results = [turn("tool", "it is 4", tool_call_id=f"call_{number}") for number in (1, 2)]
    pair = read(chosen=[Q, calls, *results, GOOD], rejected=[Q, calls, *reversed(results), BAD])
    assert pair.prompt == [Q, read(prompt=[Q], chosen=[calls], rejected=[BAD]).answers[0][0]]
    assert [answer[0] for answer in pair.answers] == results


@pytest.mark.parametrize("prompt", [{}, {"prompt": [Q]}])
def test_conversations_may_part_between_two_turns_of_the_assistant(prompt: dict[str, Any]) -> None:
    start = [] if prompt else [Q]
    sides: dict[str, Any] = {"chosen": [*start, GOOD, NEXT], "rejected": [*start, GOOD, BAD]}
    assert answers(**prompt, **sides) == ["[done<|im_end|>]", "[no<|im_end|>]"]


def test_conversations_that_differ_in_weights_alone_are_a_tie() -> None:
    with pytest.raises(BadPairError, match="differ only in the weights of their messages") as refused:
        read(chosen=[Q, GOOD, AGAIN, NEXT], rejected=[Q, GOOD, AGAIN, NEXT | {"weight": 0.5}])
    assert refused.value.reason == "tie"


def test_reasoning_without_an_answer_is_an_answer() -> None:
    """A bad one, such as a model that never stops thinking."""
    for thought in ({"reasoning_content": "hm"}, {"content": "<think>\nhm\n</think>"}):
        _, rejected = answers("qwen3", prompt=[Q], chosen=[GOOD], rejected=[turn("assistant") | thought])
        assert rejected == "[<think>\nhm\n</think>\n\n<|im_end|>]"


# --- what is trained -------------------------------------------------------------------------------------------


def test_calls_are_trained_and_results_are_context() -> None:
    chosen, rejected = answers(chosen=[Q, ADD, RESULT, GOOD], rejected=[Q, BAD], tools=TOOLS)
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'
    assert chosen == (
        f"[{call}<|im_end|>]\n<|im_start|>user\n<tool_response>\nit is 4\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n[because<|im_end|>]"
    )
    assert rejected == "[no<|im_end|>]"


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ({"weight": 0.5}, "[0.5: no<|im_end|>]"),
        ({"weight": 0}, "no<|im_end|>"),
        ({"train": False}, "no<|im_end|>"),
        ({"train": True, "weight": 2}, "[2: no<|im_end|>]"),
    ],
)
def test_a_message_has_a_weight_of_its_own(weights: dict[str, Any], expected: str) -> None:
    _, rejected = answers(prompt=[Q], chosen=[GOOD], rejected=[BAD | weights, AGAIN, NEXT])
    assert rejected.startswith(expected + "\n<|im_start|>user\nand then?<|im_end|>\n")
    assert rejected.endswith("[done<|im_end|>]")


def test_an_answer_without_a_trained_turn_is_refused() -> None:
    result = encode(read(prompt=[Q], chosen=[GOOD | {"weight": 0}], rejected=[BAD]))
    assert isinstance(result, BadPairError)
    assert result.reason == "weight"
    assert "'chosen' has only assistant turns of weight 0" in str(result)


@pytest.mark.parametrize("contradiction", [{"train": False, "weight": 2}, {"train": True, "weight": 0}])
def test_train_and_weight_must_agree(contradiction: dict[str, Any]) -> None:
    with pytest.raises(BadPairError, match=r"'train' is .* and 'weight' is .*; keep one"):
        read(prompt=[Q], chosen=[GOOD | contradiction], rejected=[BAD])


def test_turns_after_the_last_trained_one_are_not_kept() -> None:
    kept, _ = answers(prompt=[Q], chosen=[GOOD, AGAIN], rejected=[BAD])
    assert kept == "[because<|im_end|>]"


def test_the_last_turn_alone() -> None:
    _, rejected = answers(train_on="last", prompt=[Q], chosen=[GOOD], rejected=[BAD, AGAIN, NEXT])
    assert rejected == "no<|im_end|>\n<|im_start|>user\nand then?<|im_end|>\n<|im_start|>assistant\n[done<|im_end|>]"


@pytest.mark.parametrize(
    "thought", [{"content": "so it is", "reasoning_content": "hm"}, {"content": "<think>\nhm\n</think>\n\nso it is"}]
)
def test_what_follows_the_reasoning_alone(thought: dict[str, str]) -> None:
    fields = {"prompt": [Q], "chosen": [turn("assistant") | thought], "rejected": [BAD]}
    assert answers("qwen3", "final", **fields) == [
        "hm\n</think>\n\n[so it is<|im_end|>]",  # both begin with "<think>", which is context, so it is in the prompt
        "\n</think>\n\n[no<|im_end|>]",
    ]
    assert answers("qwen3", "last", **fields)[0] == "[<think>\nhm\n</think>\n\nso it is<|im_end|>]"


@pytest.mark.parametrize("thought", [{"reasoning_content": "hm"}, {"content": "<think>\nhm\n</think>\n\n"}, {}])
def test_a_call_that_follows_the_reasoning_alone(thought: dict[str, str]) -> None:
    fields = {"prompt": [Q], "chosen": [ADD | thought], "rejected": [BAD], "tools": TOOLS}
    call = '[<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>]'
    assert answers("qwen3", "final", **fields)[0] == ("hm\n</think>\n\n" if thought else "") + call
    if "content" not in thought:
        call = '[commentary to=functions.add<|message|>{"a": 2}<|call|>]'
        reasoning = "analysis<|message|>hm<|end|><|start|>assistant<|channel|>" if thought else ""
        assert answers("harmony", "final", **fields)[0] == reasoning + call


def test_text_beside_a_call_that_follows_the_reasoning() -> None:
    said = ADD | {"reasoning_content": "hm", "content": "let me add"}
    chosen, _ = answers("qwen3", "final", prompt=[Q], chosen=[said], rejected=[BAD], tools=TOOLS)
    assert chosen.startswith("hm\n</think>\n\n[let me add\n<tool_call>")


@pytest.mark.parametrize("thought", [{"reasoning_content": "hm"}, {"content": "<think>hm</think>"}])
def test_nothing_follows_the_reasoning(thought: dict[str, str]) -> None:
    pair = read(prompt=[Q], chosen=[GOOD, AGAIN, turn("assistant") | thought], rejected=[BAD])
    result = encode(pair, "qwen3", "final")
    assert isinstance(result, BadPairError)
    assert result.reason == "empty"
    assert "'chosen' ends with its reasoning, so data.train_on: final has nothing to train on" in str(result)


def test_plain_text_has_no_turns_to_choose_from() -> None:
    with pytest.raises(ConfigError, match=r"data\.train_on: last needs turns"):
        TokenizeOptions(template="none", max_length=None, truncation="drop", on_bad="error", train_on="last")


# --- real records --------------------------------------------------------------------------------------------------


def records(name: str) -> list[dict[str, Any]]:
    if SAMPLES is None or not (path := Path(SAMPLES) / name).exists():
        pytest.skip(f"ISOPREF_SAMPLES names no folder with {name}")
    text = path.read_text(encoding="utf-8")
    return json.loads(text) if text.startswith("[") else [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize(
    ("name", "column", "family"),
    [
        ("glaive_toolcall_en_demo.json", "conversations", "qwen2.5"),
        ("glaive_toolcall_en_demo.json", "conversations", "granite"),
        ("reason_tool_use_demo_50.jsonl", "messages", "qwen3"),
    ],
)
def test_real_tool_calls(name: str, column: str, family: str, tmp_path: Path) -> None:
    """Conversations with tools, as LLaMA-Factory has them: the whole one against a short answer to its first turn."""
    written = []
    for record in records(name)[:40]:
        turns = record[column]
        first = next(n for n, one in enumerate(turns) if one.get("from", one.get("role")) in ("human", "user")) + 1
        no = {"from": "gpt", "value": "I do not know."} if "from" in turns[0] else turn("assistant", "I do not know.")
        written.append({"chosen": turns, "rejected": [*turns[:first], no], "tools": record["tools"]})
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in written), encoding="utf-8")
    options = TokenizeOptions(template=None, max_length=None, truncation="drop", on_bad="drop")
    tokenizer = FAMILIES[family].tokenizer()
    table = build_table([SourceSpec(str(path))], tokenizer, folder=tmp_path, options=options)
    lost = table.stats.dropped
    assert set(lost) <= ({"left_out", "boundary"} if family == "qwen3" else set()), lost
    assert len(table) >= 20
    assert (table.lengths.trained[::2] < table.lengths.answer[::2]).any()
    for index in range(len(table)):
        number = int(table.origin(index).rpartition(":")[2]) - 1
        messages = read_messages(written[number]["chosen"], "")
        spoken = [n for n, one in enumerate(messages) if one["role"] == "assistant"]
        expected = [FAMILIES[family].turn(messages[: spoken[-1] + 1], n, {}) for n in spoken]
        assert trained_texts(table.example(index), 0, tokenizer) == expected
