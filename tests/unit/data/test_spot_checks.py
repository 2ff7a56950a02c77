"""Spot checks: what is read, what is refused, and when an answer is correct."""

import json
from pathlib import Path
from typing import Any

import pytest

from isopref.data.spot_checks import Question, SpotChecks, read_spot_checks
from isopref.errors import DataError


def write(path: Path, *records: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def test_questions_and_texts(tmp_path: Path) -> None:
    one, other = {"prompt": "2 + 2?", "expect": ["4", "four"]}, {"prompt": "Capital of Peru?", "expect": "Lima"}
    found = read_spot_checks(write(tmp_path / "p.jsonl", one, {"text": "It rained."}, other))
    assert found == SpotChecks(
        [Question("2 + 2?", ("4", "four")), Question("Capital of Peru?", ("Lima",))], ["It rained."]
    )


def test_a_table_has_both_kinds_with_empty_cells(tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text("prompt,expect,text\n2 + 2?,4,\n,,It rained.\n")
    assert read_spot_checks(str(tmp_path / "p.csv")) == SpotChecks([Question("2 + 2?", ("4",))], ["It rained."])


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "a"}, r"has the fields \['prompt'\]"),
        ({"prompt": "a", "expect": "b", "text": "c"}, r"has the fields \['expect', 'prompt', 'text'\]"),
        ({"text": " "}, "'text' must be text; found ' '"),
        ({"prompt": 3, "expect": "b"}, "'prompt' must be text; found 3"),
        ({"prompt": "a", "expect": []}, r"'expect' must be text; found \[\]"),
        ({"prompt": "a", "expect": ["b", 4]}, "'expect' must be text; found 4"),
    ],
)
def test_what_is_no_spot_check_is_named(tmp_path: Path, record: dict[str, Any], message: str) -> None:
    path = write(tmp_path / "p.jsonl", {"text": "fine"}, record)
    with pytest.raises(DataError, match=rf"p\.jsonl:2: {message}.* A spot check is "):
        read_spot_checks(path)


@pytest.mark.parametrize(
    ("answer", "correct"),
    [
        ("4", True),
        ("It is 4.", True),
        ("FOUR, I think", True),
        ("14", False),
        ("4th", False),
        ("fourteen", False),
        ("", False),
    ],
)
def test_an_answer_is_correct_if_it_contains_an_expected_string_as_words(answer: str, correct: bool) -> None:
    assert Question("2 + 2?", ("4", "four")).is_answered_by(answer) == correct


def test_an_expected_string_is_no_pattern() -> None:
    assert Question("?", ("a.b (c)",)).is_answered_by("So: a.b (c)!")
    assert not Question("?", ("a.b",)).is_answered_by("axb")


def test_scripts_without_spaces_have_no_word_borders() -> None:
    assert Question("?", ("东京",)).is_answered_by("日本的首都是东京。")
    assert not Question("?", ("東京",)).is_answered_by("日本的首都是东京。")
