"""Templates that rewrite or drop earlier turns: trained where that is proven, and refused with a way out otherwise."""

from __future__ import annotations

from dataclasses import replace

from isopref.data.chat import EncodedPair, PairEncoder, TokenizeOptions
from isopref.data.judged import BadPairError
from isopref.testing.tokenizers import tiny_tokenizer
from support.dialogues import ADD, AGAIN, BAD, CALL, GOOD, NEXT, RESULT, TOOLS, Q, encode, read, shown, turn
from support.families import FAMILIES


def test_reasoning_that_a_later_question_cuts_is_refused_with_a_way_out() -> None:
    thought = turn("assistant", "so", reasoning_content="hm")
    pair = read(prompt=[Q], chosen=[thought, AGAIN, NEXT], rejected=[BAD])
    result = encode(pair, "qwen3")
    assert isinstance(result, BadPairError)
    assert result.reason == "left_out"
    assert "leaves out some of turn 2 of 'chosen', whose reasoning_content is" in str(result)
    assert "data.train_on: last" in str(result)
    assert isinstance(encode(pair, "qwen3", "last"), EncodedPair)


def test_reasoning_that_is_cut_is_refused_also_if_its_words_are_elsewhere() -> None:
    thought = turn("assistant", "it is 42.", reasoning_content="42")
    result = encode(read(prompt=[Q], chosen=[thought, AGAIN, NEXT], rejected=[BAD]), "qwen3")
    assert isinstance(result, BadPairError)
    assert "whose reasoning_content is str '42', so it" in str(result)


def test_the_last_turn_is_read_after_what_the_model_was_given() -> None:
    """gpt-oss cuts the reasoning of calls once they are answered, but the model answers with it in view."""
    called, done = ADD | {"reasoning_content": "I add"}, GOOD | {"reasoning_content": "it is 4"}
    pair = read(chosen=[Q, called, RESULT, done], rejected=[Q, BAD], tools=TOOLS)
    result = encode(pair, "harmony")
    assert isinstance(result, BadPairError)
    assert "some of turn 2 of 'chosen', whose reasoning_content is str 'I add'" in str(result)
    assert "Or set data.train_on: last to train only the last turn" in str(result)
    context = (
        "analysis<|message|>I add<|end|><|start|>assistant<|channel|>"
        'commentary to=functions.add<|message|>{"a": 2}<|call|>'
        "<|start|>functions.add to=assistant<|message|>it is 4<|end|><|start|>assistant"
    )
    own, final = "<|channel|>analysis<|message|>it is 4<|end|><|start|>assistant<|channel|>final<|message|>", "because"
    for train_on, expected in (("last", f"[{own}{final}<|return|>]"), ("final", f"{own}[{final}<|return|>]")):
        result = encode(pair, "harmony", train_on)
        assert isinstance(result, EncodedPair), result
        assert ("<|start|>assistant" + shown(result.tokens, 0, "harmony")).endswith(context + expected)
        assert not result.notes


def test_a_call_after_a_call_with_reasoning_in_gpt_oss() -> None:
    """With text in place of the last call, gpt-oss would cut the reasoning of the first one."""
    called = ADD | {"reasoning_content": "I add"}
    for reasoning, thought in (({"reasoning_content": "again"}, "analysis<|message|>again<|end|>"), ({}, "")):
        last = ADD | reasoning
        pair = read(prompt=[Q], chosen=[GOOD], rejected=[called, RESULT, last], tools=TOOLS)
        result = encode(pair, "harmony", "final")
        assert isinstance(result, EncodedPair), result
        written = shown(result.tokens, 1, "harmony")
        assert "I add" in written
        context, _, trained = written.partition("[")
        assert trained == 'commentary to=functions.add<|message|>{"a": 2}<|call|>]'
        assert thought in context


def test_the_last_turn_alone_is_not_offered_where_it_is_refused_too() -> None:
    pair = read(chosen=[Q, ADD, RESULT, GOOD], rejected=[Q, BAD])
    for train_on in ("assistant", "last"):
        result = encode(pair, "phi4", train_on)
        assert isinstance(result, BadPairError)
        assert "leaves out a tool call of 'chosen' (turn 2)" in str(result)
        assert "data.train_on" not in str(result)


