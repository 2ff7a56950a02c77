"""Sharing the prompt changes no token: what every answer token is predicted from, and what it is, read off the rows."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isopref.batch.packing import RowKind
from isopref.batch.rows import build_microbatch
from isopref.data.chat import PairEncoder, TokenizeOptions
from isopref.data.judged import PreferencePair
from isopref.examples import PairTokens
from isopref.testing.models import examples
from isopref.testing.tokenizers import TEMPLATES, tiny_tokenizer
from isopref.types import Pass

OPTIONS = TokenizeOptions(template=None, max_length=None, truncation="drop", on_bad="drop")
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\r"), min_size=1, max_size=12).filter(str.strip)
ENCODERS = {name: PairEncoder(tiny_tokenizer(name), OPTIONS) for name in TEMPLATES}

Prediction = tuple[list[int], int]  # the tokens seen, at positions 0, 1, ..., and the token to predict


@st.composite
def pairs(draw: st.DrawFn) -> list[PairTokens]:
    """One to four pairs as some template and tokenizer make them."""
    encoder = ENCODERS[draw(st.sampled_from(sorted(TEMPLATES)))]
    drawn = draw(st.lists(st.tuples(TEXT, TEXT, TEXT), min_size=1, max_size=4))
    encoded = encoder.encode([PreferencePair(*texts, None, 1.0, "f:1") for texts in drawn])
    tokens = [PairTokens(*one.tokens.parts) for one in encoded if one is not None and not isinstance(one, Exception)]
    return tokens or [PairTokens(*(np.array([token]) for token in (5, 6, 7)))]


def predictions(one: Pass) -> dict[int, list[Prediction]]:
    """By completion, what a row says: straight from the meaning of segments."""
    ids, positions, segments = one.input_ids[0].tolist(), one.position_ids, one.segments
    assert positions is not None
    assert segments is not None
    keys = list(range(len(ids))) if segments.key_index is None else segments.key_index.tolist()
    found: dict[int, list[Prediction]] = {}
    for at, target, completion in zip(
        one.predict_index.tolist(), one.target.tolist(), one.answer.tolist(), strict=True
    ):
        segment = int(np.searchsorted(segments.query_bounds, at, side="right")) - 1
        of_segment = keys[segments.key_bounds[segment] : segments.key_bounds[segment + 1]]
        after = segments.query_bounds[segment + 1] - 1 - at  # queries behind this one, whose keys it does not see
        seen = of_segment[: len(of_segment) - after]
        assert positions[0, seen].tolist() == list(range(len(seen)))
        found.setdefault(completion, []).append(([ids[key] for key in seen], target))
    return found


def expected(tokens: list[PairTokens]) -> dict[int, list[Prediction]]:
    answers: list[tuple[Any, Any]] = [(pair.prompt, pair.chosen) for pair in tokens]
    answers += [(pair.prompt, pair.rejected) for pair in tokens]
    return {
        number: [([*prompt.tolist(), *answer[:n].tolist()], int(answer[n])) for n in range(len(answer))]
        for number, (prompt, answer) in enumerate(answers)
    }


@pytest.mark.parametrize("kind", ["shared", "packed"])
@settings(max_examples=100, deadline=None)
@given(tokens=pairs())
def test_every_answer_token_is_predicted_from_its_own_prompt(kind: RowKind, tokens: list[PairTokens]) -> None:
    (row,) = build_microbatch(examples(tokens), kind).passes
    assert predictions(row) == expected(tokens)
