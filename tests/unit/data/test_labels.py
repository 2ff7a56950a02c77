"""Labelled answers: the shapes they come in, what a label may be, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from isopref.data.judged import BadPairError, LabelledAnswer
from isopref.data.pairs import SourceSpec, TokenizeOptions, build_table
from isopref.data.shapes import SHAPES, detect_shape, to_pair
from isopref.data.sources import Record
from isopref.data.table import ExampleTable
from isopref.errors import DataError
from isopref.testing.tokenizers import tiny_tokenizer
from support.records import GOOD, LABELLED, LABELLED_CHAT, LABELS, TEXT, Q, label_of, user

SHARED = Path(__file__).parents[4] / "shared" / "data" / "kto_en_demo.json"  # beside the checkout, where it is


@pytest.mark.parametrize(("fields", "prompt", "answer"), LABELS)
def test_shapes(fields: dict[str, Any], prompt: Any, answer: Any) -> None:
    assert [shape.name for shape in SHAPES.values() if shape.fits(fields)] == ["label"], "no two shapes fit a record"
    assert label_of(fields) == LabelledAnswer(prompt, answer, True, None, 1.0, "file:7")


@pytest.mark.parametrize("bad", [False, 0, 0.0, "0", "false", "False", "bad", "rejected", "undesirable", "thumbs-down"])
def test_bad_answers(bad: Any) -> None:
    found = label_of(LABELLED | {"label": bad, "weight": 2})
    assert (found.is_good, found.scores, found.weight) == (False, (0.0,), 2.0)


def test_a_pair_with_a_label_beside_it_stays_a_pair() -> None:
    assert detect_shape([Record(TEXT | LABELLED, "file:7")], raw=False).name == "text"


def test_two_columns_that_may_hold_the_answer_are_not_chosen_from() -> None:
    fields = {"prompt": "why?", "response": "because", "output": "so", "label": True}
    with pytest.raises(DataError, match="no shape fits the columns"):
        label_of(fields)
    renamed = {"prompt": "why?", "completion": "because", "output": "so", "label": True}  # as data.columns does
    assert label_of(renamed).answer == "because"


@pytest.mark.parametrize(
    "fields",
    [
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}], "tools": "[]"},
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]},
        {"prompt": "why?", "completion": "because"},
        {"instruction": "why?", "input": "", "output": "because"},
    ],
)
def test_data_without_a_judgement_is_named(fields: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"one answer per record, without a judgement.*isopref sample"):
        detect_shape([Record(fields, "file:7")], raw=False)


@pytest.mark.parametrize(
    ("base", "change", "reason", "says"),
    [
        (
            LABELLED,
            {"label": "meh"},
            "label",
            "'label' is str 'meh', which is not a label: write true or false, 1 or 0",
        ),
        (LABELLED, {"label": []}, "label", "'label' is list \\[\\], which is not a label"),
        (LABELLED, {"label": 10**400}, "label", "which is not a label"),
        (LABELLED, {"label": float("nan")}, "label", "which is not a label"),
        (LABELLED, {"label": None}, "missing", "'label' is missing"),
        (LABELLED, {"completion": None}, "shape", "the columns .*'completion': 'absent'"),
        (LABELLED, {"completion": 3}, "type", "'completion' is neither text nor messages but int 3"),
        (LABELLED, {"completion": " "}, "empty", "'answer' is empty"),
        (LABELLED, {"prompt": ""}, "empty", "'prompt' is empty"),
        (LABELLED, {"completion": [user("x")]}, "role", "must begin with the assistant turn"),
        (LABELLED, {"chosen": "a", "rejected": "b"}, "shape", "shape 'text' in a source of shape 'label'"),
        (LABELLED_CHAT, {"messages": [Q, GOOD, Q]}, "role", "the prompt ends with an assistant turn"),
        (LABELLED_CHAT, {"messages": [GOOD, Q]}, "role", "the prompt ends with an assistant turn"),
        (LABELLED_CHAT, {"messages": [Q, Q]}, "role", r"'messages\[-1\]' must begin with the assistant turn"),
        (LABELLED_CHAT, {"messages": [GOOD]}, "missing", "do not make shape 'label'"),
    ],
)
def test_bad_records(base: dict[str, Any], change: dict[str, Any], reason: str, says: str) -> None:
    shape = detect_shape([Record(base, "f:1")], raw=False)
    with pytest.raises(BadPairError, match=says) as caught:
        to_pair(Record(base | change, "f:2"), shape, raw=False)
    assert caught.value.reason == reason
    assert str(caught.value).startswith("f:2: ")


@pytest.mark.parametrize("rating", [2, -1, 0.5, "4", 4.5])
def test_a_rating_is_refused_whatever_on_bad_says(tmp_path: Path, rating: Any) -> None:
    """Beside a rating of 4, a 1 is the worst answer: to drop the 4 would train on bad answers as good ones."""
    with pytest.raises(DataError, match=r"a.jsonl:2: 'label' is .* looks like a rating.*in 'scores'\.$"):
        build(tmp_path / "a.jsonl", LABELLED, LABELLED | {"label": rating})


# --- tables ------------------------------------------------------------------------------------------


def build(path: Path, *records: dict[str, Any], **options: Any) -> ExampleTable:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    given = TokenizeOptions(**{"template": None, "max_length": None, "truncation": "drop", "on_bad": "drop", **options})
    return build_table([SourceSpec(str(path))], tiny_tokenizer("chatml"), folder=path.parent, options=given)


def test_a_table_of_labels(tmp_path: Path) -> None:
    records = [LABELLED, LABELLED | {"label": "bad", "completion": "dunno"}, LABELLED | {"label": "?"}]
    table = build(tmp_path / "a.jsonl", *records)
    (found,) = table.stats.sources
    assert (found.shape, found.holds, found.kept, found.dropped) == ("label", "labels", 2, {"label": 1})
    assert ([*table.holds], table.unit) == (["labels"], "answer")
    first, second = table.example(0), table.example(1)
    assert (first.comparisons, first.scores, second.scores) == ((), (1.0,), (0.0,))
    decode = tiny_tokenizer("chatml").decode
    texts = [decode([*one.prompt.tolist(), *one.answers[0].tolist()]) for one in (first, second)]
    asked = "<|im_start|>user\nwhy?<|im_end|>\n<|im_start|>assistant\n"
    assert texts == [f"{asked}because<|im_end|>", f"{asked}dunno<|im_end|>"]
    assert table.ids[0].tobytes() != build(tmp_path / "b.jsonl", LABELLED | {"label": 0}).ids[0].tobytes()


def test_plain_text(tmp_path: Path) -> None:
    table = build(tmp_path / "a.jsonl", LABELLED, template="none")
    decode = tiny_tokenizer("chatml").decode
    example = table.example(0)
    assert (decode(example.prompt), decode(example.answers[0])) == ("why?", "because</s>")


def test_messages_written_as_text(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    turns = json.dumps(LABELLED_CHAT["messages"]).replace('"', '""')
    path.write_text(f'messages,label\n"{turns}",True\n"{turns}",False\n')
    options = TokenizeOptions(template=None, max_length=None, truncation="drop", on_bad="error")
    table = build_table([SourceSpec(str(path))], tiny_tokenizer("chatml"), folder=tmp_path, options=options)
    (found,) = table.stats.sources
    assert (found.shape, found.unused_columns, table.scores.tolist()) == ("label", (), [1.0, 0.0])


@pytest.mark.parametrize(
    ("fields", "unused"),
    [
        (LABELLED | {"answer": "42", "messages": []}, ("answer", "messages")),
        (LABELLED | {"input": "a text", "kto_tag": True}, ("input", "kto_tag")),
        ({"instruction": "why?", "input": "", "output": "so", "kto_tag": True, "id": 1}, ("id",)),
        (LABELLED_CHAT | {"prompt": "why?", "conversations": []}, ("conversations", "prompt")),
    ],
)
def test_columns_that_are_not_used_are_named(tmp_path: Path, fields: dict[str, Any], unused: tuple[str, ...]) -> None:
    (found,) = build(tmp_path / "a.jsonl", fields).stats.sources
    assert found.unused_columns == unused
    assert found.unused_inputs == ("input" in unused)


def test_what_a_mix_holds(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("labels.jsonl", "pairs.jsonl", "lists.jsonl")]
    lists = {"prompt": "why?", "responses": ["one", "two"], "scores": [4, 2]}
    for path, record in zip(paths, (LABELLED, TEXT, lists), strict=True):
        path.write_text(json.dumps(record) + "\n")
    options = TokenizeOptions(template=None, max_length=None, truncation="drop", on_bad="error")
    specs = [SourceSpec(str(path)) for path in paths]
    table = build_table(specs, tiny_tokenizer("chatml"), folder=tmp_path, options=options)

    def facts(*index: int) -> tuple[Any, ...]:
        part = table.select(index)
        return part.holds, part.unit

    assert facts(0) == ({"labels"}, "answer")
    assert facts(1) == ({"pairs"}, "pair")
    assert facts(2) == ({"lists"}, "list")
    assert facts(0, 1) == ({"labels", "pairs"}, "example")
    assert facts(0, 2) == ({"labels", "lists"}, "list")


@pytest.mark.skipif(not SHARED.exists(), reason="needs the shared data folder")
def test_a_real_file(tmp_path: Path) -> None:
    options = TokenizeOptions(template=None, max_length=None, truncation="drop", on_bad="error")
    table = build_table([SourceSpec(str(SHARED))], tiny_tokenizer("chatml"), folder=tmp_path, options=options)
    (found,) = table.stats.sources
    assert (found.shape, found.kept, found.dropped, found.unused_columns) == ("label", 300, {}, ())
    raw = json.loads(SHARED.read_text())
    assert table.scores.tolist() == [float(record["label"]) for record in raw]
    tokenizer = tiny_tokenizer("chatml")
    for index, record in enumerate(raw):
        (answer,) = table.example(index).answers
        assert tokenizer.decode(answer) == record["messages"][-1]["content"] + "<|im_end|>"
