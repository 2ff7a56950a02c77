"""Where the text of an answer, as a user sees it, has weights of its own; 0 is context, which is not trained on."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from isopref.examples import Example
from isopref.types import IntArray

Decode = Callable[..., str]  # arrays of tokens -> one text


def weight_ranges(example: Example, number: int, decode: Decode) -> list[tuple[int, int, float]]:
    """The parts of an answer's text with another weight than 1: where each begins and ends, in characters; the weight.

    A weight of 0 is context.
    """
    weights = example.weights_of(number)
    if weights is None:
        return []
    answer = example.answers[number]
    borders = [0, *(np.flatnonzero(np.diff(weights)) + 1).tolist(), len(answer)]
    places = [len(decode(example.prompt, answer[:border])) - len(decode(example.prompt)) for border in borders]
    stretches = zip(weights[borders[:-1]].tolist(), places, places[1:], strict=False)
    return [(start, end, weight) for weight, start, end in stretches if weight != 1]


def decoder(tokenizer: object) -> Decode:
    """A function that decodes tokens as text, including special tokens."""

    def decode(*parts: IntArray) -> str:
        ids = [int(token) for part in parts for token in part]
        return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))  # type: ignore[attr-defined]

    return decode
