"""The demo's data: true to its promises on size, style, length and the distance between its two sets."""

import json
import re
from pathlib import Path

import pytest

from isopref import demo

SHIPPED = Path(__file__).parents[2] / "examples" / "demo"
TRAIN = demo.training_pairs()
HELD_OUT = demo.held_out_pairs()
Pairs = list[dict[str, str]]
both_sets = pytest.mark.parametrize("pairs", [TRAIN, HELD_OUT], ids=["train", "held out"])


def words(text: str) -> list[str]:
    return re.findall(r"[\w']+", text.lower())


def sequences(text: str, num_words: int) -> set[tuple[str, ...]]:
    found = words(text)
    return {tuple(found[i : i + num_words]) for i in range(len(found) - num_words + 1)}


def mean_characters(pairs: Pairs, key: str) -> float:
    return sum(len(pair[key]) for pair in pairs) / len(pairs)


def test_numbers_of_records() -> None:
    assert len(TRAIN) == 240
    assert len(HELD_OUT) == 48


@pytest.mark.parametrize(("name", "pairs"), [("train.jsonl", TRAIN), ("eval.jsonl", HELD_OUT)])
def test_shipped_files_are_the_generators_output(name: str, pairs: Pairs, tmp_path: Path) -> None:
    demo.write(tmp_path)
    assert (SHIPPED / name).read_bytes() == (tmp_path / name).read_bytes()
    assert [json.loads(line) for line in (SHIPPED / name).read_text("utf-8").splitlines()] == pairs


def test_every_call_gives_the_same_records() -> None:
    assert demo.training_pairs() == TRAIN
    assert demo.held_out_pairs() == HELD_OUT


@both_sets
def test_records_are_whole_sentences_without_duplicates(pairs: Pairs) -> None:
    for pair in pairs:
        assert list(pair) == ["prompt", "chosen", "rejected"]
        for text in pair.values():
            assert re.fullmatch(r"[A-Z0-9].*[.!?]", text), text
            assert not re.search(r"[{}|/]|\s\s|\b([aA]) [aeiou]", text), text
    for key in ("prompt", "chosen", "rejected"):
        texts = [pair[key] for pair in pairs]
        assert len(set(texts)) == len(texts), key


@both_sets
def test_style_separates_the_answers(pairs: Pairs) -> None:
    for pair in pairs:
        assert pair["chosen"].startswith("Arr")
        assert "Arr" not in pair["rejected"]
        assert not {"is", "are", "of", "you", "your"} & set(words(pair["chosen"])), pair["chosen"]
        assert not {"be", "ye", "yer", "aye", "o'", "fer"} & set(words(pair["rejected"])), pair["rejected"]


@both_sets
def test_length_does_not_separate_the_answers(pairs: Pairs) -> None:
    assert mean_characters(pairs, "chosen") == pytest.approx(mean_characters(pairs, "rejected"), rel=0.15)
    num_longer = sum(len(pair["chosen"]) > len(pair["rejected"]) for pair in pairs)
    assert 0.3 < num_longer / len(pairs) < 0.7


def test_no_sequence_of_words_is_in_a_prompt_of_both_sets() -> None:
    in_training = set().union(*(sequences(pair["prompt"], 3) for pair in TRAIN))
    held_out = set().union(*(sequences(pair["prompt"], 3) for pair in HELD_OUT))
    assert not in_training & held_out


@pytest.mark.parametrize(("table", "others"), [(demo.HELD_OUT, TRAIN), (demo.TRAINING, HELD_OUT)])
def test_no_entity_is_in_a_text_of_the_other_set(table: str, others: Pairs) -> None:
    texts = [" ".join(["", *words(text), ""]) for pair in others for text in pair.values()]
    for family in demo.families(table):
        for cell in (cell for fact in family.facts for cell in fact):
            entity = f" {' '.join(words(cell))} "
            assert not [text for text in texts if entity in text], cell


def test_sums_are_right() -> None:
    sums = [fact for family in demo.families(demo.TRAINING) for fact in family.facts if fact[0].isdigit()]
    assert len(sums) == 15
    assert all(int(a) + int(b) == int(total) for a, b, total in sums)
