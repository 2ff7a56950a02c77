"""Figures of a table, worked out by hand, and pairs as text again."""

import json
from pathlib import Path

import numpy as np
import pytest

from isopref.data.pairs import SourceSpec, TokenizeOptions, build_table
from isopref.data.statistics import ExampleSize, OverContext, example_text, figures, samples
from isopref.data.table import ExampleTable
from isopref.examples import PAIR, PAIR_SCORES, Example, PairTokens
from isopref.testing.models import byte_tokenizer
from isopref.testing.tokenizers import tiny_tokenizer
from support.families import FAMILIES


def table_of(*lengths: tuple[int, int, int]) -> ExampleTable:
    """Pairs of these lengths, all different."""
    parts = [[np.full(length, number) for length in one] for number, one in enumerate(lengths)]
    return ExampleTable.from_tokens([PairTokens(*part) for part in parts])


def test_figures_by_hand() -> None:
    found = figures(table_of((10, 1, 2), (20, 5, 3), (30, 2, 2), (100, 50, 40)))
    assert (found.examples, found.prompts, found.repeated) == (4, 4, 0)
    # With the prompt once: 13 + 28 + 34 + 190; in each sequence: 160 prompt tokens more.
    assert (found.tokens_shared, found.tokens) == (265, 425)
    assert found.lengths["prompt"].mean == 40.0
    assert found.lengths["prompt"].percentiles == {0: 10, 25: 10, 50: 20, 75: 30, 90: 100, 99: 100, 100: 100}
    most = {name: one.percentiles[100] for name, one in found.lengths.items()}
    assert most == {"prompt": 100, "chosen": 50, "rejected": 40, "sequence": 150, "example": 190}
    least = {name: one.percentiles[0] for name, one in found.lengths.items()}
    assert least == {"prompt": 10, "chosen": 1, "rejected": 2, "sequence": 12, "example": 13}
    assert found.longest[0] == ExampleSize("pair 3", 100, {"chosen": 50, "rejected": 40})
    assert [size.origin for size in found.longest] == ["pair 3", "pair 2", "pair 1", "pair 0"]


def test_the_ten_longest_are_of_a_view_in_its_order() -> None:
    table = table_of(*((1, 1, number) for number in range(1, 31)))
    view = table.select(range(29, -1, -2))  # every other pair, the longest first
    assert [size.answers["rejected"] for size in figures(view).longest] == [30, 28, 26, 24, 22, 20, 18, 16, 14, 12]
    assert figures(view).longest[0].origin == "pair 29"


def test_pairs_over_the_context_length_are_counted_by_their_longer_sequence() -> None:
    table = table_of((10, 5, 3), (10, 3, 5), (10, 6, 1), (10, 5, 7), (8, 7, 7))  # 15, 15, 16, 17 and 15 tokens
    assert figures(table, context=15).over_context == OverContext(
        2, ExampleSize("pair 3", 10, {"chosen": 5, "rejected": 7})
    )
    assert figures(table, context=17).over_context is None
    assert figures(table).over_context is None


def test_repeated_pairs_and_prompts_are_counted() -> None:
    table = table_of((3, 1, 1), (4, 1, 1)).select([0, 1, 0, 0])
    found = figures(table)
    assert (found.examples, found.prompts, found.repeated) == (4, 2, 2)


@pytest.mark.parametrize(("count", "sizes"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (101, [26, 51, 76])])
def test_samples_are_the_quartiles_each_once(count: int, sizes: list[int]) -> None:
    table = table_of(*((1, 1, number) for number in range(1, count + 1)))
    assert [sample.size.answers["rejected"] for sample in samples(table, tiny_tokenizer())] == sizes


