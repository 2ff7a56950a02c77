"""Mismatched pairs: by hand, and the same whatever the order, the view or the rest of a batch."""

import numpy as np
import pytest

from isopref.data.content import answer_id
from isopref.data.mismatched import Mismatched, partners
from isopref.data.table import ExampleTable
from isopref.errors import DataError
from isopref.examples import Example
from isopref.testing import labels
from isopref.testing.cells import tree_batch
from isopref.testing.models import with_context


def ids(*firsts: int) -> np.ndarray:
    """Ids in the order of these numbers."""
    found = np.zeros((len(firsts), 16), np.uint8)
    found[:, 0] = firsts
    return found


def test_the_partner_is_the_next_by_id_with_another_question() -> None:
    # In order: 3 (question 7), 0 (7), 2 (8), 1 (7), and around to 3 and 0.
    questions = np.array([7, 7, 8, 7], np.uint64)
    assert partners(ids(20, 200, 100, 10), questions).tolist() == [2, 2, 1, 2]


def test_the_last_byte_of_an_id_counts() -> None:
    found = np.zeros((3, 16), np.uint8)
    found[:, 15] = [3, 1, 2]
    assert partners(found, np.arange(3).astype(np.uint64)).tolist() == [1, 2, 0]


def test_a_table_with_one_question_is_refused() -> None:
    prompt = np.array([3, 4])
    table = ExampleTable.from_tokens([Example(prompt, (np.array([n]),), (), (1.0,)) for n in (5, 6)])
    with pytest.raises(DataError, match=r"all examples have the same prompt.*such as bco"):
        Mismatched(table)


@pytest.mark.parametrize("context", [False, True])
def test_every_prompt_has_the_answer_that_the_oracle_gives_it(context: bool) -> None:
    examples = with_context(tree_batch()[0], fractions=True) if context else tree_batch()[0]
    found = Mismatched(ExampleTable.from_tokens(examples))
    for n, (prompt, answer, weights) in enumerate(labels.mismatched(examples)):
        one = found.example(n)
        assert one.token_weights[0].tolist() == weights
        assert found.lengths.trained[n] == np.count_nonzero(weights)
        assert (one.prompt.tolist(), one.answers[0].tolist()) == (prompt.tolist(), answer.tolist())
        assert (found.lengths.prompt[n], found.lengths.answer[n]) == (len(prompt), len(answer))
        assert found.answer_ids[n].tobytes() == answer_id(prompt, answer, one.weights_of(0))


def test_an_answer_is_cut_where_the_sequence_would_be_the_longest() -> None:
    long_prompt = Example(np.arange(3, 8), (np.array([3, 4]),), (), (1.0,))
    long_answer = Example(np.array([9]), (np.arange(10, 16),), (), (0.0,))
    found = Mismatched(ExampleTable.from_tokens([long_prompt, long_answer]))
    assert found.example(0).answers[0].tolist() == [10, 11]  # seven tokens, as the longest sequence of the table
    assert found.example(1).answers[0].tolist() == [3, 4]
    assert found.lengths.sequence.tolist() == [7, 3]


def test_the_order_of_a_table_does_not_matter() -> None:
    table = ExampleTable.from_tokens(tree_batch()[0])
    order = np.random.default_rng(0).permutation(len(table))
    found, shuffled = Mismatched(table), Mismatched(table.select(order))
    assert np.array_equal(shuffled.answer_ids, found.answer_ids[order])
