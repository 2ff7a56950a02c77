"""Weights of tokens: what a table keeps of them, what they cost, and what they do to counts and ids."""

import numpy as np
import pytest

from isopref.data.table import ExampleTable
from isopref.data.table_file import TableRow, record_batch
from isopref.data.token_weights import from_runs, to_runs
from isopref.examples import PAIR, PAIR_SCORES, Example, Lengths, PairTokens
from isopref.testing.models import random_pairs, tree_examples, with_context


def example(*weights: list[float]) -> Example:
    answers = (np.array([5, 6, 7]), np.array([8, 9]))
    return Example(np.array([3, 4]), answers, PAIR, PAIR_SCORES, weights=tuple(np.array(one) for one in weights))


def test_runs_by_hand() -> None:
    runs = to_runs(example([1, 0, 0], [0, 0.5]))
    assert runs.lengths.tolist() == [1, 3, 1]
    assert runs.weights.tolist() == [1.0, 0.0, 0.5]
    assert [one.tolist() for one in from_runs(runs, [3, 2])] == [[1, 0, 0], [0, 0.5]]


def test_a_table_gives_back_weights_and_counts() -> None:
    examples = with_context(tree_examples(), fractions=True) + tree_examples(seed=1)
    order = [9, 2, 0, 13, 5]
    view = ExampleTable.from_tokens(examples).select(order)
    wanted = [examples[n] for n in order]
    for index, one in enumerate(wanted):
        assert [part.tolist() for part in view.example(index).weights] == [part.tolist() for part in one.weights]
    assert view.lengths.trained.tolist() == Lengths.of(wanted).trained.tolist()
    assert view.lengths.trained.tolist() != view.lengths.answer.tolist()


def test_counts_are_of_trained_tokens_and_sequences_of_all() -> None:
    lengths = Lengths.of([example([1, 0, 2], [0, 0.5]), example()])
    assert lengths.trained.tolist() == [2, 1, 3, 2]
    assert lengths.compared_tokens.tolist() == [[2, 3], [1, 2]]
    assert lengths.sequence.tolist() == [5, 4, 5, 4]


def test_other_weights_make_other_answers() -> None:
    """The reference's value of an answer is looked up by its id."""
    some = [example(), example([1, 0, 1], [1, 1]), example([1, 0.5, 1], [1, 1]), example([1, 1, 1], [1, 1])]
    table = ExampleTable.from_tokens(some)
    ids = [one.tobytes() for one in table.ids]
    chosen, rejected = ([one.tobytes() for one in table.answer_ids[side::2]] for side in (0, 1))
    assert ids[3] == ids[0]  # weights of one say what none say
    assert len(set(ids)) == 3
    assert chosen[3] == chosen[0]
    assert len(set(chosen)) == 3
    assert len(set(rejected)) == 1


def test_a_table_without_weights_grows_by_a_few_bytes_and_one_with_them_by_runs() -> None:
    def num_bytes(examples: list[Example]) -> int:
        batch = record_batch([TableRow(one, 1.0, b"", "") for one in examples], 0)
        return sum(batch[name].get_total_buffer_size() for name in ("trained", "run_lengths", "run_weights"))

    pairs = [pair.example for pair in random_pairs(100, longest=400)]  # 580 tokens each
    assert num_bytes(pairs) <= 15 * len(pairs)
    assert num_bytes(with_context(pairs)) <= 150 * len(pairs)


@pytest.mark.parametrize(
    ("weights", "what"),
    [
        (([1, 0], [1, 1]), "every token"),
        (([1, 0, 1],), "every token"),
        (([0, 0, 0], [1, 1]), "at least one token"),
        (([1, -1, 1], [1, 1]), "not negative"),
        (([1, float("nan"), 1], [1, 1]), "finite"),
    ],
)
def test_weights_that_make_no_sense_are_refused(weights: tuple[list[float], ...], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        ExampleTable.from_tokens([example(*weights)])


@pytest.mark.parametrize("empty", [0, 1, 2])
def test_parts_without_tokens_are_refused(empty: int) -> None:
    """A mean over the tokens of such an answer would be NaN, and its step would be skipped."""
    parts = [np.array([3, 4]), np.array([5]), np.array([6, 7])]
    parts[empty] = np.array([], np.int64)
    for given in (PairTokens(*parts), PairTokens(*parts).example):
        with pytest.raises(ValueError, match="at least one token"):
            ExampleTable.from_tokens([given])
