"""Tokens say what the template writes; the border is proven; ends, BOS and lengths are as documented."""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isopref.data.chat import EncodedPair, PairEncoder, TokenizeOptions
from isopref.data.judged import BadPairError, PreferencePair
from isopref.errors import ConfigError
from isopref.examples import Example
from isopref.testing.tokenizers import TEMPLATES, tiny_tokenizer

Truncation = Literal["drop", "keep_start", "keep_end"]
tokenizer_of = cache(tiny_tokenizer)


def options(
    *, template: str | None = None, max_length: int | None = None, truncation: Truncation = "drop"
) -> TokenizeOptions:
    return TokenizeOptions(template=template, max_length=max_length, truncation=truncation, on_bad="error")


def pair_of(prompt: Any, chosen: Any, rejected: Any, tools: list[dict[str, Any]] | None = None) -> PreferencePair:
    return PreferencePair(prompt, chosen, rejected, tools, 1.0, "file:7")


def encode(tokenizer: Any, pair: PreferencePair, opts: TokenizeOptions | None = None) -> EncodedPair:
    (result,) = PairEncoder(tokenizer, opts or options()).encode([pair])
    if isinstance(result, BadPairError):
        raise result
    assert result is not None
    return result


def texts(tokenizer: Any, tokens: Example) -> tuple[str, str, str]:
    prompt, chosen, rejected = (tokenizer.decode(part.tolist()) for part in tokens.parts)
    return prompt, chosen, rejected


# --- what the template writes ---------------------------------------------------------------------------

ENDS = ("</s>", "<|im_end|>", "<|eot|>")
WORD = st.sampled_from(
    ["the", "answer", "yes", "no", "Q:", " ", "\n", "A: ", "[INST]", "[/INST]", *ENDS, "é", "😀", "\u2028"]
)
TEXT = st.one_of(
    st.lists(WORD, min_size=1, max_size=8).map("".join),
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12),
).filter(lambda text: bool(text.strip()))


@st.composite
def conversations(draw: st.DrawFn) -> PreferencePair:
    contents = draw(st.lists(TEXT, min_size=1, max_size=5).filter(lambda turns: len(turns) % 2 == 1))
    prompt = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]
    chosen, rejected = ([{"role": "assistant", "content": draw(TEXT)}] for _ in range(2))
    return pair_of(prompt, chosen, rejected)


SPACES = {"byte": " \t\n\r\x0b\x0c\x1c\x1d\x1e\x1f", "meta": " \n"}  # that are tokens, not parts of one or unknown


def ended(text: str, *, bare: bool, kind: str = "byte") -> str:
    """What is trained on: neither white space after the end of the turn nor a second end; EOS where there is none."""
    stripped = text.rstrip(SPACES[kind])
    if bare and not stripped.endswith("</s>"):
        return text + "</s>"
    for end in ENDS:
        while stripped.endswith(end) and stripped.removesuffix(end).rstrip(SPACES[kind]).endswith(end):
            stripped = stripped.removesuffix(end).rstrip(SPACES[kind])
    return stripped


@pytest.mark.parametrize("template", TEMPLATES)
@settings(max_examples=150, deadline=None)
@given(pair=conversations())
def test_tokens_decode_to_what_the_template_writes(template: str, pair: PreferencePair) -> None:
    tokenizer = tokenizer_of(template)
    answers = [[*pair.chosen], [*pair.rejected]]
    generation_prompt = tokenizer.apply_chat_template(pair.prompt, tokenize=False, add_generation_prompt=True)
    written = [tokenizer.apply_chat_template([*pair.prompt, *side], tokenize=False) for side in answers]
    endless = template == "endless" and not all(text.rstrip(SPACES["byte"]).endswith("</s>") for text in written)
    completions = [text.removeprefix(generation_prompt) for text in written]
    written = [generation_prompt + ended(text, bare=template == "endless") for text in completions]
    if written[0] == written[1]:  # llama3 trims: answers that differ in outer spaces only become one
        with pytest.raises(BadPairError, match="the same tokens"):
            encode(tokenizer, pair)
        return
    result = encode(tokenizer, pair)
    prompt, *sides = texts(tokenizer, result.tokens)
    for side, text in zip(result.tokens.answers, written, strict=True):
        whole = [*result.tokens.prompt.tolist(), *side.tolist()]
        assert tokenizer.decode(whole) == text
        # Not only the text: these are the very tokens a generating model would see and give.
        assert whole == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert generation_prompt.startswith(prompt.rstrip("\ufffd"))  # the border may lie inside a character
    if "boundary_backoffs" not in result.notes:
        assert prompt == generation_prompt
        said = [ended(turn["content"].strip(), bare=False) for (turn,) in answers if isinstance(turn, dict)]
        assert all(answer in side for answer, side in zip(said, sides, strict=True))
    assert ("added_ends" in result.notes) == endless
    assert "missing_eos" not in result.notes
    assert all(side.dtype == np.int32 for side in result.tokens.parts)


