"""Chat templates in the manner of current families with tools and reasoning, and their assistant turns (family.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from support.chat_templates import ASK_CHATML, CHATML_CALLS, CHATML_RESULT, CHATML_TOOLS, IM, chatml_said, is_answer
from support.family import (
    THINK,
    Family,
    Message,
    Place,
    after_the_last_question,
    as_text,
    bare,
    calls_of,
    dumped,
    never,
)

NO_THINKING: tuple[dict[str, Any], ...] = ({}, {"enable_thinking": False})
OFF = "enable_thinking is defined and not enable_thinking"
# The number of the last question, and the reasoning and text of a message.
LAST = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
)
PARSED = (
    "{% set why = m.reasoning_content or (m.content.split('</think>')[0].split('<think>')[-1].strip('\n') "
    "if '</think>' in m.content else '') %}{% set said = m.content.split('</think>')[-1].lstrip('\n') %}"
)
XML_CALLS = (
    "{% for c in m.tool_calls or [] %}{{ '\n' if said or not loop.first }}<tool_call>\n"
    "<function={{ c.function.name }}>\n{% for k, v in c.function.arguments.items() %}<parameter={{ k }}>\n"
    "{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}"
)


def thought(before: str, after: str, *, none: str = "", cut: str = "") -> Any:
    """Writes reasoning between two texts; `none` where there is none, `cut` where it is not written."""

    def write(message: Message, place: Place) -> str:
        why = message.get("reasoning_content")
        return cut if not place.kept else f"{before}{why}{after}" if why else none

    return write


def asks(on: str, off: str) -> Any:
    return lambda kwargs: on if kwargs.get("enable_thinking", True) else off


def xml_said(message: Message) -> str:
    text = str(message["content"])
    for call in calls_of(message):
        text += ("\n" if text else "") + f"<tool_call>\n<function={call['name']}>\n"
        text += "".join(f"<parameter={k}>\n{as_text(v)}\n</parameter>\n" for k, v in call["arguments"].items())
        text += "</function>\n</tool_call>"
    return f"{text}<|im_end|>"


def chatml(turn: str, opening: str) -> str:
    """A template with ChatML's marks: how it writes an assistant turn, and what it opens for one."""
    return (
        CHATML_TOOLS + LAST + "{% for m in messages %}{% if m.role == 'tool' %}" + CHATML_RESULT
        + "{% elif m.role == 'user' %}<|im_start|>user\n{{ m.content }}<|im_end|>\n"
        + "{% elif m.role == 'assistant' %}" + PARSED + "<|im_start|>assistant\n" + turn + "{% endif %}{% endfor %}"
        + "{% if add_generation_prompt %}<|im_start|>assistant\n" + opening + "{% endif %}"
    )  # fmt: skip


# Every turn after the last question has a block of reasoning, which the generation prompt opens.
QWEN35 = chatml(
    "{% if loop.index0 > ns.last %}<think>\n{{ why }}\n</think>\n\n{% endif %}{{ said }}" + XML_CALLS + "<|im_end|>\n",
    "{% if " + OFF + " %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}",
)
# Every turn has a block, and it is empty in those before the last question.
NEMOTRON = chatml(
    "{% if why and loop.index0 > ns.last %}<think>\n{{ why }}\n</think>\n{% else %}<think></think>{% endif %}{{ said }}"
    + XML_CALLS
    + "<|im_end|>\n",
    "{% if " + OFF + " %}<think></think>{% else %}<think>\n{% endif %}",
)
# Text is in a frame of its own.
ERNIE = chatml(
    "{% if why and loop.index0 > ns.last %}<think>\n{{ why }}\n</think>\n\n{% endif %}"
    "{% if said %}<response>\n{{ said }}\n</response>\n{% endif %}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>\n{% endfor %}'
    "<|im_end|>\n",
    "<think>\n",
)


def ernie_said(message: Message) -> str:
    text = f"<response>\n{message['content']}\n</response>\n" if message["content"] else ""
    return text + "".join(f"<tool_call>\n{bare(one)}\n</tool_call>\n" for one in calls_of(message)) + "<|im_end|>"


