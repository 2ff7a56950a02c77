"""What a user may not expect in the text of a pair: special tokens, answers that repeat the prompt, text left out.

Counted while pairs are tokenised; isopref.build decides which counts are worth a warning.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from isopref.data.judged import Preference
from isopref.data.messages import Turns

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def special_token_pattern(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str] | None:
    """A pattern that finds the tokenizer's special tokens in a text; None if it has none."""
    added = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    special = sorted(added | set(tokenizer.all_special_tokens))
    return re.compile("|".join(re.escape(token) for token in special)) if special else None


def first_special_token(pair: Preference, special: re.Pattern[str]) -> str | None:
    """The first special token in the text of a pair, if any: the template may write it a second time."""
    texts = (text for turns in (pair.prompt, *pair.answers) for text in _texts(turns))
    return next((found[0] for text in texts if (found := special.search(text))), None)


def repeats_prompt(pair: Preference) -> bool:
    """Whether all answers begin by repeating the last turn of the prompt."""
    asked = _texts(pair.prompt)[-1].strip()
    return bool(asked) and all(_texts(side)[-1].lstrip().startswith(asked) for side in pair.answers)


def has_unused_context(fields: dict[str, Any], pair: Preference, reads: frozenset[str]) -> bool:
    """Whether a record has earlier turns in a column 'history', or text in 'input' that is not in its prompt.

    These are columns of Alpaca's data. Not if they are among the columns that are read, `reads`. With a column 'prompt'
    they are not read, because it may already contain them in other words.
    """
    text = None if "input" in reads else fields.get("input")
    unasked = isinstance(text, str) and not any(text.strip() in said for said in _texts(pair.prompt))
    return unasked or ("history" not in reads and bool(fields.get("history")))


def _texts(turns: Turns) -> list[str]:
    return [turns] if isinstance(turns, str) else [turn["content"] for turn in turns]