@settings(max_examples=60, deadline=None)
@given(prompt=TEXT, chosen=TEXT, rejected=TEXT)
@pytest.mark.parametrize("kind", ["byte", "meta"])
def test_raw_text_is_prompt_completion_eos(
    kind: Literal["byte", "meta"], prompt: str, chosen: str, rejected: str
) -> None:
    tokenizer = tokenizer_of(None, kind=kind)
    encoder = PairEncoder(tokenizer, options(template="none"))
    (result,) = encoder.encode([pair_of(prompt, chosen, rejected)])
    if not isinstance(result, EncodedPair):
        assert isinstance(result, BadPairError)
        sides = (prompt + ended(answer, bare=True, kind=kind) for answer in (chosen, rejected))
        ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, *sides)]
        assert result.reason == ("boundary" if len({row[0] for row in ids}) > 1 else "tie")
        assert result.reason == "boundary" or ids[1] == ids[2]
        return
    for side, text in zip(result.tokens.answers, (chosen, rejected), strict=True):
        whole = [*result.tokens.prompt.tolist(), *side.tolist()]
        assert whole == tokenizer(prompt + ended(text, bare=True, kind=kind), add_special_tokens=False)["input_ids"]


def test_results_do_not_depend_on_their_neighbours() -> None:
    tokenizer = tokenizer_of("merging")
    pairs = [pair_of(f"why {n}?", "yes" * n, "no") for n in range(1, 6)]
    together = PairEncoder(tokenizer, options()).encode(pairs)
    for pair, result in zip(pairs, together, strict=True):
        alone = encode(tokenizer, pair)
        assert isinstance(result, EncodedPair)
        assert all(np.array_equal(*parts) for parts in zip(alone.tokens.parts, result.tokens.parts, strict=True))


# --- the border -----------------------------------------------------------------------------------------


def test_the_border_backs_off_where_the_tokenizer_merges_across_it() -> None:
    result = encode(tokenizer_of("merging"), pair_of("why?", "yes", "no"))
    # By hand: "A: " + "yes" is A, :, " yes" to the tokenizer; the lone space of the generation prompt is gone.
    assert texts(tokenizer_of("merging"), result.tokens) == ("Q: why?\nA:", " yes</s>", " no</s>")
    assert result.notes == {"boundary_backoffs"}


def test_a_prompt_keeps_its_id_when_only_one_of_its_pairs_backs_off() -> None:
    tokenizer = tokenizer_of("merging")
    merged, whole = (encode(tokenizer, pair_of("why?", *sides)) for sides in (("yes", "no"), ("\n", "\n\n")))
    other = encode(tokenizer, pair_of("how?", "yes", "no"))
    assert len(merged.tokens.prompt) < len(whole.tokens.prompt)
    assert merged.question_id == whole.question_id != other.question_id


def test_a_generation_prompt_unlike_an_answer_is_backed_off() -> None:
    tokenizer = tiny_tokenizer("chatml")
    tokenizer.chat_template = TEMPLATES["chatml"].replace("assistant\n{% endif %}", "assistant\nthe{% endif %}")
    result = encode(tokenizer, pair_of("why?", "yes", "no"))
    assert texts(tokenizer, result.tokens)[1:] == ("yes<|im_end|>", "no<|im_end|>")
    assert result.notes == {"generation_prompt_backoffs"}


def test_an_answer_follows_what_the_model_was_given_where_the_template_rewrites_that_once_it_is_answered() -> None:
    tokenizer = tiny_tokenizer("chatml")
    tokenizer.chat_template = "{{ messages | length }}" + TEMPLATES["chatml"]
    result = encode(tokenizer, pair_of("why?", "yes", "no"))
    asked = "1<|im_start|>user\nwhy?<|im_end|>\n<|im_start|>assistant\n"
    assert texts(tokenizer, result.tokens) == (asked, "yes<|im_end|>", "no<|im_end|>")
    assert not result.notes


def test_a_template_that_rewrites_the_end_of_the_prompt_has_no_border() -> None:
    tokenizer = tiny_tokenizer("chatml")
    tokenizer.chat_template = TEMPLATES["chatml"].replace("<|im_end|>", "{{ messages | length }}<|im_end|>")
    with pytest.raises(
        BadPairError, match=r"file:7: the chat template writes what comes before 'chosen' .*path\.jinja"
    ):
        encode(tokenizer, pair_of("why?", "yes", "no"))


