"""A reward for `isopref judge` and `isopref rounds`: short, polite answers that are complete sentences."""

import re

POLITE = re.compile(
    r"\b(please|thank|thanks|welcome|glad|happy to|sure|of course|certainly|sorry|hope)\b", re.IGNORECASE
)
ENOUGH_WORDS = 20


def reward(prompt: str, answers: list[str]) -> list[float]:
    """One number for each answer: at most 1 for brevity, 0.5 for a polite word, and at most 0.5 for a proper end."""
    return [brevity(one) + 0.5 * bool(POLITE.search(one)) + 0.5 * is_complete(one) for one in answers]


def brevity(answer: str) -> float:
    """1 up to ENOUGH_WORDS words, then less. An answer of one or two words is brief to the point of rudeness."""
    words = len(answer.split())
    return 0.0 if words < 3 else min(1.0, ENOUGH_WORDS / words)


def is_complete(answer: str) -> float:
    """1 for text that ends as a sentence does, and less the more it repeats itself."""
    words = answer.lower().split()
    return (len(set(words)) / len(words)) if words and answer.rstrip().endswith((".", "!", "?")) else 0.0
