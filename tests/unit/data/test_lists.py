"""Lists of answers with scores: the shapes they come in, what is left out, and which answers are compared."""

import json
from pathlib import Path
from typing import Any

import pytest

from isopref.data.compare import Compare, comparisons
from isopref.data.judged import BadPairError
from isopref.data.pairs import SourceSpec, TokenizeOptions, build_table
from isopref.data.shapes import SHAPES, detect_shape
from isopref.data.sources import Record
from isopref.data.table import ExampleTable
from isopref.errors import DataError
from isopref.testing.tokenizers import tiny_tokenizer
from support.records import ANSWERS, LISTS, SCORES, TEXT, Q, assistant, list_of


@pytest.mark.parametrize(("shape", "fields"), LISTS)
def test_shapes(shape: str, fields: dict[str, Any]) -> None:
    assert [one.name for one in SHAPES.values() if one.fits(fields)] == [shape], "no two shapes fit a record"
    for raw in (False, True):
        found = list_of(fields, raw=raw)
        assert (found.prompt, list(found.answers), list(found.scores)) == ("why?", ANSWERS, SCORES)


def test_messages() -> None:
    fields = {"prompt": [Q], "responses": [[assistant(text)] for text in ANSWERS], "scores": SCORES, "weight": 2}
    found = list_of(fields)
    assert found.prompt == [Q]
    assert list(found.answers) == [[assistant(text)] for text in ANSWERS]
    assert found.weight == 2


def test_completions_of_messages() -> None:
    every = [{"response": [assistant(text)], "score": number} for number, text in enumerate(ANSWERS)]
    found = list_of({"prompt": [Q], "completions": every})
    assert list(found.answers) == [[assistant(text)] for text in ANSWERS]
    assert found.scores == (0, 1, 2)


WHOLE = [
    [Q, assistant("a"), Q, assistant("one")],
    [Q, assistant("a"), Q, assistant("two"), Q, assistant("more")],
    [Q, assistant("a"), Q, assistant("three")],
]


@pytest.mark.parametrize("prompt", [{}, {"prompt": "why?"}, {"instruction": "why?"}, {"prompt": [Q]}])
def test_whole_conversations_begin_with_the_prompt(prompt: dict[str, Any]) -> None:
    completions = [{"response": one, "score": score} for one, score in zip(WHOLE, SCORES, strict=True)]
    for columns in ({"responses": WHOLE, "scores": SCORES}, {"completions": completions}):
        found = list_of(prompt | columns)
        assert found.prompt == [Q, assistant("a"), Q]
        assert list(found.answers) == [whole[3:] for whole in WHOLE]
        assert list(found.scores) == SCORES


def test_whole_conversations_that_do_not_begin_alike_are_refused() -> None:
    other = [{"role": "user", "content": "how?"}, assistant("one")]
    with pytest.raises(BadPairError, match="differ before the end of their first user turn"):
        list_of({"responses": [*WHOLE[:2], other], "scores": SCORES})
    for prompt in ("how?", other[:1]):
        with pytest.raises(
            BadPairError, match="the conversations in 'responses' do not begin with the prompt in 'prompt'"
        ):
            list_of({"prompt": prompt, "responses": WHOLE, "scores": SCORES})


def test_completions_without_a_score_are_left_out() -> None:
    """UltraFeedback has some, under each of the names of a score."""
    every = [
        {"response": "one", "overall_score": 7.5, "fine-grained_score": 1},
        {"response": "two", "overall_score": None, "rating": "N/A"},
        {"response": "three", "overall_score": None, "rating": "4"},
    ]
    found = list_of({"instruction": "why?", "completions": every})
    assert (found.answers, found.scores, found.notes) == (("one", "three"), (7.5, 4.0), {"unscored_answers": 1})


def test_the_first_rank_is_the_best() -> None:
    assert list_of({"prompt": "why?", "responses": ANSWERS, "ranking": [3, 1, 2]}).scores == (-3, -1, -2)


def test_a_pair_with_lists_beside_it_stays_a_pair() -> None:
    record = Record(TEXT | {"responses": ANSWERS, "scores": SCORES}, "file:7")
    assert detect_shape([record], raw=False).name == "text"


def test_answers_without_a_score_and_repeated_ones_are_left_out() -> None:
    fields = {"prompt": "why?", "responses": ["a", "b", "a", "c", "d"], "scores": [1, None, 5, "N/A", float("nan")]}
    with pytest.raises(BadPairError, match="'responses' has 1 different answers with a score") as refused:
        list_of(fields)
    assert refused.value.reason == "single"
    found = list_of(fields | {"scores": [1, 2, 5, "N/A", float("nan")]})
    assert (found.answers, found.scores) == (("a", "b"), (1.0, 2.0))
    assert found.notes == {"unscored_answers": 2, "repeated_answers": 1}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scores": [1, 2]}, "'responses' has 3 entries and 'scores' has 2"),
        ({"scores": [1, True, 2]}, "'scores' has bool True, which is not a number"),
        ({"scores": [1, "good", 2]}, "'scores' has .*good.*, which is not a number"),
        ({"responses": ["one", " ", "three"]}, "'answer 2' is empty"),
    ],
)
def test_bad_records(change: dict[str, Any], message: str) -> None:
    with pytest.raises(BadPairError, match=message):
        list_of({"prompt": "why?", "responses": ANSWERS, "scores": SCORES} | change)


