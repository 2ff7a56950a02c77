"""Records with the same prompt as one example: by hand, in any order, across chunks and sources."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isopref.data import pairs as building
from isopref.data.grouping import merged, prompt_groups
from isopref.data.judged import BadPairError
from isopref.data.pairs import SourceSpec, TokenizeOptions, build_table
from isopref.data.table import ExampleTable
from isopref.errors import ConfigError
from isopref.examples import Example, PairTokens
from isopref.testing.tokenizers import tiny_tokenizer

OPTIONS: dict[str, Any] = {"template": None, "max_length": None, "truncation": "drop", "on_bad": "error"}
ASKED = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


def pair(prompt: str, chosen: str, rejected: str, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected, **more}


def label(prompt: str, answer: str, is_good: bool, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "completion": answer, "label": is_good, **more}


def build(folder: Path, *sources: list[dict[str, Any]], grouped: bool = True, **changes: Any) -> ExampleTable:
    specs = []
    for number, records in enumerate(sources):
        path = folder / f"{'abcdef'[number]}.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        specs.append(SourceSpec(str(path)))
    workers = changes.pop("workers", 1)
    options = TokenizeOptions(**(OPTIONS | changes))
    tokenizer = tiny_tokenizer("chatml")
    return build_table(specs, tokenizer, folder=folder, options=options, group_by_prompt=grouped, workers=workers)


def said(table: ExampleTable) -> list[tuple[Any, ...]]:
    """Prompt, answers, comparisons and scores of every example, as text."""
    decode = tiny_tokenizer("chatml").decode
    found = []
    for index in range(len(table)):
        one = table.example(index)
        answers = [str(decode(answer)).removesuffix("<|im_end|>") for answer in one.answers]
        found.append((decode(one.prompt), answers, one.comparisons, one.scores))
    return found


def test_an_example_is_in_a_subset_that_all_its_records_are_in(tmp_path: Path) -> None:
    records = [
        pair("a?", "1", "2", subset="chat"),
        pair("a?", "1", "3", subset="chat"),
        pair("b?", "1", "2", subset="chat"),
        pair("b?", "1", "3", subset="math"),
        pair("c?", "1", "2"),
    ]
    plain, grouped = build(tmp_path, records, grouped=False), build(tmp_path, records)
    assert [plain.subset(n) for n in range(5)] == ["chat", "chat", "chat", "math", None]
    assert [grouped.subset(n) for n in range(3)] == ["chat", None, None]
    assert plain.select([3, 0]).subset(0) == "math"


# --- by hand -----------------------------------------------------------------------------------------


def test_pairs_of_one_prompt(tmp_path: Path) -> None:
    table = build(
        tmp_path,
        [
            pair("why?", "good", "bad"),
            pair("who?", "me", "you"),
            pair("why?", "good", "worse"),
            pair("how?", "so", "?"),
        ],
    )
    assert said(table) == [
        (ASKED.format("why?"), ["good", "bad", "worse"], ((0, 1), (0, 2)), (1.0, 0.0, 0.0)),
        (ASKED.format("who?"), ["me", "you"], ((0, 1),), (1.0, 0.0)),
        (ASKED.format("how?"), ["so", "?"], ((0, 1),), (1.0, 0.0)),
    ]
    (found,) = table.stats.sources
    assert (found.read, found.kept, found.grouped, found.dropped) == (4, 3, 1, {})
    assert ([*table.holds], table.unit) == (["pairs"], "prompt")
    origins = [table.origin(index).removeprefix(str(tmp_path)) for index in range(3)]
    assert origins == ["/a.jsonl:1 and 1 more", "/a.jsonl:2", "/a.jsonl:4"]


def test_labels_of_one_prompt(tmp_path: Path) -> None:
    table = build(tmp_path, [label("why?", "a", True), label("who?", "b", False), label("why?", "c", False)])
    assert said(table) == [
        (ASKED.format("why?"), ["a", "c"], (), (1.0, 0.0)),
        (ASKED.format("who?"), ["b"], (), (0.0,)),
    ]
    assert table.unit == "prompt"


def test_an_answer_that_is_chosen_and_rejected_has_no_score(tmp_path: Path) -> None:
    table = build(tmp_path, [pair("why?", "best", "good"), pair("why?", "good", "bad")])
    assert said(table) == [(ASKED.format("why?"), ["best", "good", "bad"], ((0, 1), (1, 2)), ())]
    assert np.isnan(table.scores).all()
    assert [*table.holds] == ["pairs"]


def test_every_judgement_counts_as_before_also_a_repeated_and_a_contradicted_one(tmp_path: Path) -> None:
    table = build(tmp_path, [pair("why?", "a", "b"), pair("why?", "a", "b"), pair("why?", "b", "a")])
    assert said(table) == [(ASKED.format("why?"), ["a", "b"], ((0, 1), (0, 1), (1, 0)), ())]
    table = build(tmp_path, [label("why?", "a", True), label("why?", "a", False), label("why?", "a", True)])
    assert said(table) == [(ASKED.format("why?"), ["a", "a", "a"], (), (1.0, 0.0, 1.0))]


def test_another_system_turn_or_tool_is_another_prompt(tmp_path: Path) -> None:
    table = build(tmp_path, [pair("why?", "a", "b"), pair("why?", "a", "b", system="be brief")])
    assert len(table) == 2


def test_a_prompt_that_was_cut_in_two_ways_stays_two(tmp_path: Path) -> None:
    records = [pair("abcdefghij", "1234567", "b"), pair("abcdefghij", "1", "b")]
    whole = build(tmp_path, records)
    longest = int(whole.lengths.sequence.max())
    assert len(whole) == 1
    table = build(tmp_path, records, max_length=longest - 1, truncation="keep_end")
    assert [prompt for prompt, *_ in said(table)] == [ASKED.format("bcdefghij"), ASKED.format("abcdefghij")]


def test_lists_stay_as_they_are(tmp_path: Path) -> None:
    lists = [{"prompt": "why?", "responses": ["a", "b"], "scores": [3, score]} for score in (1, 2)]
    table = build(tmp_path, lists, [pair("why?", "a", "b"), pair("why?", "c", "d")])
    assert [len(one.comparisons) for one in map(table.example, range(len(table)))] == [1, 1, 2]
    assert [source.grouped for source in table.stats.sources] == [0, 1]
    with pytest.raises(ConfigError, match=r"data.group_by_prompt groups pairs and labelled answers, but all data"):
        build(tmp_path, lists)


def test_sources_stay_apart(tmp_path: Path) -> None:
    table = build(tmp_path, [pair("why?", "a", "b"), pair("why?", "a", "c")], [pair("why?", "a", "d")])
    assert [answers for _, answers, *_ in said(table)] == [["a", "b", "c"], ["a", "d"]]
    assert table.sources.tolist() == [0, 1]
    assert len(set(table.question_ids.tolist())) == 1  # so both are trained on, or both held out


def test_records_of_one_prompt_share_a_weight(tmp_path: Path) -> None:
    records = [pair("why?", "a", "b", weight=2), pair("why?", "c", "d"), pair("why?", "e", "f", weight=2.0)]
    with pytest.raises(BadPairError, match=r"a.jsonl:2: 'weight' is 1, but 2 in \S*a.jsonl:1, which has the same"):
        build(tmp_path, records)
    table = build(tmp_path, records, on_bad="drop")
    assert (table.weights.tolist(), table.lengths.num_comparisons.tolist()) == ([2.0], [2])
    (found,) = table.stats.sources
    assert (found.read, found.kept, found.grouped, found.dropped) == (3, 1, 1, {"weight": 1})


def test_one_record_stays_the_example_it_was() -> None:
    one = PairTokens(np.arange(3), np.arange(2), np.arange(4)).example
    assert merged([one]) is one


# --- of any data -------------------------------------------------------------------------------------


def random_records(rng: random.Random, count: int) -> list[dict[str, Any]]:
    records = []
    for _ in range(count):
        chosen, rejected = rng.sample("abcdef", 2)
        records.append(pair(f"why {rng.randrange(12)}?", chosen * rng.randint(1, 3), rejected))
    return records


def judgements(table: ExampleTable) -> dict[str, Counter[tuple[str, str]]]:
    """How often one answer is preferred to another, by prompt."""
    found: dict[str, Counter[tuple[str, str]]] = {}
    for prompt, answers, comparisons, _ in said(table):
        counts = found.setdefault(prompt, Counter())
        counts.update((answers[better], answers[worse]) for better, worse in comparisons)
    return found


@pytest.mark.parametrize("seed", range(5))
def test_grouping_keeps_every_judgement_whatever_the_order_of_records(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    records = random_records(rng, 60)
    plain = build(tmp_path, records, grouped=False)
    grouped = build(tmp_path, records)
    prompts = [prompt for prompt, *_ in said(grouped)]
    assert len(prompts) == len(set(prompts)) == len({record["prompt"] for record in records})
    assert prompts == list(dict.fromkeys(prompt for prompt, *_ in said(plain))), "in the order of first records"
    assert judgements(grouped) == judgements(plain)
    for _, answers, comparisons, scores in said(grouped):
        assert len(answers) == len(set(answers))
        better, worse = ({pair[side] for pair in comparisons} for side in (0, 1))
        assert len(better | worse) == len(answers)
        assert scores == (() if better & worse else tuple(float(n in better) for n in range(len(answers))))
    rng.shuffle(records)
    other = build(tmp_path, records)
    assert judgements(other) == judgements(grouped)
    counted = [Counter(tuple(sorted(answers)) for _, answers, *_ in said(table)) for table in (grouped, other)]
    assert counted[0] == counted[1]


def test_groups_reach_across_chunks_and_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = random_records(random.Random(7), 60)
    whole = build(tmp_path, records)
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
    monkeypatch.setattr(building, "CHUNK_RECORDS", 5)
    monkeypatch.setattr(building, "CHUNKS_ALONE", 2)
    for folder, workers in (("one", 1), ("two", 2)):
        table = build(tmp_path / folder, records, workers=workers)
        assert table.digest == whole.digest
        table.check()


def test_a_grouped_table_is_another_file_and_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = [pair("why?", "a", "b"), pair("why?", "a", "c")]
    plain, grouped = build(tmp_path, records, grouped=False), build(tmp_path, records)
    assert (len(plain), len(grouped)) == (2, 1)
    assert len(list(tmp_path.glob("*.arrow"))) == 2

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("it is there already")

    monkeypatch.setattr(building, "write_grouped", fail)
    monkeypatch.setattr(building, "_encode_all", fail)
    assert build(tmp_path, records).digest == grouped.digest


def test_prompts_of_a_table_in_memory() -> None:
    """Of 5 examples, the first, third and last ask the same."""
    prompts = [1, 2, 1, 3, 1]
    table = ExampleTable.from_tokens([Example(np.array([n]), (np.array([9]),), (), (1.0,)) for n in prompts])
    assert [group.tolist() for group in prompt_groups(table)] == [[0, 2, 4], [1], [3]]
