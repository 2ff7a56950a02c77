"""A template is chosen or refused with a way out; what it leaves out of a pair is never trained without, silently."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from isopref.data.chat import EncodedPair, PairEncoder, TokenizeOptions
from isopref.data.judged import BadPairError, PreferencePair
from isopref.errors import ConfigError, DataError
from isopref.testing.tokenizers import TEMPLATES, tiny_tokenizer

CHATML = TEMPLATES["chatml"]
GENERATION = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
OTHER_CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "adds two numbers"}}]

# In the manner of DeepSeek R1: reasoning is cut from every answer, but asked for by the generation prompt.
FORGETFUL = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|header|>{{ m.content.split('</think>')[-1] }}<|eot|>"
    "{% else %}{{ m.content }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|header|><think>\n{% endif %}"
)
# In the manner of Qwen 3: reasoning is set anew in the last answer, cut from earlier ones; calls and tools as JSON.
REASONING = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% set said = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{% if m.role == 'assistant' and loop.last %}<think>\n"
    "{% if m.reasoning_content %}{{ m.reasoning_content }}"
    "{% elif '</think>' in m.content %}{{ m.content.split('</think>')[0].split('<think>')[-1].strip('\n') }}{% endif %}"
    "{{ '\n</think>\n\n' }}{% endif %}{{ said if m.role == 'assistant' else m.content }}"
    "{% for call in m.tool_calls or [] %}{{ '\n' }}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}" + GENERATION
)
# In the manner of Llama 3.1: text is trimmed, a tool's words become JSON, an answer is its text or one call.
EITHER = (
    "{{ bos_token }}{% for m in messages %}<|header|>{{ m.role }}<|/header|>\n\n"
    "{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}{% elif m.role == 'tool' %}{{ m.content | tojson }}"
    "{% else %}{{ m.content | trim }}{% endif %}"
    "{% if m.role == 'user' and loop.first and tools %}{{ tools[0] | tojson }}{% endif %}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|header|>assistant<|/header|>\n\n{% endif %}"
)
# In the manner of Mistral and Gemma: the system turn is a part of the last user turn.
MOVING = (
    "{% set system = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% set turns = messages[1:] if system else messages %}"
    "{% set last = (turns | selectattr('role', 'equalto', 'user') | list)[-1] %}"
    "{% for m in turns %}{% if m.role == 'user' %}[INST] {{ system + '\n\n' if m == last and system else '' }}"
    "{{ m.content | trim }} [/INST]{% else %} {{ m.content | trim }}{{ eos_token }}{% endif %}{% endfor %}"
)


def turn(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


ASK = [turn("user", "how much is 2 + 2?")]
ASK_WITH_SYSTEM = [turn("system", "be brief"), *ASK]


def encoder_of(template: str | dict[str, str] | None, choice: str | None = None) -> PairEncoder:
    tokenizer = tiny_tokenizer(None)
    tokenizer.chat_template = template
    return PairEncoder(tokenizer, TokenizeOptions(template=choice, max_length=None, truncation="drop", on_bad="error"))


def pair_of(prompt: Any, chosen: Any, rejected: Any, tools: list[dict[str, Any]] | None = None) -> PreferencePair:
    return PreferencePair(prompt, chosen, rejected, tools, 1.0, "file:7")


def encode(template: str, *parts: Any) -> EncodedPair | BadPairError:
    (result,) = encoder_of(template).encode([pair_of(*parts)])
    assert result is not None
    return result


def decoded(result: EncodedPair) -> list[str]:
    return [tiny_tokenizer(None).decode(part.tolist()) for part in result.tokens.parts]


def refusal(template: str, *parts: Any) -> str:
    """What a pair is refused with."""
    result = encode(template, *parts)
    assert isinstance(result, BadPairError), "trained on"
    assert result.reason == "left_out"
    return str(result)


def texts(template: str, *parts: Any) -> list[str]:
    """Prompt and answers as they are trained on."""
    result = encode(template, *parts)
    if isinstance(result, BadPairError):
        raise result
    return decoded(result)


# --- what is left out -----------------------------------------------------------------------------------


def test_a_refusal_says_where_what_why_and_the_way_out() -> None:
    assert refusal(CHATML, ASK, [turn("assistant", "", tool_calls=[CALL])], "4") == (
        "file:7: the chat template leaves out a tool call of 'chosen', dict {'type': 'function', 'function': {'name': "
        "'add', 'argumen..., so it would not be trained on (to use another template, set data.template: path.jinja). "
        "Remove it, or set data.on_bad: drop."
    )


@pytest.mark.parametrize("side", ["chosen", "rejected"])
def test_an_answer_that_is_a_tool_call(side: str) -> None:
    for calls in ([CALL], [CALL, OTHER_CALL]):
        called = [turn("assistant", "", tool_calls=calls)]
        answers = (called, "4") if side == "chosen" else ("4", called)
        assert f"leaves out a tool call of '{side}'" in refusal(CHATML, ASK, *answers)
        assert '"a": 2' in texts(REASONING, ASK, *answers)[1 if side == "chosen" else 2]
    assert f"leaves out a tool call of '{side}'" in refusal(EITHER, ASK, *answers)  # it writes the first alone


def test_an_answer_whose_words_give_way_to_its_call() -> None:
    called = [turn("assistant", "I shall add", tool_calls=[CALL])]
    assert "leaves out some of 'rejected', whose content is str 'I shall add'" in refusal(EITHER, ASK, "4", called)
    assert "I shall add\n<tool_call>" in texts(REASONING, ASK, "4", called)[2]


def test_tools_and_calls_of_the_prompt() -> None:
    prompt = [*ASK, turn("assistant", "", tool_calls=[CALL]), turn("tool", 'it is "4",\nI think')]
    assert "leaves out 'tools'" in refusal(CHATML, ASK, "4", "5", TOOLS)
    assert "leaves out a tool call of the prompt" in refusal(CHATML, prompt, "4", "5")
    for template in (REASONING, EITHER):
        assert "adds two numbers" in texts(template, prompt, "4", "5", TOOLS)[0]


@pytest.mark.parametrize("thought", ["<think>long careful reasoning</think>4", "so\n</think>4", "<think>\n</think>4"])
def test_reasoning_that_the_template_cuts_from_the_answer(thought: str) -> None:
    assert "leaves out some of 'chosen', whose content is" in refusal(FORGETFUL, ASK, thought, "5")
    assert "leaves out some of 'rejected'" in refusal(FORGETFUL, ASK, "5", thought)
    assert "leaves out some of" in refusal(FORGETFUL, ASK, thought, thought.replace("</think>", ", hm</think>"))
    inside = thought.removeprefix("<think>").removesuffix("</think>4").strip()
    assert texts(REASONING, ASK, thought, "5")[1] == f"<think>\n{inside}\n</think>\n\n4<|im_end|>"


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_a_template_may_read_reasoning_by_any_of_its_names(name: str) -> None:
    template = CHATML.replace(
        "{{ m.content }}", "{% if m." + name + " %}<why>{{ m." + name + " }}</why>{% endif %}{{ m.content }}"
    )
    assert name in template
    answer = [turn("assistant", "4", reasoning_content="two and two")]
    assert texts(template, ASK, answer, "5")[1:] == ["<why>two and two</why>4<|im_end|>", "5<|im_end|>"]


DROPS_TEXT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if '</think>' in m.content %}{{ m.content.split('</think>')[0] | replace('<think>', '<think>\n') }}\n</think>"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("said", ["4", "end"])  # as in the reasoning; as in the end token
def test_text_after_reasoning_is_not_found_elsewhere(said: str) -> None:
    answer = f"<think>2+2=4, so</think>{said}"
    assert f"leaves out some of 'chosen', whose content is str '{answer}'" in refusal(DROPS_TEXT, ASK, answer, "5")


def test_reasoning_beside_the_answer() -> None:
    answer = [turn("assistant", "4", reasoning_content="two and two")]
    assert "leaves out some of 'chosen', whose reasoning_content is str 'two and two'" in refusal(
        CHATML, ASK, answer, "5"
    )
    assert texts(REASONING, ASK, answer, "5")[1] == "<think>\ntwo and two\n</think>\n\n4<|im_end|>"


def test_an_answer_that_stands_in_the_prompt_only() -> None:
    mute = "{% for m in messages if m.role == 'user' %}{{ m.content }}<|eot|>{% endfor %}"
    assert "leaves out some of 'chosen'" in refusal(mute, ASK, "2", "5")
    assert "leaves out some of 'chosen'" in refusal(mute + "{% if add_generation_prompt %}A:{% endif %}", ASK, "2", "5")


def test_a_turn_of_the_prompt() -> None:
    no_system = CHATML.replace("for m in messages", "for m in messages if m.role != 'system'")
    message = refusal(no_system, ASK_WITH_SYSTEM, "4", "5")
    assert "leaves out the system turn of the prompt, str 'be brief'" in message
    # Words that stand elsewhere are not the turn's own.
    assert "leaves out the system turn" in refusal(no_system, [turn("system", "how"), *ASK], "4", "5")
    last_only = CHATML.replace("for m in messages", "for m in messages[-1:]")
    assert "the user turn of the prompt, str 'hello'" in refusal(
        last_only, [turn("user", "hello"), turn("assistant", "hello"), *ASK], "4", "5"
    )
    assert "leaves out the user turn" in refusal(CHATML.replace("m.content", "m.content[4:]"), ASK, "long answer", "5")


# --- what is written in another way ---------------------------------------------------------------------


@pytest.mark.parametrize("template", [*TEMPLATES.values(), REASONING, EITHER, MOVING])
@pytest.mark.parametrize("space", ["", " \n", "\r\n\n"])
def test_templates_that_write_all_of_it(template: str, space: str) -> None:
    def said(text: str) -> str:
        return space + text.replace(" ", f" {space}") + space

    prompt = [turn("user", said("hello you")), turn("assistant", said("hello to you")), turn("user", said("yes or no"))]
    if "only user and assistant" not in template:
        prompt.insert(0, turn("system", said("hello")))
    written, chosen, rejected = ("".join(text.split()) for text in texts(template, prompt, said("a b"), said("no")))
    assert written.count("hello") == len(prompt) - 1
    assert ("ab" in chosen, "no" in rejected) == (True, True)


def test_earlier_reasoning_may_be_cut_and_a_switch_obeyed() -> None:
    earlier = [*ASK, turn("assistant", "<think>two and two</think>4"), turn("user", "why")]
    prompt = texts(REASONING, earlier, "so", "no")[0]
    assert "two and two" not in prompt
    assert "4<|im_end|>" in prompt
    switch = CHATML.replace("{{ m.content }}", "{{ m.content | replace('/no_think', '') }}")
    system = [turn("system", "be brief /no_think"), *ASK]
    assert texts(switch, system, "4", "5")[0].startswith("<|im_start|>system\nbe brief <|im_end|>")
    assert "leaves out the user turn" in refusal(switch, [turn("user", "how /no_think")], "4", "5")


def test_an_answer_may_begin_with_the_end_of_the_generation_prompt() -> None:
    opened = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    prompt, chosen, _ = texts(opened, ASK, "<think>\nso</think>4", "<think>\nno</think>5")
    assert prompt.endswith("assistant\n<think>\n")
    assert chosen == "so</think>4<|im_end|>"


def test_a_generation_prompt_that_answers_do_not_begin_with_is_noted_as_that() -> None:
    result = encode(FORGETFUL, ASK, "4", "5")
    assert isinstance(result, EncodedPair)
    assert result.notes == {"generation_prompt_backoffs"}
    assert texts(FORGETFUL, ASK, "4", "5") == ["how much is 2 + 2?\n<|header|>", "4<|eot|>", "5<|eot|>"]


# --- the choice of template -----------------------------------------------------------------------------


def test_a_tokenizer_without_a_template_names_both_ways_out() -> None:
    with pytest.raises(ConfigError, match=r"no chat template.*data\.template.*none.*\.jinja"):
        encoder_of(None)


def test_a_template_file_is_used_and_a_missing_one_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "my.jinja"
    path.write_text(TEMPLATES["mistral"])
    (result,) = encoder_of(CHATML, str(path)).encode([pair_of("why?", "yes", "no")])
    assert isinstance(result, EncodedPair)
    assert decoded(result) == ["<s>[INST] why? [/INST]", " yes</s>", " no</s>"]
    with pytest.raises(ConfigError, match=r"data\.template: '.*other\.jinja' cannot be read"):
        encoder_of(CHATML, str(tmp_path / "other.jinja"))


@pytest.mark.parametrize(
    ("broken", "where"),
    [
        ("{{ bad", r"line 1: unexpected end of template"),
        ("{% for m in messages %}\n{{ m.content }}\n", r"line 2: Unexpected end of template\."),
        ("\n{{ messages | no_such_filter }}", r"line 2: No filter named 'no_such_filter'\."),
    ],
)
def test_a_broken_template_is_an_error_of_the_config(tmp_path: Path, broken: str, where: str) -> None:
    path = tmp_path / "bad.jinja"
    path.write_text(broken)
    with pytest.raises(ConfigError, match=rf"^data\.template: '{path}', {where}.* Fix the file\.$"):
        encoder_of(CHATML, str(path))
    own = r"^data\.template: the chat template of the tokenizer '.*', "
    for template in (broken, {"default": CHATML, "tool_use": broken}):
        with pytest.raises(ConfigError, match=rf"{own}{where}.* path of a \.jinja file\.$"):
            encoder_of(template)
    encoder_of(broken, "none")


def test_messages_without_a_template_are_an_error_of_the_config() -> None:
    with pytest.raises(DataError, match="file:7: messages need a chat template") as caught:
        encoder_of(None, "none").encode([pair_of(ASK, "yes", "no")])
    assert not isinstance(caught.value, BadPairError)


def test_a_template_that_writes_the_date_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        encoder_of(CHATML + "{{ '' if true else strftime_now('%d') }}")
    assert "date" in caplog.text