def test_a_prompt_of_which_no_token_is_left_is_bad() -> None:
    tokenizer = tokenizer_of(None)
    assert (
        tokenizer("yes", add_special_tokens=False)["input_ids"] != tokenizer("y", add_special_tokens=False)["input_ids"]
    )
    with pytest.raises(BadPairError, match="not one token of the prompt"):
        encode(tokenizer, pair_of(" ", "yes", "no"), options(template="none"))


def test_a_conversation_the_template_refuses_is_a_bad_pair() -> None:
    prompt = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "why?"}]
    with pytest.raises(
        BadPairError, match=r"file:7: the chat template refuses the conversation.*only user and assistant turns"
    ):
        encode(tokenizer_of("mistral"), pair_of(prompt, "yes", "no"))


def test_a_template_that_cannot_write_a_prompt_alone_is_a_bad_pair_too() -> None:
    tokenizer = tiny_tokenizer("merging")
    refuse = (
        "{% if not add_generation_prompt and messages[-1].role != 'assistant' %}{{ raise_exception('x') }}{% endif %}"
    )
    # The generation prompt is not how an answer begins, so the prompt is also written without its answer.
    tokenizer.chat_template = refuse + TEMPLATES["merging"].replace("prompt %}A: ", "prompt %}A> ")
    with pytest.raises(BadPairError, match="file:7: the chat template refuses the conversation"):
        encode(tokenizer, pair_of("why?", "yes", "no"))


def test_tools_reach_the_template() -> None:
    tokenizer = tiny_tokenizer("chatml")
    tokenizer.chat_template = "{{ (tools or []) | length }} tools " + TEMPLATES["chatml"]
    tool = {"type": "function", "function": {"name": "add"}}
    for tools, count in ((None, 0), ([tool], 1), ([tool, tool], 2)):
        result = encode(tokenizer, pair_of("why?", "yes", "no", tools))
        assert texts(tokenizer, result.tokens)[0].startswith(f"{count} tools <|im_start|>user")


# --- BOS and ends ---------------------------------------------------------------------------------------


def test_double_bos_is_counted_and_left_as_the_template_wrote_it() -> None:
    tokenizer = tiny_tokenizer("llama3")
    assert not encode(tokenizer, pair_of("why?", "yes", "no")).notes
    tokenizer.chat_template = "{{ bos_token }}" + TEMPLATES["llama3"]
    result = encode(tokenizer, pair_of("why?", "yes", "no"))
    assert result.notes == {"double_bos"}
    assert result.tokens.prompt[:2].tolist() == [tokenizer.bos_token_id] * 2


def test_raw_text_gets_bos_once_and_only_if_the_tokenizer_adds_it() -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = tiny_tokenizer(None)
    bos = tokenizer.bos_token_id
    raw = options(template="none")
    assert encode(tokenizer, pair_of("why?", "yes", "no"), raw).tokens.prompt[0] != bos
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    for prompt in ("why?", "<s>why?"):
        result = encode(tokenizer, pair_of(prompt, "yes", "no"), raw)
        assert texts(tokenizer, result.tokens) == ("<s>why?", "yes</s>", "no</s>")
        assert not result.notes


def test_raw_text_that_brings_its_own_end_gets_no_second_one() -> None:
    result = encode(tokenizer_of(None), pair_of("why?", "yes</s>", "no"), options(template="none"))
    assert texts(tokenizer_of(None), result.tokens) == ("why?", "yes</s>", "no</s>")


@pytest.mark.parametrize("own_end", ["<|im_end|>", "<|im_end|>\n", " <|im_end|>\n<|im_end|>"])
def test_an_answer_that_brings_the_end_of_its_turn_gets_no_second_one(own_end: str) -> None:
    result = encode(tokenizer_of("chatml"), pair_of("why?", "yes" + own_end, "no"))
    space = " " if own_end.startswith(" ") else ""
    assert texts(tokenizer_of("chatml"), result.tokens)[1:] == (f"yes{space}<|im_end|>", "no<|im_end|>")
    assert not result.notes


def test_the_end_of_a_turn_may_be_what_the_tokenizer_pads_with() -> None:
    tokenizer = tiny_tokenizer("chatml")
    tokenizer.pad_token = "<|im_end|>"
    assert tokenizer.eos_token != tokenizer.pad_token
    result = encode(tokenizer, pair_of("why?", "yes", "no"))
    assert texts(tokenizer, result.tokens)[1:] == ("yes<|im_end|>", "no<|im_end|>")
    assert not result.notes


