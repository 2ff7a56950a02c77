"""By how much one answer is better than another: read from records, kept in tables, never made up."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from isopref.batch.rows import build_microbatch
from isopref.batch.terms import compared
from isopref.data.content import example_id
from isopref.data.pairs import SourceSpec, TokenizeOptions, build_table
from isopref.data.table import ExampleTable
from isopref.errors import DataError
from isopref.examples import PAIR, PAIR_SCORES, Example, PairTokens
from isopref.score import TableLogps
from isopref.testing.tokenizers import tiny_tokenizer
from isopref.types import Needs, Readout
from support.records import HH, TEXT, ULTRAFEEDBACK, pair_of

PLAIN = PairTokens(np.array([1]), np.array([2, 3]), np.array([4]))
RANKED = Example(np.array([1]), (np.array([2]), np.array([3, 4]), np.array([5])), ((1, 0), (1, 2)), (0.5, 2.0, -1.0))


@pytest.mark.parametrize(
    ("columns", "gap"),
    [
        ({}, None),
        ({"chosen_score": 8.5, "rejected_score": 7}, 1.5),
        ({"score_chosen": 8.5, "score_rejected": 7}, 1.5),  # UltraFeedback, binarized
        ({"chosen_rating": "4", "rejected_rating": "5.0"}, -1.0),  # CSV has nothing but text; chosen wins all the same
        ({"margin": 2}, 2.0),
        ({"margin": 2, "score_chosen": 8.5, "score_rejected": 7}, 1.5),  # scores say more
        ({"chosen_score": 8.5}, None),
        ({"chosen_score": 8.5, "rejected_score": None}, None),
        ({"margin": "wide"}, None),
        ({"margin": math.nan}, None),
        ({"margin": True}, None),
    ],
)
def test_columns_of_a_pair(columns: dict[str, Any], gap: float | None) -> None:
    for record in (TEXT, HH):
        assert pair_of(record | columns).gap == gap


def test_a_pair_that_only_says_which_answer_is_better_has_no_gap() -> None:
    assert PLAIN.example.scores == (1.0, 0.0)
    assert PLAIN.example.score_gaps == ()
    assert PLAIN.example._replace(gaps=(1.0,)).score_gaps == (1.0,)
    assert Example(*PLAIN.example[:2], PAIR, (5.0, 4.0)).score_gaps == (1.0,)
    assert RANKED.score_gaps == (1.5, 3.0)
    assert RANKED._replace(scores=()).score_gaps == ()


def table(path: Path, *records: dict[str, Any], **options: Any) -> ExampleTable:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    given = TokenizeOptions(**{"template": None, "max_length": None, "truncation": "drop", "on_bad": "drop", **options})
    return build_table([SourceSpec(str(path))], tiny_tokenizer("chatml"), folder=path.parent, options=given)


def test_a_table_keeps_gaps(tmp_path: Path) -> None:
    found = table(tmp_path / "a.jsonl", ULTRAFEEDBACK | {"score_chosen": 9.0, "score_rejected": 6.5}, ULTRAFEEDBACK)
    np.testing.assert_array_equal(found.gaps, [2.5, math.nan])
    np.testing.assert_array_equal(found.select([1, 0]).gaps, [math.nan, 2.5])
    first, second = found.example(0), found.example(1)
    assert (first.scores, first.gaps, second.gaps) == (PAIR_SCORES, (2.5,), ())
    assert found.stats.sources[0].unused_columns == ("messages", "prompt_id")


def test_lists_have_the_gaps_of_their_scores(tmp_path: Path) -> None:
    record = {"prompt": "why?", "responses": ["a", "b", "c"], "scores": [1.0, 4.0, 2.5]}
    assert table(tmp_path / "a.jsonl", record, compare="adjacent").gaps.tolist() == [1.5, 1.5]


def test_pairs_below_the_least_gap_are_left_out(tmp_path: Path) -> None:
    records = [TEXT | {"margin": margin} for margin in (0.4, 0.5, -1)]
    assert table(tmp_path / "a.jsonl", *records, TEXT, min_gap=0.5).gaps[0] == 0.5
    assert len(table(tmp_path / "a.jsonl", *records, TEXT, min_gap=0.5)) == 2  # and one whose gap nobody knows
    assert len(table(tmp_path / "b.jsonl", *records)) == 3
    with pytest.raises(DataError, match=r"a.jsonl:1: the scores differ by 0.4, less than data.min_gap \(0.5\)"):
        table(tmp_path / "a.jsonl", *records, min_gap=0.5, on_bad="error")


def test_the_gap_is_part_of_what_an_example_is() -> None:
    plain = PLAIN.example
    assert example_id(plain) != example_id(plain._replace(gaps=(2.0,))) != example_id(plain._replace(gaps=(3.0,)))
    assert example_id(RANKED) == example_id(RANKED._replace(gaps=RANKED.score_gaps))  # as a table gives it back


def test_microbatches_and_tables_give_gaps_where_they_are_needed() -> None:
    examples = [RANKED, PLAIN.example, PLAIN.example._replace(gaps=(0.25,))]
    wanted = [1.5, 3.0, math.nan, 0.25]
    microbatch = build_microbatch(examples, "shared")
    readout = Readout(torch.zeros(microbatch.num_answers))
    assert compared(readout, microbatch).gap is None
    gap = compared(readout, microbatch, Needs(gaps=True)).gap
    assert gap is not None
    assert gap.dtype == torch.float32
    np.testing.assert_array_equal(gap.numpy(), wanted)
    whole = ExampleTable.from_tokens(examples)
    logps = TableLogps(np.zeros(7))
    assert logps.compared(whole.lengths).gap is None
    of_table = logps.compared(whole.lengths, whole.gaps).gap
    assert of_table is not None
    np.testing.assert_array_equal(of_table.numpy(), wanted)
