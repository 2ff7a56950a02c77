"""Lists of answers with scores: the shapes they come in, what is left out, and which answers are compared."""

import json
from pathlib import Path
from typing import Any

import pytest

from isopref.data.compare import Compare, comparisons
from isopref.data.pairs import SourceSpec, TokenizeOptions, build_table
from isopref.data.shapes import BadPairError, RankedList, detect_shape, to_pair
from isopref.data.sources import Record
from isopref.data.table import ExampleTable
from isopref.errors import DataError
from isopref.testing.tokenizers import tiny_tokenizer
from support.records import TEXT, Q, assistant

ANSWERS = ["one", "two", "three"]
SCORES = [1.0, 3.0, 2.0]


def ranked(fields: dict[str, Any], *, raw: bool = False) -> RankedList:
    record = Record(fields, "file:7")
    found = to_pair(record, detect_shape([record], raw=raw), raw=raw)
    assert isinstance(found, RankedList)
    return found


@pytest.mark.parametrize(
    ("fields", "shape"),
    [
        ({"prompt": "why?", "responses": ANSWERS, "scores": SCORES}, "list"),
        ({"instruction": "why?", "generations": ANSWERS, "ratings": SCORES, "model": "x"}, "list"),
        ({"prompt": "why?", "answers": ANSWERS, "rewards": SCORES}, "list"),
        ({"prompt": "why?", "completions": ANSWERS, "scores": ["1", "3.0", "2"]}, "list"),
        (
            {
                "instruction": "why?",
                "completions": [
                    {"response": text, "overall_score": score, "model": "m"}
                    for text, score in zip(ANSWERS, SCORES, strict=True)
                ],
            },
            "completions",
        ),
    ],
)
def test_shapes(fields: dict[str, Any], shape: str) -> None:
    assert detect_shape([Record(fields, "file:7")], raw=False).name == shape
    for raw in (False, True):
        found = ranked(fields, raw=raw)
        assert (found.prompt, list(found.answers), list(found.scores)) == ("why?", ANSWERS, SCORES)


def test_messages() -> None:
    fields = {"prompt": [Q], "responses": [[assistant(text)] for text in ANSWERS], "scores": SCORES, "weight": 2}
    found = ranked(fields)
    assert found.prompt == [Q]
    assert list(found.answers) == [[assistant(text)] for text in ANSWERS]
    assert found.weight == 2


def test_the_first_rank_is_the_best() -> None:
    assert ranked({"prompt": "why?", "responses": ANSWERS, "ranking": [3, 1, 2]}).scores == (-3, -1, -2)


def test_a_pair_with_lists_beside_it_stays_a_pair() -> None:
    record = Record(TEXT | {"responses": ANSWERS, "scores": SCORES}, "file:7")
    assert detect_shape([record], raw=False).name == "text"


def test_answers_without_a_score_and_repeated_ones_are_left_out() -> None:
    fields = {"prompt": "why?", "responses": ["a", "b", "a", "c", "d"], "scores": [1, None, 5, "N/A", float("nan")]}
    with pytest.raises(BadPairError, match="there are 1 different answers with a score in 'responses'") as refused:
        ranked(fields)
    assert refused.value.reason == "single"
    found = ranked(fields | {"scores": [1, 2, 5, "N/A", float("nan")]})
    assert (found.answers, found.scores) == (("a", "b"), (1.0, 2.0))
    assert found.notes == {"unscored_answers": 2, "repeated_answers": 1}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scores": [1, 2]}, "'responses' has 3 entries and 'scores' has 2"),
        ({"scores": [1, True, 2]}, "'scores' has bool True, which is no number"),
        ({"scores": [1, "good", 2]}, "'scores' has .*good.*, which is no number"),
        ({"responses": ["one", " ", "three"]}, "'answer 2' is empty"),
    ],
)
def test_bad_records(change: dict[str, Any], message: str) -> None:
    with pytest.raises(BadPairError, match=message):
        ranked({"prompt": "why?", "responses": ANSWERS, "scores": SCORES} | change)


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


def test_other_comparisons_are_another_table(tmp_path: Path) -> None:
    record = {"prompt": "why?", "responses": ANSWERS, "scores": SCORES}
    tables = [build(tmp_path / "a.jsonl", record, **options) for options in ({}, {"compare": "best_worst"})]
    assert [table.example(0).comparisons for table in tables] == [((1, 2), (1, 0), (2, 0)), ((1, 0),)]
    assert tables[0].digest != tables[1].digest


def test_no_two_scores_differ_enough(tmp_path: Path) -> None:
    record = {"prompt": "why?", "responses": ANSWERS, "scores": SCORES}
    with pytest.raises(DataError, match=r"a.jsonl:1: no two answers differ in their scores by 5, as data.min_gap asks"):
        build(tmp_path / "a.jsonl", record, min_gap=5.0, on_bad="error")
