"""Prompt and answer in one text: role marks prove where the answer begins, else the common start is a guess."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from isopref.data.judged import BadPairError
from isopref.data.pairs import SourceSpec, TokenizeOptions, build_table
from isopref.data.plain_text import find_marks, prompt_end
from isopref.data.shapes import detect_shape, to_pair
from isopref.data.sources import Record
from isopref.errors import DataError
from isopref.testing.tokenizers import tiny_tokenizer
from support.records import COMMON_START, HH, SYSTEM, TEXT, TRANSCRIPT, Q, assistant, pair_of, user


def both(before: str, good: str = "because", bad: str = "dunno") -> dict[str, Any]:
    return {"chosen": before + good, "rejected": before + bad}


# --- role marks ----------------------------------------------------------------------------------------

MARKED: list[tuple[str, list[dict[str, Any]]]] = [
    ("User: why?\nAssistant: ", [Q]),
    ("user: why?\n\nassistant:\n", [Q]),
    ("Human: why?\n\nAssistant: ", [Q]),
    ("System: be brief\nUser: why?\nAI: ", [SYSTEM, Q]),
    ("be brief\n\nUser: why?\nBot: ", [SYSTEM, Q]),
    ("### Human: why?### Assistant: ", [Q]),
    ("be brief\n\n### Instruction:\nwhy?\n\n### Response:\n", [SYSTEM, Q]),
    ("### Instruction:\nwhy?\n\n### Input:\na text\n\n### Response:\n", [user("why?\n\n### Input:\na text")]),
    ("be brief USER: hi ASSISTANT: hello</s>USER: why? ASSISTANT: ", [SYSTEM, user("hi"), assistant("hello</s>"), Q]),
    ("Question: why?\nAnswer: ", [Q]),
    ("Q: hi\nA: hello\nQ: why?\nA: ", [user("hi"), assistant("hello"), Q]),
]


@pytest.mark.parametrize(("before", "prompt"), MARKED)
def test_marked_turns_become_messages(before: str, prompt: list[dict[str, Any]]) -> None:
    # The answers begin alike, so that their common start goes on behind the border.
    fields = both(before, "It is.\nbecause", "It is.\ndunno")
    assert detect_shape([Record(fields, "f:1")], raw=False).name == "transcript"
    pair = pair_of(fields)
    assert (pair.prompt, pair.chosen, pair.rejected) == (
        prompt,
        [assistant("It is.\nbecause")],
        [assistant("It is.\ndunno")],
    )


@pytest.mark.parametrize(("before", "prompt"), MARKED)
def test_without_a_template_marked_text_stays_as_it_stands(before: str, prompt: Any) -> None:
    pair = pair_of(both(before), raw=True)
    assert isinstance(pair.prompt, str)
    assert isinstance(pair.chosen, str)
    assert pair.prompt + pair.chosen == before + "because"
    assert pair.prompt == before.rstrip()  # a mark ends with its colon


TEMPLATED = [
    "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nwhy?<|im_end|>\n<|im_start|>assistant\n",
    "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nwhy?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "<bos><start_of_turn>user\nUser: why?\nAssistant: ?<end_of_turn>\n<start_of_turn>model\n",
    "<|user|>\nwhy?</s>\n<|assistant|>\n",
    "<｜User｜>why?<｜Assistant｜>",  # noqa: RUF001
    "<s>[INST] hi [/INST] hello</s>[INST] why? [/INST]",
]


@pytest.mark.parametrize("before", TEMPLATED)
def test_templated_text_is_read_without_a_template_only(before: str) -> None:
    fields = both(before, "It is.\nbecause", "It is.\ndunno")
    pair = pair_of(fields, raw=True)
    assert (pair.prompt, pair.chosen, pair.rejected) == (before, "It is.\nbecause", "It is.\ndunno")
    with pytest.raises(DataError, match=r"f:1: .* are already templated, .* Set data\.template: none, or store"):
        detect_shape([Record(fields, "f:1")], raw=False)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"chosen": "User: what?\nAssistant: because"}, "diverging"),
        ({"chosen": "User: why?\nAssistant: wait\nUser: why?\nAssistant: because"}, "diverging"),
        (both("User: why?\nAssistant: because\nUser: "), "role"),
        (both("User: why?\nAssistant: because\nSystem: "), "role"),
        ({"chosen": "User: why?\nAssistant:"}, "empty"),
        ({"chosen": "because"}, "missing"),
        (both("why?\n"), "missing"),
        (both("Question: why?\nAnswer: ") | {"rejected": "User: why?\nAssistant: dunno"}, "missing"),
        (TEXT, "shape"),
        (HH, "shape"),
    ],
)
@pytest.mark.parametrize("raw", [False, True])
def test_marks_that_prove_nothing_give_no_pair(change: dict[str, Any], reason: str, raw: bool) -> None:
    base = both("User: why?\nAssistant: ")
    shape = detect_shape([Record(base, "f:1")], raw=raw)
    with pytest.raises(BadPairError) as caught:
        to_pair(Record(base | change, "f:2"), shape, raw=raw)
    assert caught.value.reason == reason


def test_answers_with_marks_of_their_own_need_a_prompt() -> None:
    quiz = {"topic": "sums", "chosen": "Q: 1+1?\nA: 2", "rejected": "Q: 1+2?\nA: 4"}
    with pytest.raises(DataError) as caught:
        detect_shape([Record(quiz, "f:1")], raw=False)
    assert str(caught.value) == (
        "f:1: there is no prompt: 'chosen' and 'rejected' have marks of turns, but not the same ones before the last "
        "answer. Put what was asked into a column 'prompt', or name the column that has it: "
        "data.columns={prompt: COLUMN}. Other columns: topic."
    )
    assert pair_of(quiz | {"prompt": "A quiz!"}).chosen == "Q: 1+1?\nA: 2"


@pytest.mark.parametrize("text", ["why?", "User: why?", "Assistant: yes\nUser: why?", "The user: me. Assistant: you"])
def test_text_that_is_no_dialogue_has_no_marks(text: str) -> None:
    assert find_marks(text) is None


# --- the common start ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt"),
    [
        ("why?\nbecause", "why?\ndunno", "why?\n"),
        ("why?\n\nbecause", "why?\n\nbut no", "why?\n\n"),  # not inside the word that both begin with
        ("why? It is.\nIt is so", "why? It is.\nIt was so", "why? It is.\n"),
        ("one\ntwo. yes", "one\ntwo. no", "one\n"),  # a line comes before a sentence
        ("why? because", "why? dunno", "why?"),
        ("One. Two! three", "One. Two! four", "One. Two!"),
        ("He asked \"why?\" I said yes", "He asked \"why?\" I said no", 'He asked "why?"'),
        ("The capital is: Lima", "The capital is: Cusco", "The capital is:"),
        ("为什么？因为", "为什么？不知道", "为什么？"),  # noqa: RUF001
        ("It is 3. yes", "It is 3.5 or so", None),  # a sentence ends in one of them only
        ("a\nb", "a\nb\nc", "a\n"),
        ("a\n", "a\nb", None),  # nothing would be left
        ("why?\nyes", "why?\n ", None),
        ("because", "dunno", None),
        ("we think so", "we think not", None),
        ("\nyes", "\nno", None),
        ("", "", None),
    ],
)  # fmt: skip
def test_the_common_start_ends_with_a_line_or_a_sentence(chosen: str, rejected: str, prompt: str | None) -> None:
    end = prompt_end(chosen, rejected)
    assert (None if end is None else chosen[:end]) == prompt
    assert prompt_end(rejected, chosen) == end


def test_the_common_start_is_the_prompt() -> None:
    fields = {"chosen": "A story. \n\nIt rained. We left.", "rejected": "A story. \n\nIt snowed. We left."}
    pair = pair_of(fields)
    assert (pair.prompt, pair.chosen, pair.rejected) == ("A story.", "It rained. We left.", "It snowed. We left.")
    pair = pair_of(fields, raw=True)
    assert (pair.prompt, pair.chosen, pair.rejected) == ("A story. \n\n", "It rained. We left.", "It snowed. We left.")
    pair = pair_of(both("Why? ", "Because.", "Dunno."), raw=True)
    assert (pair.prompt, pair.chosen, pair.rejected) == ("Why?", " Because.", " Dunno.")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"chosen": "because", "rejected": "dunno"}, "missing"),
        ({"chosen": "because", "rejected": "because"}, "tie"),
        (both("why?\n", "because", "because"), "tie"),
        (TEXT, "shape"),
        (TRANSCRIPT, "shape"),
    ],
)
def test_a_record_without_a_common_start_gives_no_pair(fields: dict[str, Any], reason: str) -> None:
    shape = detect_shape([Record(COMMON_START, "f:1"), Record(COMMON_START, "f:2"), Record(fields, "f:3")], raw=False)
    assert shape.name == "common_start"
    with pytest.raises(BadPairError) as caught:
        to_pair(Record(fields, "f:3"), shape, raw=False)
    assert caught.value.reason == reason


def test_without_a_common_start_the_error_says_what_to_do() -> None:
    records = [Record({"id": n, "chosen": "because", "rejected": "dunno"}, f"f:{n}") for n in (1, 2)]
    with pytest.raises(DataError) as caught:
        detect_shape([*records, Record(COMMON_START, "f:3")], raw=False)
    assert str(caught.value) == (
        "f:1: there is no prompt: 'chosen' and 'rejected' are text, but do not begin with a common line or "
        "sentence (str 'because'; str 'dunno'). Put what was asked into a column 'prompt', or name the column that "
        "has it: data.columns={prompt: COLUMN}. Other columns: id."
    )


def test_a_guess_decides_only_where_most_records_need_one() -> None:
    records = [Record(COMMON_START, "f:1"), Record(TEXT, "f:2")]
    assert detect_shape(records, raw=False).name == "text"
    with pytest.raises(BadPairError) as caught:
        to_pair(records[0], detect_shape(records, raw=False), raw=False)
    assert caught.value.reason == "missing"
    records = [Record(TRANSCRIPT, "f:1"), Record(COMMON_START, "f:2"), Record(COMMON_START, "f:3")]
    assert detect_shape(records, raw=False).name == "common_start"


def test_a_column_that_may_be_the_prompt_leaves_nothing_to_guess() -> None:
    with pytest.raises(DataError, match=r"no shape fits .* Set data\.columns=\{prompt: question\}\."):
        detect_shape([Record(COMMON_START | {"question": "why?"}, "f:1")], raw=False)
    assert detect_shape([Record(COMMON_START | {"input": ""}, "f:1")], raw=False).name == "common_start"


@pytest.mark.parametrize(("fields", "template"), [(TRANSCRIPT, None), (COMMON_START, None), (COMMON_START, "none")])
def test_from_a_file_to_tokens(tmp_path: Path, fields: dict[str, str], template: str | None) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(fields) + "\n")
    tokenizer = tiny_tokenizer("chatml")
    options = TokenizeOptions(template=template, max_length=None, truncation="drop", on_bad="error")
    table = build_table([SourceSpec(str(path))], tokenizer, folder=tmp_path, options=options)
    example = table.example(0)
    prompt, chosen = (tokenizer.decode(part) for part in (example.prompt, example.answers[0]))
    earlier = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\n" if fields is TRANSCRIPT else ""
    asked = f"{earlier}<|im_start|>user\nwhy?<|im_end|>\n<|im_start|>assistant\n"
    assert (prompt, chosen) == (("why?\n", "because</s>") if template else (asked, "because<|im_end|>"))
    assert table.stats.sources[0].unused_columns == ()