@pytest.mark.parametrize("kind", ["byte", "meta"])
def test_an_answer_is_what_it_adds_to_the_prompt(kind: str) -> None:
    tokenizer = tiny_tokenizer(None, kind=kind)  # type: ignore[arg-type]
    texts = ["<s>why ask?", " yes. no</s>", " the dog</s>"]
    prompt, chosen, rejected = (
        np.array(tokenizer(text, add_special_tokens=False)["input_ids"])
        for text in (texts[0], texts[0] + texts[1], texts[0] + texts[2])
    )
    assert chosen[: len(prompt)].tolist() == prompt.tolist()
    tokens = PairTokens(prompt, chosen[len(prompt) :], rejected[len(prompt) :])
    # A tokenizer that marks spaces drops the first one of what it decodes, so an answer alone would lose its own.
    assert example_text(tokens.example, tokenizer) == texts


def test_a_border_inside_a_character_shows_both_halves() -> None:
    tokenizer = tiny_tokenizer(None)
    ids = np.array(tokenizer("é")["input_ids"])
    assert len(ids) == 2
    found = example_text(PairTokens(ids[:1], ids[1:], np.array(tokenizer("no")["input_ids"])).example, tokenizer)
    assert found == ["\ufffd", "\ufffd", "no"]


def test_a_list_by_hand() -> None:
    """Answers of 3 and 5 tokens that are compared, and one of 1; the prompt has 4."""
    answers = tuple(np.full(length, 9) for length in (3, 5, 1))
    table = ExampleTable.from_tokens([Example(np.arange(4), answers, ((1, 0), (1, 2)), (2.0, 4.5, 0.0))])
    found = figures(table)
    assert (found.unit, found.examples, found.answers, found.comparisons) == ("list", 1, 3, 2)
    assert (found.good, found.bad, found.answers_per_prompt) == (0, 0, (3, 3.0, 3))
    assert (found.tokens, found.tokens_shared) == (3 * 4 + 9, 4 + 9)
    assert {name: one.mean for name, one in found.lengths.items()} == {
        "prompt": 4, "answer": 3, "sequence": 9, "example": 13
    }  # fmt: skip
    sizes = {"answer 1, score 2": 3, "answer 2, score 4.5": 5, "answer 3, score 0": 1}
    assert found.longest == [ExampleSize("example 0", 4, sizes)]
    (sample,) = samples(table, tiny_tokenizer())
    assert sample.answers.keys() == sizes.keys()
    assert sample.comparisons == [(2, 1), (2, 3)]


def labelled(prompt: int, *answers: tuple[int, float]) -> Example:
    """A prompt of one token, with answers of these lengths and labels."""
    tokens = tuple(np.full(length, 9) for length, _ in answers)
    return Example(np.array([prompt]), tokens, (), tuple(label for _, label in answers))


def test_labels_by_hand() -> None:
    """Of prompt 1 an answer is good twice and bad once."""
    table = ExampleTable.from_tokens(
        [
            labelled(1, (3, 1.0)),
            labelled(1, (3, 0.0)),
            labelled(1, (3, 1.0)),
            labelled(1, (5, 0.0)),
            labelled(2, (1, 1.0)),
        ]
    )
    found = figures(table)
    assert (found.unit, found.examples, found.good, found.bad, found.prompts) == ("answer", 5, 3, 2, 2)
    assert found.answers_per_prompt == (1, 2.5, 4)
    assert (found.repeated, found.contradicted) == (1, 3)
    assert {name: one.mean for name, one in found.lengths.items()} == {
        "prompt": 1, "good": 7 / 3, "bad": 4, "sequence": 4, "example": 4
    }  # fmt: skip
    assert found.longest[0] == ExampleSize("example 3", 1, {"bad": 5})
    # The same with one example for each prompt
    grouped = figures(
        ExampleTable.from_tokens([labelled(1, (3, 1.0), (3, 0.0), (3, 1.0), (5, 0.0)), labelled(2, (1, 1.0))])
    )
    assert (grouped.unit, grouped.examples, grouped.good, grouped.bad, grouped.prompts) == ("prompt", 2, 3, 2, 2)
    assert (grouped.answers_per_prompt, grouped.repeated, grouped.contradicted) == ((1, 2.5, 4), 1, 3)
    names = {"answer 1, good": 3, "answer 2, bad": 3, "answer 3, good": 3, "answer 4, bad": 5}
    assert grouped.longest[0] == ExampleSize("example 0", 1, names)