def test_the_last_turn_alone_is_not_offered_where_its_weight_is_0() -> None:
    thought = turn("assistant", "so", reasoning_content="hm")
    pair = read(prompt=[Q], chosen=[thought, AGAIN, NEXT, AGAIN, NEXT | {"weight": 0}], rejected=[BAD])
    result = encode(pair, "qwen3")
    assert isinstance(result, BadPairError)
    assert result.reason == "left_out"
    assert "data.train_on" not in str(result)


def test_a_users_turn_that_the_template_drops_is_refused() -> None:
    tokenizer = tiny_tokenizer("chatml")
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{{ m.content }}", "{{ m.content if m.content != 'and then?' }}"
    )
    options = TokenizeOptions(template=None, max_length=None, truncation="drop", on_bad="error")
    pair = read(prompt=[Q], chosen=[GOOD, AGAIN, NEXT], rejected=[BAD])
    (result,) = PairEncoder(tokenizer, options).encode([pair])
    assert isinstance(result, BadPairError)
    assert "leaves out the user turn of 'chosen' (turn 3), str 'and then?', so" in str(result)


def test_arguments_for_the_template_are_of_the_record() -> None:
    fields = {"prompt": [Q], "chosen": [GOOD], "rejected": [BAD]}
    prompts = [
        encode(read(**fields, chat_template_kwargs=kwargs), "smollm3")
        for kwargs in (None, {"enable_thinking": False}, '{"enable_thinking": false}')
    ]
    tokenizer = FAMILIES["smollm3"].tokenizer()
    texts = [tokenizer.decode(one.tokens.prompt) for one in prompts if isinstance(one, EncodedPair)]
    assert ["Reasoning: off" in text for text in texts] == [False, True, True]


def test_an_earlier_turn_need_not_repeat_the_generation_prompt() -> None:
    """Without thinking, Qwen3 asks for an answer after an empty block, but writes that in the last turn only."""
    fields = {"prompt": [Q], "chosen": [GOOD, AGAIN, NEXT], "rejected": [BAD]}
    result = encode(read(**fields, chat_template_kwargs={"enable_thinking": False}), "qwen3")
    assert isinstance(result, EncodedPair)
    assert result.notes == {"generation_prompt_backoffs"}
    assert shown(result.tokens, 0, "qwen3") == (
        "[because<|im_end|>]\n<|im_start|>user\nand then?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n[done<|im_end|>]"
    )
    assert shown(result.tokens, 1, "qwen3") == "<think>\n\n</think>\n\n[no<|im_end|>]"


def test_generation_marks_of_the_template_give_the_same_as_marking() -> None:
    family = FAMILIES["smollm3"]
    marked, unmarked = family.tokenizer(), family.tokenizer()
    unmarked.chat_template = family.template.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    options = TokenizeOptions(template=None, max_length=None, truncation="drop", on_bad="error")
    pair = read(chosen=[Q, ADD, RESULT, GOOD, AGAIN, NEXT], rejected=[Q, BAD], tools=TOOLS)
    found = []
    for tokenizer in (marked, unmarked):
        (result,) = PairEncoder(tokenizer, options).encode([pair])
        assert isinstance(result, EncodedPair)
        found.append([one.tolist() for one in (*result.tokens.answers, *result.tokens.weights)])
    assert found[0] == found[1]


# --- other ways to write a turn ----------------------------------------------------------------------------------


def test_a_role_is_not_trained_where_a_line_break_before_it_needs_another_turn() -> None:
    """Two turns of the assistant in a row: after the first one, Tulu's template writes a line break only then."""
    result = encode(read(chosen=[Q, GOOD, NEXT], rejected=[Q, GOOD, BAD]), "tulu")
    assert isinstance(result, EncodedPair)
    assert [shown(result.tokens, number, "tulu") for number in (0, 1)] == ["[done</s>]", "[no</s>]"]
    assert not result.notes


