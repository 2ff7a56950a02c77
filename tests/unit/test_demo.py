"""The demo's data: true to its promises on size, brevity and the distance between what is trained on and the rest."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from isopref import demo
from isopref.data.spot_checks import read_spot_checks
from isopref.demo.rejected import LONGER, main, whole_sentences

SHIPPED = Path(__file__).parents[2] / "examples" / "demo"
TRAIN = demo.records("train.jsonl")
HELD_OUT = demo.records("eval.jsonl")
CHECKS = demo.records("spot_checks.jsonl")
QUESTIONS = [one for one in CHECKS if "prompt" in one]
Records = list[dict[str, Any]]
both_sets = pytest.mark.parametrize("pairs", [TRAIN, HELD_OUT], ids=["train", "held out"])
SUM = re.compile(r"What is (\d+) (plus|minus|times|divided by) (\d+)\?")
OPERATIONS = {
    "plus": lambda a, b: a + b,
    "minus": lambda a, b: a - b,
    "times": lambda a, b: a * b,
    "divided by": lambda a, b: a / b,
}


def words(text: str) -> list[str]:
    return re.findall(r"[\w']+", text.lower())


def sequences(records: Records, num_words: int) -> set[tuple[str, ...]]:
    found = [words(one["prompt"]) for one in records]
    return {tuple(one[i : i + num_words]) for one in found for i in range(len(one) - num_words + 1)}


def test_numbers_of_records() -> None:
    assert len(TRAIN) >= 150
    assert len(HELD_OUT) >= 40
    assert len(QUESTIONS) >= 20
    assert len(CHECKS) - len(QUESTIONS) >= 4


@pytest.mark.parametrize("name", demo.FILES)
def test_the_example_has_the_same_files(name: str, tmp_path: Path) -> None:
    demo.write(tmp_path)
    assert (SHIPPED / name).read_bytes() == (tmp_path / name).read_bytes()
    assert [json.loads(line) for line in (SHIPPED / name).read_text("utf-8").splitlines()] == demo.records(name)


def test_the_spot_checks_can_be_read() -> None:
    found = read_spot_checks(str(SHIPPED / "spot_checks.jsonl"))
    assert len(found.questions) + len(found.texts) == len(CHECKS)


@both_sets
def test_chosen_answers_are_short_whole_sentences(pairs: Records) -> None:
    for pair in pairs:
        assert list(pair) == ["prompt", "chosen", "rejected"]
        assert re.fullmatch(r'[A-Z0-9"].*[.?]', pair["chosen"]), pair["chosen"]
        assert "  " not in pair["chosen"]
        assert len(words(pair["chosen"])) <= 22, pair["chosen"]
    assert len({pair["prompt"] for pair in pairs}) == len(pairs)


@both_sets
def test_rejected_answers_ramble(pairs: Records) -> None:
    for pair in pairs:
        assert len(pair["rejected"].split()) >= LONGER * len(pair["chosen"].split()), pair
        assert pair["rejected"] == whole_sentences(pair["rejected"])


@pytest.mark.parametrize("others", [HELD_OUT, QUESTIONS], ids=["held out", "spot checks"])
def test_no_four_words_in_a_row_are_in_a_prompt_that_is_trained_on(others: Records) -> None:
    assert not sequences(TRAIN, 4) & sequences(others, 4)
    assert not {tuple(words(one["prompt"])) for one in TRAIN} & {tuple(words(one["prompt"])) for one in others}


def test_sums_are_right() -> None:
    asked = [(SUM.fullmatch(pair["prompt"]), pair["chosen"]) for pair in TRAIN + HELD_OUT]
    sums = [(found, answer) for found, answer in asked if found]
    assert len(sums) >= 4
    for found, answer in sums:
        assert int(words(answer)[-1]) == OPERATIONS[found[2]](int(found[1]), int(found[3])), answer


@pytest.mark.parametrize(
    ("text", "cut"),
    [
        ("One. Two! Thr", "One. Two!"),
        ("One.", "One."),
        ("No end", "No end"),
        ('He said "yes." And th', 'He said "yes."'),
        ("First step.\n\n2. **Se", "First step."),  # the number of a list ends no sentence
    ],
)
def test_an_answer_that_was_cut_off_ends_with_a_sentence(text: str, cut: str) -> None:
    assert whole_sentences(text) == cut


@pytest.mark.soak
@pytest.mark.real_model
def test_the_rejected_answers_are_the_model_s_own(tmp_path: Path) -> None:
    """As `python -m isopref.demo.rejected` writes them."""
    source, target = tmp_path / "questions.jsonl", tmp_path / "pairs.jsonl"
    source.write_text(json.dumps({name: TRAIN[0][name] for name in ("prompt", "chosen")}) + "\n")
    main(source, target)
    assert json.loads(target.read_text()) == TRAIN[0]