def test_an_end_the_template_writes_in_plain_text_is_left_alone() -> None:
    tokenizer = tiny_tokenizer("endless")
    tokenizer.chat_template = TEMPLATES["endless"].replace("{{ m.content }}\n", "{{ m.content }}\n---\n")
    result = encode(tokenizer, pair_of("why?", "yes", "no"))
    assert texts(tokenizer, result.tokens)[1:] == ("yes\n---\n", "no\n---\n")
    assert result.notes == {"missing_eos"}


def test_an_unknown_character_at_the_end_is_not_taken_for_an_end() -> None:
    tokenizer = tokenizer_of("endless", kind="meta")
    result = encode(tokenizer, pair_of("why", "yes 😀", "no"))
    assert result.tokens.answers[0][-1] == tokenizer.eos_token_id
    assert result.notes == {"added_ends"}


def test_answers_that_a_template_makes_equal_are_a_tie() -> None:
    with pytest.raises(BadPairError, match="the same tokens") as caught:
        encode(tokenizer_of("llama3"), pair_of("why?", "yes", " yes "))
    assert caught.value.reason == "tie"


# --- max_length -----------------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(
    prompt=TEXT,
    chosen=TEXT,
    rejected=TEXT,
    max_length=st.integers(2, 40),
    truncation=st.sampled_from(["keep_start", "keep_end"]),
)
def test_truncation_keeps_what_is_documented(
    prompt: str, chosen: str, rejected: str, max_length: int, truncation: Truncation
) -> None:
    tokenizer = tokenizer_of("chatml")
    pair = pair_of(prompt, chosen, rejected)
    if ended(f"{chosen}<|im_end|>", bare=False) == ended(f"{rejected}<|im_end|>", bare=False):
        return
    whole = encode(tokenizer, pair)
    longer = max(len(whole.tokens.answers[0]), len(whole.tokens.answers[1]))
    fits = len(whole.tokens.prompt) + longer <= max_length
    (dropped,) = PairEncoder(tokenizer, options(max_length=max_length)).encode([pair])
    assert (dropped is None) == (not fits)
    (cut,) = PairEncoder(tokenizer, options(max_length=max_length, truncation=truncation)).encode([pair])
    # The oracle: answers whole, beside what opens and closes the prompt and at least one token between.
    opening, closing = (
        len(tokenizer(text)["input_ids"]) for text in ("<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n")
    )
    kept = len(whole.tokens.prompt) if fits else max_length - longer
    if kept <= opening + closing:
        assert cut is None
        return
    assert not isinstance(cut, BadPairError)
    assert cut is not None
    assert ("truncated" in cut.notes) == (not fits)
    assert cut.question_id == whole.question_id
    prompt_ids = whole.tokens.prompt.tolist()
    start = kept - closing if truncation == "keep_start" else opening
    assert cut.tokens.prompt.tolist() == prompt_ids[:start] + prompt_ids[len(prompt_ids) - (kept - start) :]
    for side, full in zip(cut.tokens.answers, whole.tokens.answers, strict=True):
        assert side.tolist() == full.tolist()


CLOSINGS = {
    "chatml": "<|im_end|>\n<|im_start|>assistant\n",
    "llama3": "<|eot|><|header|>assistant<|/header|>\n\n",
    "mistral": " [/INST]",
    "merging": "\nA:",  # the space behind it is joined with the answer
    "endless": "\n### assistant\n",
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_keep_start_keeps_what_closes_the_prompt(template: str) -> None:
    tokenizer, closing = tokenizer_of(template), CLOSINGS[template]
    prompt = [
        {"role": "user", "content": "who is the lazy dog"},
        {"role": "assistant", "content": "the brown fox"},
        {"role": "user", "content": "why " * 30 + "how"},
    ]
    whole, cut = (
        encode(tokenizer, pair_of(prompt, "yes", "no"), options(max_length=limit, truncation="keep_start"))
        for limit in (None, 50)
    )
    text, chosen, _ = texts(tokenizer, cut.tokens)
    assert text.endswith(f" why{closing}")
    assert texts(tokenizer, whole.tokens)[0].startswith(text.removesuffix(closing))
    assert len(cut.tokens.prompt) + max(len(side) for side in cut.tokens.answers) == 50
    assert chosen == texts(tokenizer, whole.tokens)[1]


def test_raw_text_has_nothing_that_closes_it() -> None:
    tokenizer = tokenizer_of(None)
    raw = options(template="none", max_length=10, truncation="keep_start")
    result = encode(tokenizer, pair_of("the" + " dog" * 30, "yes", "no"), raw)
    assert texts(tokenizer, result.tokens) == ("the" + " dog" * 7, "yes</s>", "no</s>")


def test_a_max_length_without_room_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.max_length: 1"):
        options(max_length=1)
