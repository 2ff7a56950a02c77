"""Chat templates: what they write of a conversation, and whether they leave a part of it out.

A template is foreign code and may ignore what it was not made for: a system turn, tools, tool calls, the reasoning
in an answer. Training would go on without it and nobody would know, so each part of a pair is looked for in what was
written. White space does not count (templates trim and set line feeds of their own). How strict:

- An answer is what is trained on, and a user turn is what was asked: all their text must be there.
- Other turns of the prompt may be rewritten, for that is how the model meets them later too: tool results as JSON, the
  reasoning of earlier answers cut away, a switch in the system turn obeyed. They may not be ignored: where the text is
  not there as it stands, a mark set behind it must show.
- Tools and tool calls are written in a form of the template's own, so only ignoring them can be seen: it is writing
  the same without them.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from isopref.data.messages import DefectError, Message, Turns, shown
from isopref.data.surprises import special_token_pattern
from isopref.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NO_TEMPLATE = "none"
MARK = "\ue000"  # from the private use area: nobody writes it
SPOKEN = ("content", "reasoning_content", "thinking")  # text of an answer, by the names that templates know

log = logging.getLogger(__name__)

Tools = list[dict[str, Any]] | None


class Written(NamedTuple):
    """The texts of a pair or a list: the prompt with its generation prompt, and the prompt with each answer."""

    prompt: str
    sides: tuple[str, ...]


class ChatTemplate:
    """Writes conversations with the template of a tokenizer, or another one. Raises ConfigError where there is none."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str | None) -> None:
        self._tokenizer = tokenizer
        self._text = _template_text(tokenizer, template)
        self._turn_end, self._conversation_end = ("", "") if template == NO_TEMPLATE else self._find_ends()

    @property
    def content(self) -> Any:
        """What decides the texts."""
        return self._text if self._text is not None else self._tokenizer.chat_template

    def render(self, messages: Sequence[Message], tools: Tools, *, add_generation_prompt: bool = False) -> str:
        """The text of a conversation. Raises DefectError where the template refuses it."""
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) if tools else None,
                chat_template=self._text,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
            )
        except Exception as error:  # a template is foreign code: it raises what it likes about a conversation
            raise DefectError("template", f"the chat template refuses it ({error})") from error
        assert isinstance(text, str)
        return text

    def write(self, prompt: list[Message], answers: Mapping[str, Message], tools: Tools) -> Written:
        """The texts, answers without the end of the conversation where their turn has an end of its own.

        `answers` are by what they are called in errors. Raises DefectError where the template refuses the conversation
        or leaves a part of it out.
        """
        start = self.render(prompt, tools, add_generation_prompt=True)
        sides = {name: self.render([*prompt, answer], tools) for name, answer in answers.items()}
        left_out = chain(
            self._left_out_of_prompt(prompt, tools, start),
            *(self._left_out_of_answer(name, [*prompt, answers[name]], tools, start, sides[name]) for name in answers),
        )
        if (first := next(left_out, None)) is not None:
            raise DefectError(
                "left_out",
                f"the chat template leaves out {first}, so training would go without it "
                "(data.template: path.jinja can replace the template)",
            )
        return Written(start, tuple(self._unclosed(side) for side in sides.values()))

    def turns(self, messages: list[Message], tools: Tools) -> str:
        """The text of turns alone: no generation prompt, no end of the conversation."""
        return self.render(messages, tools).removesuffix(self._conversation_end)

    def around(self, prompt: list[Message], index: int, tools: Tools, written: str) -> tuple[str, str] | None:
        """What the template writes before and after the text of a turn; None where marks around it do not show."""
        try:
            marked = self.render(_marked(prompt, index, before=MARK), tools, add_generation_prompt=True)
        except DefectError:
            return None
        before, *rest = marked.split(MARK)
        shows = len(rest) == 2 and written.startswith(before) and written.endswith(rest[-1])
        return (before, rest[-1]) if shows else None

    def leaves_open(self, messages: list[Message], tools: Tools) -> bool:
        """Whether the template writes nothing but white space after the text of the last turn."""
        _, mark, closing = self.render(_marked(messages, len(messages) - 1), tools).rpartition(MARK)
        return bool(mark) and not closing.strip()

    def before_next_turn(self, role: str) -> str:
        """What the template writes between an answer and the text of a next turn, of a user or a tool.

        Empty where it does not take such a conversation, or writes the answer differently in it.
        """
        answer: Message = {"role": "assistant", "content": "b"}
        if role == "tool":
            answer["tool_calls"] = [{"type": "function", "function": {"name": "f", "arguments": {}}}]
        said = [{"role": "user", "content": "a"}, answer]
        try:
            written = self.render(said, None).rstrip()
            before, mark, _ = self.render([*said, {"role": role, "content": MARK}], None).partition(MARK)
        except DefectError:
            return ""
        return before.removeprefix(written) if mark and before.startswith(written) else ""

    def _unclosed(self, side: str) -> str:
        both = self._turn_end + self._conversation_end
        return side.removesuffix(self._conversation_end) if self._turn_end and side.endswith(both) else side

    def _find_ends(self) -> tuple[str, str]:
        """What the template writes after any answer, if a special token ends it, and then after the last one alone.

        Both are empty where it takes no second question, or does not write the first answer then.
        """
        said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": MARK}]
        try:
            texts = [self.render(turns, None).partition(MARK) for turns in (said, [*said, said[0]])]
        except DefectError:
            return "", ""
        (_, shows, last), (_, still_shows, followed) = texts
        special = special_token_pattern(self._tokenizer)
        if not (special and shows and still_shows) or followed.startswith(last.rstrip()):
            return "", ""
        pieces, others = (re.split(f"({special.pattern})", text) for text in (last, followed))
        shared = _common(pieces, others)
        turn_end, end_tokens = "".join(pieces[:shared]), pieces[1:shared:2]
        is_end = bool(end_tokens) and turn_end.rstrip().endswith(end_tokens[-1])
        return turn_end if is_end else "", "".join(pieces[shared:])

    def _left_out_of_prompt(self, prompt: list[Message], tools: Tools, written: str) -> Iterator[str]:
        whole = rest = _squeeze(written)
        for index in sorted(range(len(prompt)), key=lambda index: -len(prompt[index]["content"])):
            role, said = prompt[index]["role"], _squeeze(prompt[index]["content"])
            if said in rest:
                rest = rest.replace(said, MARK, 1)  # so that it is not found again for a turn with fewer words
            elif (role == "user" and said not in whole) or self._same(_marked(prompt, index), tools, written):
                yield f"the {role} turn of the prompt, {shown(prompt[index]['content'])}"
            if prompt[index].get("tool_calls") and self._same(_without_last_call(prompt, index), tools, written):
                yield f"a tool call of the prompt, {shown(prompt[index]['tool_calls'][-1])}"
        if tools and self._same(prompt, None, written):
            yield f"'tools', {shown(tools)}"

    def _left_out_of_answer(
        self, name: str, messages: list[Message], tools: Tools, prompt: str, written: str
    ) -> Iterator[str]:
        answer = messages[-1]
        spoken = {key: answer[key] for key in SPOKEN if isinstance(answer.get(key), str)}
        if not written.startswith(prompt) or any(
            text.strip() not in written[len(prompt) :] for text in spoken.values()
        ):
            # Not word for word: white space aside, then.
            start, whole = _squeeze(prompt), _squeeze(written)
            begin = len(start) if whole.startswith(start) else _common(start, whole)
            for key, text in spoken.items():
                said = _squeeze(text)
                # A generation prompt may end with how the answer begins ("<think>"), so it may begin inside the prompt.
                if said and whole.find(said, max(0, begin - len(said))) < 0:
                    yield f"some of '{name}', whose {key} is {shown(text)}"
        if answer.get("tool_calls"):
            bare = _without_last_call(messages, len(messages) - 1)
            if self._same(bare, tools, written, add_generation_prompt=False):
                yield f"a tool call of '{name}', {shown(answer['tool_calls'][-1])}"

    def _same(self, messages: list[Message], tools: Tools, written: str, *, add_generation_prompt: bool = True) -> bool:
        """Whether the template writes just this of another conversation: it ignores what is different in it."""
        try:
            return self.render(messages, tools, add_generation_prompt=add_generation_prompt) == written
        except DefectError:
            return False  # it saw the difference