def test_labels_that_are_all_good() -> None:
    found = figures(ExampleTable.from_tokens([labelled(1, (3, 1.0)), labelled(2, (3, 1.0))]))
    assert list(found.lengths) == ["prompt", "good", "sequence", "example"]
    assert (found.good, found.bad, found.contradicted) == (2, 0, 0)


def test_pairs_that_contradict_one_another_are_counted() -> None:
    a, b, c = (np.full(length, 9) for length in (3, 4, 5))
    pairs = [(1, a, b), (1, b, a), (1, a, b), (1, a, c), (2, b, a)]  # the last is about another prompt
    found = figures(ExampleTable.from_tokens([PairTokens(np.array([n]), *sides) for n, *sides in pairs]))
    assert (found.repeated, found.contradicted) == (1, 3)
    assert found.answers_per_prompt == (2, 5.0, 8)


def test_context_is_counted_and_shown_where_it_is() -> None:
    tokenizer = byte_tokenizer()
    texts = ("Q", "I call<|im_end|>\nTOOL<|im_end|>yes", "no")
    prompt, chosen, rejected = (np.array(tokenizer(text)["input_ids"]) for text in texts)
    weights = np.ones(len(chosen))
    weights[len("I call") + 1 : len("I call") + 1 + len("\nTOOL") + 1] = 0  # an end is one token
    example = Example(prompt, (chosen, rejected), PAIR, PAIR_SCORES, weights=(weights, np.ones(len(rejected))))
    table = ExampleTable.from_tokens([example])
    found = figures(table)
    assert (found.with_context, found.answer_tokens, found.trained_tokens) == (1, len(chosen) + 2, len(chosen) - 6 + 2)
    (sample,) = samples(table, tokenizer)
    (start, end), *others = sample.context["chosen"]
    assert sample.answers["chosen"][start:end] == "\nTOOL<|im_end|>"
    assert not others
    assert not sample.context["rejected"]


def test_weights_are_shown_where_they_are() -> None:
    tokenizer = byte_tokenizer()
    prompt, chosen, rejected = (np.array(tokenizer(text)["input_ids"]) for text in ("Q", "half none all", "no"))
    weights = np.repeat([0.5, 0.0, 1.0], [5, 5, 3])
    example = Example(prompt, (chosen, rejected), PAIR, PAIR_SCORES, weights=(weights, np.full(len(rejected), 2.0)))
    (sample,) = samples(ExampleTable.from_tokens([example]), tokenizer)
    assert sample.weights == {"chosen": [(0, 5, 0.5), (5, 10, 0.0)], "rejected": [(0, 2, 2.0)]}
    assert sample.context == {"chosen": [(5, 10)], "rejected": []}


def test_examples_that_grouping_would_join_share_all_tokens_of_the_prompt(tmp_path: Path) -> None:
    """Two records of a question that the template writes in different ways stay two examples."""
    ask: dict[str, object] = {
        "prompt": [{"role": "user", "content": "why?"}],
        "rejected": [{"role": "assistant", "content": "no"}],
    }
    records = [
        ask | {"chosen": [{"role": "assistant", "content": str(number)}], "chat_template_kwargs": kwargs}
        for number, kwargs in enumerate([None, {"enable_thinking": False}, {"enable_thinking": False}])
    ]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in records))
    options = TokenizeOptions(template=None, max_length=None, truncation="drop", on_bad="error")
    for grouped, joinable in ((False, 1), (True, 0)):
        tokenizer = FAMILIES["smollm3"].tokenizer()
        spec = SourceSpec(str(path))
        table = build_table([spec], tokenizer, folder=tmp_path, options=options, group_by_prompt=grouped)
        found = figures(table)
        assert (found.joinable, found.prompts) == (joinable, 1)