def test_white_space_that_only_the_generation_prompt_has_is_counted() -> None:
    tokenizer = tiny_tokenizer("chatml")
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}{{ '' if m.role == 'assistant' else '\n' }}{{ m.content }}"
        "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n\n{% endif %}"
    )
    options = TokenizeOptions(template=None, max_length=None, truncation="drop", on_bad="error")
    (result,) = PairEncoder(tokenizer, options).encode([read(prompt=[Q], chosen=[GOOD], rejected=[BAD])])
    assert isinstance(result, EncodedPair)
    assert tokenizer.decode(result.tokens.prompt).endswith("<|im_end|><|im_start|>assistant")
    assert [tokenizer.decode(answer) for answer in result.tokens.answers] == ["because<|im_end|>", "no<|im_end|>"]
    assert result.notes == {"generation_prompt_backoffs"}


def test_a_turn_that_follows_one_with_another_end_is_refused() -> None:
    """Asked for a turn after its own, OLMo 3 reads EOS; once that is written, the end of a turn."""
    result = encode(read(chosen=[Q, GOOD, NEXT], rejected=[Q, GOOD, BAD]), "olmo3")
    assert isinstance(result, BadPairError)
    assert result.reason == "boundary"
    assert "writes what comes before 'chosen' differently" in str(result)
    assert "train_on" not in str(result)


def test_calls_that_are_written_by_their_ids() -> None:
    called = ADD | {"tool_calls": [CALL | {"id": "functions.add:0"}]}
    result = encode(read(chosen=[Q, called, RESULT, GOOD], rejected=[Q, BAD], tools=TOOLS), "kimi-k2")
    assert isinstance(result, EncodedPair)
    call = "functions.add:0<|tool_call_argument_begin|>" + '{"a": 2}<|tool_call_end|>'
    section = f"<|tool_calls_section_begin|><|tool_call_begin|>{call}<|tool_calls_section_end|>"
    assert shown(result.tokens, 0, "kimi-k2").startswith(f"[<think></think>{section}<|im_end|>]")


def test_a_frame_around_what_follows_the_reasoning() -> None:
    thought = turn("assistant", "<think>hm</think>so it is")
    pair = read(prompt=[Q], chosen=[thought], rejected=[BAD])
    for train_on, own in (("last", "[hm\n</think>\n\n<response>\nso"), ("final", "[so")):
        result = encode(pair, "ernie4.5", train_on)
        assert isinstance(result, EncodedPair), result
        assert shown(result.tokens, 0, "ernie4.5").endswith(f"{own} it is\n</response>\n<|im_end|>]")


def test_reasoning_after_the_text_is_not_trained_as_what_follows_it() -> None:
    tokenizer = tiny_tokenizer("chatml")
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{{ m.content }}", "{{ m.content }}{% if m.reasoning_content %}<why>{{ m.reasoning_content }}</why>{% endif %}"
    )
    pair = read(prompt=[Q], chosen=[GOOD | {"reasoning_content": "hm"}], rejected=[BAD])
    options = TokenizeOptions(template=None, max_length=None, truncation="drop", on_bad="error")
    (result,) = PairEncoder(tokenizer, replace(options, train_on="last")).encode([pair])
    assert isinstance(result, EncodedPair)
    (result,) = PairEncoder(tokenizer, replace(options, train_on="final")).encode([pair])
    assert isinstance(result, BadPairError)
    assert "does not show where the reasoning of 'chosen' ends" in str(result)


def test_reasoning_of_a_call_is_told_from_the_same_words_in_the_question() -> None:
    """Kimi writes reasoning before a call, but none before a text in its place."""
    called = ADD | {"tool_calls": [CALL | {"id": "functions.add:0"}], "reasoning_content": "why?"}
    result = encode(read(prompt=[Q], chosen=[called], rejected=[BAD], tools=TOOLS), "kimi-k2", "final")
    assert isinstance(result, EncodedPair)
    assert shown(result.tokens, 0, "kimi-k2").startswith("why?</think>[<|tool_calls_section_begin|>")