def as_messages(turns: Turns, role: str) -> list[Message]:
    return [{"role": role, "content": turns}] if isinstance(turns, str) else turns


def _squeeze(text: str) -> str:
    return "".join(text.split())


def _common(first: Sequence[str], second: Sequence[str]) -> int:
    """Length of the common prefix."""
    differing = (index for index, (one, other) in enumerate(zip(first, second, strict=False)) if one != other)
    return next(differing, min(len(first), len(second)))


def _marked(messages: list[Message], index: int, before: str = "") -> list[Message]:
    """The messages, with a mark behind the text of one, and perhaps one before it."""
    marked = {**messages[index], "content": before + messages[index]["content"] + MARK}
    return [*messages[:index], marked, *messages[index + 1 :]]


def _without_last_call(messages: list[Message], index: int) -> list[Message]:
    message = dict(messages[index])
    calls = message.pop("tool_calls")[:-1]
    return [*messages[:index], {**message, "tool_calls": calls} if calls else message, *messages[index + 1 :]]


def _template_text(tokenizer: PreTrainedTokenizerBase, template: str | None) -> str | None:
    """The template to pass on; None leaves the choice to the tokenizer (it may own one more, for tools)."""
    if template == NO_TEMPLATE:
        return None
    if template is None:
        _check_own(tokenizer)
        return None
    text = read_template(template)
    _check(text, tokenizer, f"'{template}'", "Mend the file.")
    return text


def read_template(path: str) -> str:
    """The text of a template file. Raises ConfigError."""
    try:
        return Path(path).expanduser().read_text(encoding="utf-8-sig")  # a byte-order mark would begin every prompt
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"data.template: '{path}' cannot be read ({error}). "
            "It is null (the tokenizer's own), 'none' or the path of a .jinja file."
        ) from error


def _check_own(tokenizer: PreTrainedTokenizerBase) -> None:
    name, own = f"the tokenizer '{tokenizer.name_or_path}'", tokenizer.chat_template
    way_out = "Set data.template to none (plain text: prompt, completion, EOS) or to the path of a .jinja file."
    if not own:
        raise ConfigError(f"data.template: {name} has no chat template. {way_out}")
    for text in own.values() if isinstance(own, dict) else [own]:
        _check(text, tokenizer, f"the chat template of {name}", way_out)


def _check(text: str, tokenizer: PreTrainedTokenizerBase, name: str, way_out: str) -> None:
    """Compile a template. Raises ConfigError where that fails, so that no record is blamed for it."""
    from jinja2 import TemplateSyntaxError

    if "strftime_now" in text:
        log.warning("The chat template writes today's date: tokens built on another day will differ.")
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}], chat_template=text, tokenize=False)
    except TemplateSyntaxError as error:
        reason = str(error.message).rstrip(".")
        raise ConfigError(f"data.template: {name}, line {error.lineno}: {reason}. {way_out}") from error
    except Exception:
        pass  # it is whole, and does not take this conversation
