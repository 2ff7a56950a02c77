"""Chat templates in the manner of current model families, and what each writes of an assistant turn (family.py).

Only the structure is theirs: marks of turns, where tools and reasoning go, what is cut from earlier turns. Families
with newer formats of reasoning and calls are in thinking_templates.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from support.family import THINK, Family, Message, Place, after_the_last_question, bare, calls_of, dumped, never


def chatml_said(message: Message) -> str:
    text = str(message["content"])
    for function in calls_of(message):
        text += ("\n" if text else "") + f"<tool_call>\n{bare(function)}\n</tool_call>"
    return f"{text}<|im_end|>"


ASK_CHATML = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CHATML_CALLS = (
    "{% for c in m.tool_calls or [] %}{{ '\n' if not (loop.first and not said) else '' }}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
)
CHATML_TOOLS = (
    "{% if tools %}<|im_start|>system\n"
    "{{ messages[0].content if messages[0].role == 'system' else 'Help.' }}\n# Tools\n"
    "{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n"
    "{% elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif %}"
)
# Results of tools that follow each other are one turn of the user.
CHATML_RESULT = (
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n' }}<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
)
QWEN25 = (
    CHATML_TOOLS
    + "{% for m in messages %}{% set said = m.content %}{% if m.role == 'tool' %}"
    + CHATML_RESULT
    + "{% elif "
    "m.role == 'assistant' %}<|im_start|>assistant\n{{ said }}" + CHATML_CALLS + "<|im_end|>\n"
    "{% elif m.role == 'user' %}<|im_start|>user\n{{ said }}<|im_end|>\n{% endif %}{% endfor %}" + ASK_CHATML
)
# Reasoning is written in turns after the last question, and in the last turn even where there is none.
QWEN3 = (
    CHATML_TOOLS + "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'tool' %}" + CHATML_RESULT + "{% elif m.role == 'assistant' %}"
    "{% set why = m.reasoning_content or (m.content.split('</think>')[0].split('<think>')[-1] "
    "if '</think>' in m.content else '') %}"
    "{% set said = m.content.split('</think>')[-1].lstrip('\n') %}<|im_start|>assistant\n"
    "{% if loop.index0 > ns.last and (loop.last or why) %}<think>\n{{ why.strip('\n') }}\n</think>\n\n"
    "{% endif %}{{ said }}"
    + CHATML_CALLS
    + "<|im_end|>\n{% elif m.role == 'user' %}<|im_start|>user\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


QWEN3_TAGGED = QWEN3.replace("<|im_start|>assistant\n{% if loop", "<|im_start|>assistant\n{% generation %}{% if loop")
QWEN3_TAGGED = QWEN3_TAGGED.replace(
    "{% endfor %}<|im_end|>\n{% elif m.role == 'user'",
    "{% endfor %}<|im_end|>{% endgeneration %}{{ '\n' }}{% elif m.role == 'user'",
)


def qwen3_thought(message: Message, place: Place) -> str:
    why = message.get("reasoning_content", "")
    return f"<think>\n{why}\n</think>\n\n" if place.kept and (place.last or why) else ""


def qwen3_asks(kwargs: dict[str, bool]) -> str:
    return "" if kwargs.get("enable_thinking", True) else "<think>\n\n</think>\n\n"


HEADER = "<|start_header_id|>{{ %s }}<|end_header_id|>\n\n"
LLAMA = (
    "{{ '<|begin_of_text|>' }}{% if messages[0].role == 'system' %}"
    + HEADER % "'system'"
    + "{{ messages[0].content | trim }}"
    "<|eot_id|>{% endif %}{% set ns = namespace(asked=false) %}{% for m in messages %}"
    "{% if m.role == 'user' %}" + HEADER % "'user'" + "{% if tools and not ns.asked %}Use these:\n{% for t in tools %}"
    "{{ t | tojson }}\n{% endfor %}{% endif %}{% set ns.asked = true %}{{ m.content | trim }}<|eot_id|>"
    "{% elif m.tool_calls %}{% if m.tool_calls | length > 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    + HEADER
    % "'assistant'"
    + '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
    "<|eot_id|>{% elif m.role == 'assistant' %}" + HEADER % "'assistant'" + "{{ m.content | trim }}<|eot_id|>"
    "{% elif m.role == 'tool' %}" + HEADER % "'ipython'" + "{{ m.content | tojson }}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}" + HEADER % "'assistant'" + "{% endif %}"
)


def llama_said(message: Message) -> str:
    calls = calls_of(message)
    return (bare(calls[0], "parameters") if calls else message["content"].strip()) + "<|eot_id|>"


# Tools stand before the last question, so that they move when another one is asked.
MISTRAL = (
    "{% set users = messages | selectattr('role', 'equalto', 'user') | list %}<s>"
    "{% if messages[0].role == 'system' %}[SYSTEM_PROMPT]{{ messages[0].content }}[/SYSTEM_PROMPT]{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools and m == users[-1] %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST]{{ m.content }}[/INST]"
    "{% elif m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "{{ ', ' if not loop.last else '' }}{% endfor %}]</s>"
    "{% elif m.role == 'assistant' %}{{ m.content }}</s>"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]{% endif %}{% endfor %}"
)


def mistral_said(message: Message) -> str:
    calls = calls_of(message)
    return ("[TOOL_CALLS][" + ", ".join(map(bare, calls)) + "]" if calls else message["content"]) + "</s>"


GEMMA = (
    "<bos>{% set ns = namespace(system='') %}{% if messages[0].role == 'system' %}"
    "{% set ns.system = messages[0].content + '\n\n' %}{% endif %}"
    "{% for m in messages if m.role != 'system' %}{% if m.role not in ('user', 'assistant') %}"
    "{{ raise_exception('no such role') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else 'user' }}\n{{ ns.system if loop.first else '' }}"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
PHI = (
    "{% for m in messages %}<|im_start|>{{ m.role }}<|im_sep|>{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant<|im_sep|>{% endif %}"
)
# Reasoning is cut from every answer; arguments are JSON text.
DEEPSEEK = (
    "<begin>{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}<User>{{ m.content }}"
    "{% elif m.role == 'assistant' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<Assistant>{% endif %}"
    "{{ m.content.split('</think>')[-1] }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}<sep>"
    "{{ c.function.arguments + '' }}<end_call>{% endfor %}"
    "<end>{% elif m.role == 'tool' %}<output>{{ m.content }}<end_output>{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}<Assistant>{% endif %}"
)


def deepseek_said(message: Message) -> str:
    calls = (f"<call>{one['name']}<sep>{dumped(one['arguments'])}<end_call>" for one in calls_of(message))
    return str(message["content"]) + "".join(calls) + "<end>"


TULU = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>\n{{ m.content }}{{ eos_token }}"
    "{{ '\n' if not loop.last else '' }}{% else %}<|{{ m.role }}|>\n{{ m.content }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
# Its tags enclose the text of an answer alone: neither calls nor the end token.
GRANITE = (
    "{% set role = '<|start_of_role|>%s<|end_of_role|>' %}"
    "{% if tools %}{{ role % 'tools' }}{{ tools | tojson }}<|end_of_text|>\n{% endif %}"
    "{% for m in messages %}{{ role % ('tool_response' if m.role == 'tool' else m.role) }}"
    "{% if m.role != 'assistant' %}{{ m.content }}{% else %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% endif %}"
    "{% if m.tool_calls %}<|tool_call|>{{ m.tool_calls | map(attribute='function') | list | tojson }}{% endif %}"
    "<|end_of_text|>\n{% endfor %}{% if add_generation_prompt %}{{ role % 'assistant' }}{% endif %}"
)


def granite_said(message: Message) -> str:
    calls = calls_of(message)
    return str(message["content"]) + (f"<|tool_call|>{dumped(calls)}" if calls else "") + "<|end_of_text|>"


# Nothing ends a turn but the opening of the next one.
GLM = (
    "[gMASK]<sop>{% if tools %}<|system|>\n{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "{% if m.tool_calls %}<|assistant|>{{ m.tool_calls[0].function.name }}\n"
    "{{ m.tool_calls[0].function.arguments | tojson }}"
    "{% elif m.role == 'tool' %}<|observation|>\n{{ m.content }}"
    "{% elif m.role == 'assistant' %}<|assistant|>\n{{ m.content }}"
    "{% else %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def glm_said(message: Message) -> str:
    calls = calls_of(message)
    if calls:
        return f"{calls[0]['name']}\n{dumped(calls[0]['arguments'])}<|observation|>"
    return f"\n{message['content']}<|user|>"


# An answer ends with <|return|>, and with <|end|> once others follow; its analysis is cut then.
HARMONY = (
    "{% if messages[0].role == 'system' %}<|start|>developer<|message|>{{ messages[0].content }}"
    "{% if tools %}{{ tools | tojson }}{% endif %}<|end|>"
    "{% elif tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% set ns = namespace(last=-1, name='') %}{% for m in messages %}"
    "{% if m.role == 'assistant' and not m.tool_calls %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}<|start|>user<|message|>{{ m.content }}<|end|>"
    "{% elif m.role == 'tool' %}<|start|>functions.{{ ns.name }} to=assistant<|message|>{{ m.content }}<|end|>"
    "{% elif m.tool_calls %}{% set c = m.tool_calls[0].function %}{% set ns.name = c.name %}"
    "{% if m.reasoning_content and loop.index0 > ns.last %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.reasoning_content }}<|end|>{% endif %}"
    "<|start|>assistant<|channel|>commentary to=functions.{{ c.name }}<|message|>{{ c.arguments | tojson }}<|call|>"
    "{% elif m.role == 'assistant' %}{% if m.reasoning_content and loop.last %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.reasoning_content }}<|end|>{% endif %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last else '<|end|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


def harmony_said(message: Message) -> str:
    if calls_of(message):
        return f"<|channel|>{harmony_call(message)}"
    return f"<|channel|>final<|message|>{message['content']}<|return|>"


def harmony_call(message: Message) -> str:
    (call,) = calls_of(message)
    return f"commentary to=functions.{call['name']}<|message|>{dumped(call['arguments'])}<|call|>"


def harmony_thought(message: Message, place: Place) -> str:
    why = message.get("reasoning_content") if place.kept else ""
    return f"<|channel|>analysis<|message|>{why}<|end|><|start|>assistant" if why else ""


def harmony_keeps(messages: Sequence[Message], index: int) -> bool:
    """The reasoning of calls until they are answered, and that of an answer that is the last turn."""
    later = [one for one in messages[index + 1 :] if is_answer(one)]
    return index == len(messages) - 1 or not (later or is_answer(messages[index]))


def is_answer(message: Message) -> bool:
    return message["role"] == "assistant" and not message.get("tool_calls")


IM = ("<|im_start|>", "<|im_end|>")


CLASSIC = {
    "qwen2.5": Family(QWEN25, IM, "<|im_end|>", chatml_said),
    "qwen3": Family(
        QWEN3,
        (*IM, *THINK),
        "<|im_end|>",
        chatml_said,
        qwen3_thought,
        qwen3_asks,
        kwargs=({}, {"enable_thinking": False}),
        thinks=True,
        inline="parsed",
        keeps=after_the_last_question,
    ),
    "llama3.1": Family(
        LLAMA,
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|eot_id|>",
        llama_said,
        many_calls=False,
        text_with_calls=False,
    ),
    "mistral": Family(
        MISTRAL,
        ("[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[AVAILABLE_TOOLS]"),
        "</s>",
        mistral_said,
        text_with_calls=False,
        moves_tools=True,
    ),
    "gemma3": Family(
        GEMMA,
        ("<bos>", "<start_of_turn>", "<end_of_turn>"),
        "<end_of_turn>",
        lambda message: message["content"].strip() + "<end_of_turn>",
        tools=False,
    ),
    "phi4": Family(PHI, (*IM, "<|im_sep|>"), "<|im_end|>", chatml_said, tools=False),
    "deepseek": Family(
        DEEPSEEK,
        ("<begin>", "<User>", "<Assistant>", "<end>", "<call>", "<sep>", "<end_call>"),
        "<end>",
        deepseek_said,
        thinks=True,
        keeps=never,
    ),
    "tulu": Family(
        TULU, ("<|assistant|>", "<|user|>"), "</s>", lambda message: f"{message['content']}</s>", tools=False
    ),
    "granite": Family(
        GRANITE,
        ("<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>"),
        "<|end_of_text|>",
        granite_said,
        inline="raw",
    ),
    "glm4": Family(
        GLM,
        ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|eos|>"),
        "<|eos|>",
        glm_said,
        stops=("<|user|>", "<|observation|>"),
        many_calls=False,
        text_with_calls=False,
    ),
    "harmony": Family(
        HARMONY,
        ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"),
        "<|return|>",
        harmony_said,
        harmony_thought,
        call=harmony_call,
        thinks=True,
        many_calls=False,
        text_with_calls=False,
        keeps=harmony_keeps,
        proves=lambda messages, index: not is_answer(messages[index]),
    ),
}
CLASSIC["qwen3, tagged"] = replace(CLASSIC["qwen3"], template=QWEN3_TAGGED)
