"""A prompt that is cut still reads as a conversation: begun, ended and asked as the template writes it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, Literal

import pytest

from isopref.data.chat import EncodedPair, PairEncoder, TokenizeOptions
from isopref.data.judged import BadPairError, PreferencePair
from isopref.examples import Example
from isopref.testing.tokenizers import TEMPLATES, tiny_tokenizer
from support.families import FAMILIES

Truncation = Literal["keep_start", "keep_end"]
tokenizer_of = cache(tiny_tokenizer)

Turn = dict[str, str]
SYSTEM: Turn = {"role": "system", "content": "only yes or no"}
LONG = "the " + "why " * 30 + "how"
BEGINNINGS = {  # all before the words of the first turn; a space there is one token with the first word
    "chatml": "<|im_start|>user\n",
    "llama3": "<s><|header|>user<|/header|>\n\n",
    "mistral": "<s>[INST]",
    "merging": "Q:",
    "endless": "### user\n",
}


def turn(role: str, content: str) -> Turn:
    return {"role": role, "content": content}


def encode(tokenizer: Any, prompt: Any, limit: int | None, truncation: Truncation, template: str | None) -> Any:
    options = TokenizeOptions(template=template, max_length=limit, truncation=truncation, on_bad="error")
    (result,) = PairEncoder(tokenizer, options).encode([PreferencePair(prompt, "yes", "no", None, 1.0, "file:7")])
    return result


def cut(tokenizer: Any, prompt: Any, room: int, truncation: Truncation, template: str | None = None) -> str | None:
    """The prompt as it is trained on, in `room` tokens beside the answers; None: dropped."""
    whole = encode(tokenizer, prompt, None, truncation, template)
    longer = max(len(side) for side in whole.tokens.answers)
    result = encode(tokenizer, prompt, room + longer, truncation, template)
    if result is None:
        return None
    assert isinstance(result, EncodedPair)
    assert ("truncated" in result.notes) == (len(whole.tokens.prompt) > room)
    assert len(result.tokens.prompt) <= room
    assert [side.tolist() for side in result.tokens.answers] == [side.tolist() for side in whole.tokens.answers]
    return str(tokenizer.decode(result.tokens.prompt.tolist()))


@pytest.mark.parametrize("template", TEMPLATES)
def test_keep_end_keeps_how_a_conversation_begins(template: str) -> None:
    tokenizer = tokenizer_of(template)
    beginning = BEGINNINGS[template]
    asked = [{"role": "user", "content": LONG}]
    assert (cut(tokenizer, asked, 30, "keep_end") or "").startswith(f"{beginning} why why")
    if template != "mistral":  # which takes no system turn
        text = cut(tokenizer, [SYSTEM, *asked], 40, "keep_end") or ""
        before, _, after = text.partition(SYSTEM["content"])
        assert before.rstrip(" ") == beginning.replace("user", "system")
        assert f"{beginning.removeprefix('<s>')} why why" in after


def test_plain_text_begins_with_bos_if_it_did() -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = tiny_tokenizer(None)
    assert cut(tokenizer, LONG, 3, "keep_end", "none") == " why why how"
    assert cut(tokenizer, LONG, 5, "keep_start", "none") == "the why why why why"
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    assert cut(tokenizer, LONG, 3, "keep_end", "none") == "<s> why how"
    assert cut(tokenizer, LONG, 1, "keep_end", "none") is None


# --- several turns ----------------------------------------------------------------------------------------

TURNS = [
    turn("user", " why how" * 6),
    turn("assistant", " yes no" * 7),
    turn("user", " who"),
    turn("assistant", " the dog"),
    turn("user", " the fox asks" * 3),
]


def shorter(turns: list[Turn], truncation: Truncation) -> Iterator[list[Turn]]:
    """All conversations that end (or begin) as `turns` do and begin (or end) in a turn of the user, longest first."""
    for number in range(0, len(turns), 2):
        at = number if truncation == "keep_end" else len(turns) - 1 - number
        words = [f" {word}" for word in turns[at]["content"].split()]
        for gone in range(len(words)):
            kept = words[gone:] if truncation == "keep_end" else words[: len(words) - gone]
            part = turn("user", "".join(kept))
            yield [part, *turns[at + 1 :]] if truncation == "keep_end" else [*turns[:at], part]


@pytest.mark.parametrize("truncation", ["keep_end", "keep_start"])
@pytest.mark.parametrize("system", [[], [SYSTEM]])
def test_a_longer_conversation_is_cut_to_the_longest_that_fits(truncation: Truncation, system: list[Turn]) -> None:
    tokenizer = tokenizer_of("chatml")
    texts = [
        tokenizer.apply_chat_template([*system, *turns], tokenize=False, add_generation_prompt=True)
        for turns in shorter(TURNS, truncation)
    ]
    lengths = [len(tokenizer(text)["input_ids"]) for text in texts]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > lengths[-1] + 40
    for room in range(lengths[-1] - 2, lengths[0] + 2):
        fitting = [text for text, length in zip(texts, lengths, strict=True) if length <= room]
        assert cut(tokenizer, [*system, *TURNS], room, truncation) == (fitting[0] if fitting else None)


def test_words_of_a_tool_are_cut_where_the_question_is_short() -> None:
    prompt = [turn("user", "who?"), turn("assistant", "the dog"), turn("tool", LONG)]
    text = cut(tokenizer_of("chatml"), prompt, 40, "keep_end") or ""
    opening = "<|im_start|>user\nwho?<|im_end|>\n<|im_start|>assistant\nthe dog<|im_end|>\n<|im_start|>tool\n why why"
    assert text.startswith(opening)
    assert text.endswith(" why how<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(("truncation", "left"), [("keep_end", " why why how"), ("keep_start", "the why why")])
def test_a_system_turn_is_cut_where_nothing_else_will_do(truncation: Truncation, left: str) -> None:
    tokenizer = tokenizer_of("chatml")
    asked = "<|im_end|>\n<|im_start|>user\nwho?<|im_end|>\n<|im_start|>assistant\n"
    expected = f"<|im_start|>system\n{left}{asked}"
    room = len(tokenizer(expected)["input_ids"])
    assert cut(tokenizer, [turn("system", LONG), turn("user", "who?")], room, truncation) == expected
    assert cut(tokenizer, [turn("system", LONG), turn("user", LONG)], room, truncation) is None


def test_where_no_mark_shows_only_bos_is_known_to_open_the_prompt() -> None:
    tokenizer = tiny_tokenizer("llama3")
    tokenizer.chat_template = tokenizer.chat_template.replace("| trim", "| replace('\ue000', '') | trim")
    expected = "<s> why why how<|eot|><|header|>assistant<|/header|>\n\n"
    assert cut(tokenizer, LONG, len(tokenizer(expected)["input_ids"]), "keep_end") == expected


# --- answers of several turns -----------------------------------------------------------------------------

CALLED: dict[str, Any] = {
    **turn("assistant", ""),
    "reasoning_content": "the result " * 4,
    "tool_calls": [{"type": "function", "id": "call_1", "function": {"name": "look", "arguments": {}}}],
}
RESULT = "the dog" + " the fox" * 20
AGAIN = turn("user", "and who?")
LATER = [  # side by side: they part at an answer, at a question, and at one or the other
    ([turn("assistant", "yes"), AGAIN], [turn("assistant", "no"), AGAIN]),
    ([AGAIN], [turn("user", "but who?")]),
    ([turn("assistant", "yes"), AGAIN], [AGAIN]),
]


@pytest.mark.parametrize("truncation", ["keep_end", "keep_start"])
@pytest.mark.parametrize("family", ["qwen3", "harmony", "qwen2.5"])
@pytest.mark.parametrize("between", LATER)
def test_a_prompt_is_cut_where_the_last_turn_reads_it(between: Any, family: str, truncation: Truncation) -> None:
    """Qwen3 and gpt-oss cut the reasoning of the prompt's call once the user asks again."""
    tokenizer = FAMILIES[family].tokenizer()
    is_cut = family == "qwen3" or (family == "harmony" and between is not LATER[2])  # gpt-oss: once there is an answer
    called = CALLED if is_cut else {**CALLED, "reasoning_content": ""}
    prompt: Any = [turn("user", LONG), called, turn("tool", RESULT)]
    chosen, rejected = ([*turns, turn("assistant", said)] for turns, said in zip(between, ("a", "b"), strict=True))
    pair = PreferencePair(prompt, chosen, rejected, None, 1.0, "file:7")
    whole = encode_last(tokenizer, pair, None, truncation)
    assert whole is not None
    longer = max(map(len, whole.answers))
    before, _, rest = tokenizer.decode(whole.prompt).partition(LONG)
    calls, _, after = rest.partition(RESULT)
    assert before
    assert calls
    for room in range(len(whole.prompt) - 38, len(whole.prompt)):
        left = encode_last(tokenizer, pair, room + longer, truncation)
        assert left is not None
        text = tokenizer.decode(left.prompt)
        assert text.startswith(before)
        assert text.endswith(after)
        asked, _, result = text.removeprefix(before).removesuffix(after).partition(calls)
        assert (asked == LONG) != (result == RESULT), text
        is_kept = str.endswith if truncation == "keep_end" else str.startswith
        assert is_kept(LONG, asked)
        assert is_kept(RESULT, result)
        assert [one.tolist() for one in left.answers] == [one.tolist() for one in whole.answers]


def encode_last(tokenizer: Any, pair: PreferencePair, limit: int | None, truncation: Truncation) -> Example | None:
    options = TokenizeOptions(template=None, max_length=limit, truncation=truncation, on_bad="error", train_on="last")
    (result,) = PairEncoder(tokenizer, options).encode([pair])
    assert not isinstance(result, BadPairError), result
    return None if result is None else result.tokens