# With the tags that transformers reads for masks of assistants' tokens: around headers, and without a block of tools.
SMOLLM3 = (
    "<|im_start|>system\nReasoning: {{ 'off' if " + OFF + " else 'on' }}\n"
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
    "{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools>{% endif %}<|im_end|>\n"
    "{% for m in messages %}{% if m.role == 'user' %}<|im_start|>user\n{{ m.content }}<|im_end|>\n"
    "{% elif m.role == 'tool' %}<|im_start|>user\n{{ m.content }}<|im_end|>\n"
    "{% elif m.role == 'assistant' %}{% set said = m.content.lstrip('\n') %}{% generation %}<|im_start|>assistant\n"
    "{% if " + OFF + " %}<think>\n\n</think>\n{% endif %}{{ said }}" + CHATML_CALLS + "<|im_end|>\n{% endgeneration %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if " + OFF + " %}<think>\n\n</think>\n{% endif %}{% endif %}"
)
# The last turn alone ends with EOS, so how another one ends is not known from it.
OLMO3 = (
    "{% for m in messages %}{% if m.role == 'system' %}<|im_start|>system\n{{ m.content }}"
    "{% if tools %}<functions>{{ tools | tojson }}</functions>{% endif %}<|im_end|>\n"
    "{% elif m.role == 'tool' %}<|im_start|>environment\n{{ m.content }}<|im_end|>\n"
    "{% else %}{% if loop.first and tools %}<|im_start|>system\n<functions>{{ tools | tojson }}</functions><|im_end|>\n"
    "{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}{% if m.tool_calls %}<function_calls>"
    "{% for c in m.tool_calls %}{{ c.function.name }}("
    "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v | tojson }}"
    "{{ ', ' if not loop.last else '' }}{% endfor %})"
    "{{ '\n' if not loop.last else '' }}{% endfor %}</function_calls>{% endif %}"
    "{{ '<|im_end|>\n' if not (loop.last and m.role == 'assistant') else eos_token }}{% endif %}{% endfor %}"
    + ASK_CHATML.replace("assistant\n", "assistant\n<think>")
)


def olmo3_said(message: Message) -> str:
    calls = [
        f"{one['name']}({', '.join(f'{k}={dumped(v)}' for k, v in one['arguments'].items())})"
        for one in calls_of(message)
    ]
    text = str(message["content"])
    return text + ("<function_calls>" + "\n".join(calls) + "</function_calls>" if calls else "") + "<|endoftext|>"


# Nothing ends a turn but the opening of the next one, and every turn has a block of reasoning.
GLM45 = (
    "[gMASK]<sop>{% if tools %}<|system|>\n{{ tools | tojson }}{% endif %}" + LAST + "{% for m in messages %}"
    "{% if m.role == 'user' %}<|user|>\n{{ m.content }}{{ '/nothink' if " + OFF + " }}"
    "{% elif m.role == 'assistant' %}" + PARSED + "<|assistant|>"
    "{{ '\n' }}<think>{{ why if loop.index0 > ns.last }}</think>"
    "{% if said.strip() %}{{ '\n' + said.strip() }}{% endif %}"
    "{% for c in m.tool_calls or [] %}{{ '\n' }}<tool_call>{{ c.function.name }}\n"
    "{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key>\n"
    "<arg_value>{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}</tool_call>{% endfor %}"
    "{% elif m.role == 'tool' %}"
    "{% if messages[loop.index0 - 1].role != 'tool' %}<|observation|>{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% else %}<|system|>\n{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{{ '\n<think></think>' if " + OFF + " }}{% endif %}"
)


def glm45_said(message: Message) -> str:
    text = "\n" + message["content"] if message["content"] else ""
    for call in calls_of(message):
        text += f"\n<tool_call>{call['name']}\n"
        for key, value in call["arguments"].items():
            text += f"<arg_key>{key}</arg_key>\n<arg_value>{as_text(value)}</arg_value>\n"
        text += "</tool_call>"
    return text + ("<|observation|>" if calls_of(message) else "<|user|>")


# Calls are written by their ids, which name the function, and reasoning only after the last answer.
KIMI = (
    "{% if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}"
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'assistant' and not m.tool_calls %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}"
    "{% if m.role == 'assistant' %}<|im_assistant|>assistant<|im_middle|>"
    "<think>{{ m.reasoning_content if m.reasoning_content and loop.index0 > ns.last }}</think>{{ m.content }}"
    "{% if m.tool_calls %}<|tool_calls_section_begin|>{% for c in m.tool_calls %}<|tool_call_begin|>{{ c.id }}"
    "<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}<|tool_call_end|>{% endfor %}"
    "<|tool_calls_section_end|>{% endif %}"
    "{% elif m.role == 'tool' %}<|im_system|>tool<|im_middle|>## Return of {{ m.tool_call_id }}\n{{ m.content }}"
    "{% else %}<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>{{ m.content }}{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)


