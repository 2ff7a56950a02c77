"""A reward for `isopref judge` and `isopref rounds`: short answers that address the question and come to an end.

The model will exploit its reward, so each part blocks a cheap way to earn another: "Yes." is brief enough, any sentence
ends in a full stop, and repeating the question uses its words. An unfinished answer earns nothing, however short:
training adds an end token to it, so rewarding it could teach the model to stop in mid-sentence.
"""

import re
from itertools import pairwise

ENOUGH_WORDS = 20
FEWEST_WORDS = 4
FILLER = frozenset(["does", "from", "have", "should", "that", "they", "this", "what", "when", "which", "with", "your"])
LIST_NUMBER = re.compile(r"(?:^|\n)\s*\d+\.$")


def reward(prompt: str, answers: list[str]) -> list[float]:
    """One number per answer: 0 if it is unfinished, otherwise brevity, plus 0.5 for addressing the question.

    Multiplied by the share of distinct word pairs, so that repetition costs all of it.
    """
    return [ends(one) * variety(one) * (brevity(one) + 0.5 * addresses(prompt, one)) for one in answers]


def ends(answer: str) -> bool:
    """Whether the text ends as a statement does. Most answers that were cut at --max-tokens do not."""
    text = answer.rstrip().rstrip("\"')*")
    return text.endswith((".", "!")) and LIST_NUMBER.search(text) is None


def brevity(answer: str) -> float:
    """1 up to ENOUGH_WORDS words, then less. An answer of a word or two says too little."""
    count = len(answer.split())
    return 0.0 if count < FEWEST_WORDS else min(1.0, ENOUGH_WORDS / count)


def addresses(prompt: str, answer: str) -> bool:
    """Whether the answer takes up a content word of the question and adds one of its own."""
    asked, said = content_words(prompt), content_words(answer)
    return bool(said & asked) and bool(said - asked)


def content_words(text: str) -> set[str]:
    """Words of four letters or more and numbers, without the most common words; a plural counts as its singular."""
    words = re.findall(r"[a-z]{4,}|\d+", text.lower())
    return {word.removesuffix("s") for word in words if word not in FILLER}


def variety(answer: str) -> float:
    """The share of word pairs that are different: 1 for ordinary short text, near 0 for a loop."""
    words = answer.lower().split()
    pairs = list(pairwise(words))
    return len(set(pairs)) / len(pairs) if pairs else 0.0
