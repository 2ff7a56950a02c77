"""How answers end where a template writes no end after the last turn, or one more: by what the model stops at, once."""

from __future__ import annotations

from typing import Any

import pytest

from isopref.data.chat import EncodedPair, PairEncoder, TokenizeOptions
from isopref.data.judged import PreferencePair
from isopref.testing.tokenizers import TEMPLATES, tiny_tokenizer

ROLES = ["<|user|>", "<|assistant|>", "<|observation|>"]
# As GLM writes: no turn has an end, the next one's opening is it; and an empty thought stands before an answer.
GLM = (
    "{% for m in messages %}{% if m.role == 'user' %}<|user|>\n{{ m.content }}"
    "{% elif m.role == 'tool' %}<|observation|>\n{{ m.content }}"
    "{% else %}<|assistant|>\n<think></think>{% if m.content.strip() %}{{ '\n' + m.content.strip() }}{% endif %}"
    "{% for call in m.tool_calls or [] %}{{ '\n<tool_call>' + call.function.name + '</tool_call>' }}{% endfor %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# As Phi-3 writes: a turn has an end, and a conversation that asks for no answer has one too.
CLOSING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<|header|>{{ call.function.name }}<|/header|>{% endfor %}"
    "{{ '' if m.tool_calls else '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}{{ eos_token }}{% endif %}"
)
CALL = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "add"}}]}


def tokenizer_of(template: str) -> Any:
    tokenizer = tiny_tokenizer(None)
    tokenizer.add_tokens(ROLES, special_tokens=True)
    tokenizer.chat_template = template
    return tokenizer


def encoder_of(template: str, *stops: str) -> PairEncoder:
    tokenizer = tokenizer_of(template)
    options = TokenizeOptions(
        template=None,
        max_length=None,
        truncation="drop",
        on_bad="error",
        stops=tuple(tokenizer.convert_tokens_to_ids(list(stops))),
    )
    return PairEncoder(tokenizer, options)


def answers(template: str, *stops: str, chosen: Any = "yes") -> tuple[list[str], set[str]]:
    """The answers as they are trained on, and what was noted."""
    (result,) = encoder_of(template, *stops).encode([PreferencePair("why?", chosen, "no", None, 1.0, "file:7")])
    assert isinstance(result, EncodedPair), result
    tokenizer = tokenizer_of(template)
    return [tokenizer.decode(side.tolist()) for side in result.tokens.answers], set(result.notes)


def test_the_opening_of_the_next_turn_ends_an_answer_where_the_model_stops_at_it() -> None:
    said = ["\n<think></think>\nyes<|user|>", "\n<think></think>\nno<|user|>"]
    assert answers(GLM, "</s>", "<|user|>", "<|observation|>") == (said, {"added_ends"})


def test_eos_ends_an_open_answer_where_the_model_stops_at_nothing_else() -> None:
    said = ["\n<think></think>\nyes</s>", "\n<think></think>\nno</s>"]
    assert answers(GLM) == (said, {"added_ends"})
    assert answers(GLM, "</s>", "<|assistant|>") == (said, {"added_ends"})


def test_a_call_ends_with_the_opening_of_its_result() -> None:
    said, notes = answers(GLM, "<|user|>", "<|observation|>", chosen=[CALL])
    assert said == ["\n<think></think>\n<tool_call>add</tool_call><|observation|>", "\n<think></think>\nno<|user|>"]
    assert notes == {"added_ends"}


@pytest.mark.parametrize("own_end", ["<|user|>", "<|user|>\n", "<|user|>\n<|user|>"])
def test_an_answer_that_brings_its_end_has_it_once(own_end: str) -> None:
    said, _ = answers(GLM, "<|user|>", chosen="yes" + own_end)
    assert said == ["\n<think></think>\nyes<|user|>", "\n<think></think>\nno<|user|>"]