def kimi_said(message: Message) -> str:
    calls = [
        f"<|tool_call_begin|>{one['id']}<|tool_call_argument_begin|>{dumped(one['function']['arguments'])}"
        "<|tool_call_end|>"
        for one in message.get("tool_calls", [])
    ]
    section = f"<|tool_calls_section_begin|>{''.join(calls)}<|tool_calls_section_end|>" if calls else ""
    return f"{message['content']}{section}<|im_end|>"


def kimi_keeps(messages: Sequence[Message], index: int) -> bool:
    return not any(map(is_answer, messages[index:]))


MINIMAX = (
    "]~!b[]~b]system\n{{ messages[0].content if messages[0].role == 'system' else 'Help.' }}"
    "{% if tools %}{{ '\n' }}<tools>{{ tools | tojson }}</tools>{% endif %}[e~[\n" + LAST + "{% for m in messages %}"
    "{% if m.role == 'assistant' %}" + PARSED + "]~b]ai\n"
    "{% if why and loop.index0 > ns.last %}<think>\n{{ why }}\n</think>\n\n{% endif %}{{ said }}"
    "{% if m.tool_calls %}{{ '\n' }}<minimax:tool_call>\n"
    "{% for c in m.tool_calls %}<invoke name=\"{{ c.function.name }}\">\n"
    "{% for k, v in c.function.arguments.items() %}<parameter name=\"{{ k }}\">"
    "{{ v if v is string else v | tojson }}</parameter>\n{% endfor %}</invoke>\n{% endfor %}"
    "</minimax:tool_call>{% endif %}"
    "[e~[\n{% elif m.role == 'tool' %}{% if messages[loop.index0 - 1].role != 'tool' %}]~b]tool{% endif %}"
    "\n<response>{{ m.content }}</response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}[e~[\n{% endif %}"
    "{% elif m.role == 'user' %}]~b]user\n{{ m.content }}[e~[\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}]~b]ai\n<think>\n{% endif %}"
)  # fmt: skip


def minimax_said(message: Message) -> str:
    text, calls = str(message["content"]), calls_of(message)
    for call in calls:
        text += "\n<minimax:tool_call>\n" if call is calls[0] else ""
        text += f'<invoke name="{call["name"]}">\n'
        text += "".join(f'<parameter name="{k}">{as_text(v)}</parameter>\n' for k, v in call["arguments"].items())
        text += "</invoke>\n"
    return text + ("</minimax:tool_call>" if calls else "") + "[e~["


# Reasoning is written in every turn.
SEED = (
    "{% if messages[0].role == 'system' or tools %}<seed:bos>system\n"
    "{{ messages[0].content if messages[0].role == 'system' }}{{ tools | tojson if tools }}<seed:eos>{% endif %}"
    "{% for m in messages if m.role != 'system' %}<seed:bos>{{ m.role }}"
    "{% if m.role == 'assistant' %}"
    "{% if m.reasoning_content %}{{ '\n' }}<seed:think>{{ m.reasoning_content }}</seed:think>{% endif %}"
    "{% if m.content %}{{ '\n' + m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}{{ '\n' }}<seed:tool_call>\n<function={{ c.function.name }}>\n"
    "{% for k, v in c.function.arguments.items() %}<parameter={{ k }}>{{ v if v is string else v | tojson }}"
    "</parameter>\n{% endfor %}</function>\n</seed:tool_call>{% endfor %}"
    "{% else %}{{ '\n' + m.content }}{% endif %}<seed:eos>{% endfor %}"
    "{% if add_generation_prompt %}<seed:bos>assistant\n{% endif %}"
)


def seed_said(message: Message) -> str:
    text = "\n" + message["content"] if message["content"] else ""
    for call in calls_of(message):
        text += f"\n<seed:tool_call>\n<function={call['name']}>\n"
        text += "".join(f"<parameter={k}>{as_text(v)}</parameter>\n" for k, v in call["arguments"].items())
        text += "</function>\n</seed:tool_call>"
    return text + "<seed:eos>"


# What a turn is, thought, call or answer, is told by tokens; reasoning is written in every turn.
COMMAND_A = (
    "<bos>{% set role = '<|turn|><|%s|>' %}{% for m in messages %}"
    "{% if loop.first and tools %}{{ role % 'system' }}{{ tools | tojson }}<|end_turn|>{% endif %}"
    "{% if m.role == 'assistant' %}{{ role % 'chatbot' }}"
    "{% if m.reasoning_content %}<|start_thinking|>{{ m.reasoning_content }}<|end_thinking|>{% endif %}"
    "{% if m.tool_calls %}<|start_action|>[{% for c in m.tool_calls %}"
    '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}'
    "{{ ', ' if not loop.last }}{% endfor %}]<|end_action|>"
    "{% else %}<|start_response|>{{ m.content }}<|end_response|>{% endif %}"
    "{% elif m.role == 'tool' %}{{ role % 'system' }}<|start_result|>{{ m.content | tojson }}<|end_result|>"
    "{% else %}{{ role % m.role }}{{ m.content }}{% endif %}<|end_turn|>{% endfor %}"
    "{% if add_generation_prompt %}{{ role % 'chatbot' }}"
    "{{ '<|start_thinking|><|end_thinking|>' if " + OFF + " }}{% endif %}"
)


