"""Where the text of an answer, as a user sees it, is context: tokens that the model reads but is not trained on."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from isopref.examples import Example
from isopref.types import IntArray

Decode = Callable[..., str]  # arrays of tokens -> one text


def context_ranges(example: Example, number: int, decode: Decode) -> list[tuple[int, int]]:
    """The parts of an answer's text that are context: where each begins and ends, in characters."""
    weights = example.weights_of(number)
    if weights is None:
        return []
    answer = example.answers[number]
    borders = [0, *(np.flatnonzero(np.diff(weights != 0)) + 1).tolist(), len(answer)]
    places = [len(decode(example.prompt, answer[:border])) - len(decode(example.prompt)) for border in borders]
    stretches = zip(borders, places, places[1:], strict=False)
    return [(start, end) for border, start, end in stretches if border < len(answer) and weights[border] == 0]


def decoder(tokenizer: object) -> Decode:
    """A function that decodes tokens as text, including special tokens."""

    def decode(*parts: IntArray) -> str:
        ids = [int(token) for part in parts for token in part]
        return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))  # type: ignore[attr-defined]

    return decode