def test_an_end_that_is_only_written_between_turns_is_taken() -> None:
    between = (
        "{% for m in messages %}{{ '' if loop.first else '<|im_end|>\n' }}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% endfor %}{% if add_generation_prompt %}<|im_end|>\n<|im_start|>assistant\n{% endif %}"
    )
    assert answers(between, "<|im_end|>")[0] == ["yes<|im_end|>", "no<|im_end|>"]
    assert answers(between)[0] == ["yes</s>", "no</s>"]


def test_an_end_in_plain_text_stays_before_what_the_model_stops_at() -> None:
    plain = GLM.replace("+ m.content.strip() }}", "+ m.content.strip() }} ---")
    assert answers(plain, "<|user|>") == (
        ["\n<think></think>\nyes ---<|user|>", "\n<think></think>\nno ---<|user|>"],
        {"added_ends"},
    )
    assert answers(plain) == (["\n<think></think>\nyes ---", "\n<think></think>\nno ---"], {"missing_eos"})


@pytest.mark.parametrize("template", [name for name in TEMPLATES if name != "endless"])
def test_nothing_is_added_to_what_the_template_ends(template: str) -> None:
    without = answers(TEMPLATES[template])
    assert answers(TEMPLATES[template], "</s>", "<s>", "<|im_start|>", "<|im_end|>", "<|header|>", "<|eot|>") == without
    assert "added_ends" not in without[1]


def test_a_template_that_takes_no_second_question_leaves_eos() -> None:
    once = "{% if messages | length > 2 %}{{ raise_exception('one question') }}{% endif %}" + GLM
    assert answers(once, "<|user|>")[0] == ["\n<think></think>\nyes</s>", "\n<think></think>\nno</s>"]


def test_a_table_is_another_one_only_if_its_answers_end_otherwise() -> None:
    assert encoder_of(GLM).key() != encoder_of(GLM, "<|user|>").key()
    assert encoder_of(GLM, "<|user|>", "</s>").key() == encoder_of(GLM, "<|user|>").key()
    assert encoder_of(TEMPLATES["chatml"], "<|user|>").key() == encoder_of(TEMPLATES["chatml"]).key()


def test_the_end_of_a_conversation_is_no_part_of_its_answer() -> None:
    assert answers(CLOSING) == (["yes<|im_end|>", "no<|im_end|>"], set())
    assert answers(CLOSING, chosen="yes<|im_end|>") == (["yes<|im_end|>", "no<|im_end|>"], set())
    plain = CLOSING.replace("{{ eos_token }}", "The end.")
    assert answers(plain) == (["yes<|im_end|>", "no<|im_end|>"], set())


def test_an_answer_that_only_the_end_of_the_conversation_ends_keeps_it() -> None:
    assert answers(CLOSING.replace("<|im_end|>\n", "\n")) == (["yes\n</s>", "no\n</s>"], set())
    assert answers(CLOSING, chosen=[CALL]) == (["<|header|>add<|/header|></s>", "no<|im_end|>"], set())
    instead = CLOSING.replace("'<|im_end|>\n'", "'' if loop.last and not add_generation_prompt else '<|im_end|>\n'")
    assert answers(instead) == (["yes</s>", "no</s>"], set())


def test_ends_that_follow_every_answer_stay() -> None:
    both = CLOSING.replace("<|im_end|>\n", "<|im_end|><|eot|>\n")
    assert answers(both)[0] == ["yes<|im_end|><|eot|>", "no<|im_end|><|eot|>"]


@pytest.mark.parametrize("end", ["<|im_end|>\n", ""])
def test_the_end_of_a_conversation_is_not_taken_for_a_part_of_the_prompt(end: str) -> None:
    spaced = CLOSING.replace("<|im_end|>\n", end).replace("}}\n{{", "}}: {{").replace("assistant\n", "assistant: ")
    said = [f" {text}{end.strip() or '</s>'}" for text in ("yes", "no")]
    assert answers(spaced) == (said, {"boundary_backoffs"})  # the space before an answer is one token with its word