# --- comparisons -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("compare", "expected"),
    [
        ("all", [(1, 2), (1, 0), (1, 3), (2, 0), (2, 3)]),  # the tie of 0 and 3 is none
        ("best_worst", [(1, 3)]),
        ("best_rest", [(1, 2), (1, 0), (1, 3)]),
        ("adjacent", [(1, 2), (2, 0)]),
    ],
)
def test_comparisons_by_hand(compare: Compare, expected: list[tuple[int, int]]) -> None:
    assert list(comparisons([1.0, 3.0, 2.0, 1.0], compare, 0.0)) == expected


def test_a_least_gap() -> None:
    assert comparisons([1.0, 3.0, 2.5], "all", 0.6) == ((1, 0), (2, 0))
    assert comparisons([1.0, 3.0, 2.0], "all", 2.0) == ((1, 0),)  # as much is enough


# --- tables ------------------------------------------------------------------------------------------


def build(path: Path, *records: dict[str, Any], **options: Any) -> ExampleTable:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    given = TokenizeOptions(**{"template": None, "max_length": None, "truncation": "drop", "on_bad": "drop", **options})
    return build_table([SourceSpec(str(path))], tiny_tokenizer("chatml"), folder=path.parent, options=given)


def test_a_table_of_lists(tmp_path: Path) -> None:
    records: list[dict[str, Any]] = [
        {"prompt": "why?", "responses": [*ANSWERS, "one"], "scores": [*SCORES, 9.0]},
        {"prompt": "who?", "responses": ["a", "b"], "scores": [4, 4]},  # a tie
        {"prompt": "how?", "responses": ["a", "b"], "scores": [4, None]},
        {"prompt": "when?", "responses": ["a", "b", "c"], "scores": [0.1, 0.2, 0.3]},
    ]
    table = build(tmp_path / "a.jsonl", *records, compare="adjacent")
    (found,) = table.stats.sources
    assert (found.shape, found.read, found.kept, found.dropped) == ("list", 4, 2, {"tie": 1, "single": 1})
    assert (found.repeated_answers, found.unscored_answers) == (1, 0)
    first, second = table.example(0), table.example(1)
    assert (first.comparisons, first.scores) == (((1, 2), (2, 0)), tuple(SCORES))
    assert (second.comparisons, second.scores) == (((2, 1), (1, 0)), (0.1, 0.2, 0.3))
    decode = tiny_tokenizer("chatml").decode
    assert [decode(answer) for answer in first.answers] == [f"{text}<|im_end|>" for text in ANSWERS]
    assert table.origin(1).endswith("a.jsonl:4")
    assert table.scores.tolist() == [*SCORES, 0.1, 0.2, 0.3]


def test_every_record_that_is_left_out_is_counted_with_its_reason(tmp_path: Path) -> None:
    records: list[dict[str, Any]] = [
        {"prompt": "a?", "responses": ["x", "y"], "scores": [2, 1], "ratings": [5, 5]},
        {"prompt": "b?", "responses": ["x"], "scores": [2]},  # one answer
        {"prompt": "c?", "responses": ["x", "x"], "scores": [2, 1]},  # the same one twice
        {"prompt": "d?", "responses": ["x", "y"], "scores": [None, None]},
        {"prompt": "e?", "responses": ["x", "y", "z"], "scores": [1, 1, 1]},
        {"prompt": "f?", "responses": ["x", "y", "z"], "scores": [1, 1.2, 1.4]},  # closer than min_gap
        {"prompt": "g?", "responses": ["x", "y"], "scores": [1, 2, 3]},
    ]
    table = build(tmp_path / "a.jsonl", *records, min_gap=0.5)
    (found,) = table.stats.sources
    assert (found.read, found.kept, found.dropped) == (7, 1, {"single": 3, "tie": 2, "shape": 1})
    assert found.unused_columns == ("ratings",)
    assert ([*table.holds], table.unit) == (["lists"], "list")


def test_other_comparisons_are_another_table(tmp_path: Path) -> None:
    record = {"prompt": "why?", "responses": ANSWERS, "scores": SCORES}
    tables = [build(tmp_path / "a.jsonl", record, **options) for options in ({}, {"compare": "best_worst"})]
    assert [table.example(0).comparisons for table in tables] == [((1, 2), (1, 0), (2, 0)), ((1, 0),)]
    assert tables[0].digest != tables[1].digest


def test_no_two_scores_differ_enough(tmp_path: Path) -> None:
    record = {"prompt": "why?", "responses": ANSWERS, "scores": SCORES}
    with pytest.raises(
        DataError, match=r"a.jsonl:1: no two answers differ in their scores by at least data.min_gap \(5\): "
    ):
        build(tmp_path / "a.jsonl", record, min_gap=5.0, on_bad="error")
