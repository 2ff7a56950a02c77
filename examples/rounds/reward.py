"""A reward for `isopref judge` and `isopref rounds`: short answers that address the question and come to an end.

A reward is what the model will exploit, so each part blocks the cheap way to earn another: brevity alone is won by
"Yes.", a full stop by any sentence at all, and words of the question by repeating them. A reward for polite words, for
example, prefers an advertisement that ends with "I'm sure" to an answer about gases.
"""

import re
from itertools import pairwise

ENOUGH_WORDS = 20
FEWEST_WORDS = 4
FILLER = frozenset(["does", "from", "have", "should", "that", "they", "this", "what", "when", "which", "with", "your"])


def reward(prompt: str, answers: list[str]) -> list[float]:
    """One number per answer, at most 2: brevity, plus 0.5 for a proper end, plus 0.5 for addressing the question.

    Multiplied by the share of distinct word pairs, so that repetition costs all of it.
    """
    return [(brevity(one) + 0.5 * ends(one) + 0.5 * addresses(prompt, one)) * variety(one) for one in answers]


def brevity(answer: str) -> float:
    """1 up to ENOUGH_WORDS words, then less. An answer of a word or two says too little."""
    count = len(answer.split())
    return 0.0 if count < FEWEST_WORDS else min(1.0, ENOUGH_WORDS / count)


def ends(answer: str) -> bool:
    """Whether the text ends as a sentence does. Most answers that were cut at --max-tokens do not."""
    return answer.rstrip().endswith((".", "!", "?"))


def addresses(prompt: str, answer: str) -> bool:
    """Whether the answer takes up a content word of the question."""
    return bool(content_words(prompt) & content_words(answer))


def content_words(text: str) -> set[str]:
    """Words of four letters or more and numbers, without the most common words; a plural counts as its singular."""
    words = re.findall(r"[a-z]{4,}|\d+", text.lower())
    return {word.removesuffix("s") for word in words if word not in FILLER}


def variety(answer: str) -> float:
    """The share of word pairs that are different: 1 for ordinary short text, near 0 for a loop."""
    words = answer.lower().split()
    pairs = list(pairwise(words))
    return len(set(pairs)) / len(pairs) if pairs else 0.0