def command_said(message: Message) -> str:
    if calls := calls_of(message):
        return f"<|start_action|>[{', '.join(bare(one, 'parameters') for one in calls)}]<|end_action|><|end_turn|>"
    return f"<|start_response|>{message['content']}<|end_response|><|end_turn|>"


THINKING = {
    "qwen3.5": Family(
        QWEN35,
        (*IM, *THINK, "<tool_call>", "</tool_call>"),
        "<|im_end|>",
        xml_said,
        thought("<think>\n", "\n</think>\n\n", none="<think>\n\n</think>\n\n"),
        asks("<think>\n", "<think>\n\n</think>\n\n"),
        kwargs=NO_THINKING,
        thinks=True,
        inline="parsed",
        keeps=after_the_last_question,
        has_block=True,
    ),
    "nemotron3": Family(
        NEMOTRON,
        (*IM, *THINK),
        "<|im_end|>",
        xml_said,
        thought("<think>\n", "\n</think>\n", none="<think></think>", cut="<think></think>"),
        asks("<think>\n", "<think></think>"),
        kwargs=NO_THINKING,
        thinks=True,
        inline="parsed",
        keeps=after_the_last_question,
    ),
    "ernie4.5": Family(
        ERNIE,
        (*IM, *THINK, "<response>", "</response>"),
        "<|im_end|>",
        ernie_said,
        thought("<think>\n", "\n</think>\n\n"),
        lambda kwargs: "<think>\n",
        thinks=True,
        inline="parsed",
        keeps=after_the_last_question,
    ),
    "smollm3": Family(
        SMOLLM3,
        (*IM, *THINK),
        "<|im_end|>",
        chatml_said,
        lambda message, place: asks("", "<think>\n\n</think>\n")(place.kwargs),
        asks("", "<think>\n\n</think>\n"),
        kwargs=NO_THINKING,
        inline="raw",
    ),
    "olmo3": Family(
        OLMO3,
        (*IM, *THINK, "<|endoftext|>"),
        "<|endoftext|>",
        olmo3_said,
        asks=lambda kwargs: "<think>",
        inline="raw",
        proves=never,
    ),
    "glm4.5": Family(
        GLM45,
        ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|eos|>", *THINK),
        "<|eos|>",
        glm45_said,
        thought("\n<think>", "</think>", none="\n<think></think>", cut="\n<think></think>"),
        asks("", "\n<think></think>"),
        stops=("<|user|>", "<|observation|>"),
        kwargs=NO_THINKING,
        thinks=True,
        inline="parsed",
        keeps=after_the_last_question,
    ),
    "kimi-k2": Family(
        KIMI,
        (*THINK, "<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>"),
        "<|im_end|>",
        kimi_said,
        thought("<think>", "</think>", none="<think></think>", cut="<think></think>"),
        thinks=True,
        keeps=kimi_keeps,
    ),
    "minimax-m2": Family(
        MINIMAX,
        (*THINK, "]~!b[", "]~b]", "[e~["),
        "[e~[",
        minimax_said,
        thought("<think>\n", "\n</think>\n\n"),
        lambda kwargs: "<think>\n",
        call=minimax_said,
        thinks=True,
        inline="parsed",
        keeps=after_the_last_question,
    ),
    "seed-oss": Family(
        SEED,
        ("<seed:bos>", "<seed:eos>", "<seed:think>", "</seed:think>", "<seed:tool_call>"),
        "<seed:eos>",
        seed_said,
        thought("\n<seed:think>", "</seed:think>"),
        lambda kwargs: "\n",
        thinks=True,
    ),
    "command-a": Family(
        COMMAND_A,
        (
            *("<|turn|>", "<|end_turn|>", "<|start_thinking|>", "<|end_thinking|>", "<|start_action|>"),
            *("<|end_action|>", "<|start_response|>", "<|end_response|>"),
        ),
        "<|end_turn|>",
        command_said,
        thought("<|start_thinking|>", "<|end_thinking|>"),
        asks("", "<|start_thinking|><|end_thinking|>"),
        kwargs=NO_THINKING,
        text_with_calls=False,
        thinks=True,
    ),
}
