"""Chat templates: how they render a conversation, and where in the text the trained turns are.

A template is third-party code. omissions.py finds what it leaves out of a conversation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

from isopref.data.conversations import Conversation, plain
from isopref.data.marks import MARK, common, marked_behind
from isopref.data.messages import REASONING, REASONING_NAMES, THINK_END, DefectError, Message, Turns
from isopref.data.omissions import HINT, NOTHING, Given, Omissions, refuse, squeezed
from isopref.data.surprises import special_token_pattern
from isopref.data.template_files import NO_TEMPLATE, template_text
from isopref.data.turn_ends import Tagged, end_of_turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")  # transformers' own pattern
OPEN_TAG = re.compile(r"<[^<>\s]*$")
JSON_ARGUMENTS = re.compile(r"\{\s*\"k\"\s*:\s*\"v\"\s*\}")


class Turn(NamedTuple):
    """A trained turn of an answer, in the text of its conversation."""

    before: str  # the model's input when it writes the turn
    end: int | None  # where the turn ends in the text, including its end token; None: the text ends with it
    weight: float = 1.0
    is_asked_otherwise: bool = False  # whether `before` ends otherwise than with the generation prompt, in white space


class Side(NamedTuple):
    """The text of a prompt with one of its answers, up to the last trained turn."""

    text: str
    turns: tuple[Turn, ...]


class Written(NamedTuple):
    """The texts of a pair or a list: the prompt with each answer."""

    sides: tuple[Side, ...]
    asked: Sequence[Message] = ()  # the turns before the first trained one of the first side; none in plain text
    num_prompt: int = 0  # how many of them are the prompt


class ChatTemplate:
    """Renders conversations with a tokenizer's template or another one. Raises ConfigError if there is none."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str | None) -> None:
        self._tokenizer = tokenizer
        self._text = template_text(tokenizer, template)
        self._omissions = Omissions(self.render)
        self._turn_end, self._conversation_end = ("", "") if template == NO_TEMPLATE else self._find_ends()

    @property
    def content(self) -> Any:
        """The template itself, for a digest."""
        return self._text if self._text is not None else self._tokenizer.chat_template

    def render(self, messages: Sequence[Message], given: Given, *, add_generation_prompt: bool = False) -> str:
        """The text of a conversation. Raises DefectError if the template refuses it."""
        try:
            text = self._tokenizer.apply_chat_template(
                [self._as_written(message) for message in messages],
                tools=list(given.tools) if given.tools else None,
                chat_template=self._text,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **given.kwargs,
            )
        except Exception as error:  # a template is third-party code and may raise anything
            raise DefectError("template", f"the chat template refuses the conversation ({error})") from error
        assert isinstance(text, str)
        return text

    def write(self, prompt: list[Message], answers: Mapping[str, Conversation], given: Given) -> Written:
        """The texts of a prompt and its answers, which end without the end of the conversation if turns have their own.

        `answers` are keyed by their names in errors. Raises DefectError if the template refuses the conversation, omits
        part of it, or if the text of a turn cannot be located with certainty.
        """
        asks = self._asks(prompt, answers.values())
        start = self.render(prompt, given, add_generation_prompt=asks)
        refuse(self._omissions.of_context(prompt, range(len(prompt)), given, start))
        asked = start if asks else None
        first = next(iter(answers.values()))
        try:
            sides = tuple(self._locate(name, one, given, asked) for name, one in answers.items())
            return Written(sides, first.messages[: first.trained[0].number], len(prompt))
        except DefectError as defect:
            last = {name: one._replace(trained=one.trained[-1:]) for name, one in answers.items()}
            if last == answers or not all(one.trains_last for one in answers.values()):
                raise
            # If the last turns alone are refused, too, that is the cause to report. Otherwise they are a way out.
            for name, one in last.items():
                self._locate(name, one, given, asked)
            reason, what = defect.args
            raise DefectError(reason, f"{what}. Or set data.train_on: last to train only the last turn") from None

    def _locate(self, name: str, answer: Conversation, given: Given, asked: str | None) -> Side:
        """`asked` is the prompt with its generation prompt, if all answers begin with an assistant turn."""
        messages = answer.messages
        text = self.render(messages, given)
        trained = {one.number for one in answer.trained}
        context = [index for index in range(answer.num_prompt, len(messages)) if index not in trained]
        if context:
            refuse(self._omissions.of_context(messages, context, given, text, name))
        turns = []
        tagged = cache(partial(self.tagged, messages, given))
        for one in answer.trained:
            before = asked if one.number == answer.num_prompt else None
            if before is None:
                before = self.render(messages[: one.number], given, add_generation_prompt=True)
            final = self._final(name, messages, given, text) if one.final else 0
            if len(answer.trained) == 1:
                text = self._as_asked(messages, given, text, before)
            where = f"turn {one.number + 1} of '{name}'" if len(messages) > answer.num_prompt + 1 else f"'{name}'"
            end = None
            if one.number < len(messages) - 1:
                end = end_of_turn(self, where, messages, one.number, given, text, tagged)
            refuse(self._omissions.of_answer(where, messages, one.number, given, before, text[:end]))
            if not self._begins_as_asked(messages, one.number, given, text, before):
                raise DefectError(
                    "boundary",
                    f"the chat template writes what comes before {where} differently once that turn follows, so where "
                    f"it begins cannot be proven {HINT}",
                )
            spaced = _as_spaced(text, before)
            otherwise = False
            if spaced != before:
                otherwise = not spaced.endswith(before.removeprefix(self.render(messages[: one.number], given)))
            if final and not (text.startswith(spaced) and len(spaced) > len(text) - final):
                spaced = text[:-final]
            turns.append(Turn(spaced, end, one.weight, otherwise))
        return Side(self.unclosed(text), tuple(turns))

    @staticmethod
    def _asks(prompt: list[Message], answers: Iterable[Conversation]) -> bool:
        """Whether all answers begin with an assistant turn. They may also diverge after one, or at a tool result."""
        return all(answer.messages[answer.num_prompt]["role"] == "assistant" for answer in answers)

    def _begins_as_asked(self, messages: list[Message], index: int, given: Given, text: str, before: str) -> bool:
        """Whether the text before a turn equals the model's input for it; only the generation prompt may differ."""
        if text.startswith(before):
            return True
        context = self.render(messages[:index], given)
        if not before.startswith(context.rstrip()):
            context = context.removesuffix(self._conversation_end)
        return text.startswith(context.rstrip())

    def _as_asked(self, messages: list[Message], given: Given, text: str, before: str) -> str:
        """The last turn after the model's input for it, `before`, where the template then rewrites that input.

        gpt-oss cuts the reasoning of tool calls once they are answered, but the model answers with it in view. A mark
        at the end of the message before the turn shows the rest, which is the turn; the text itself if it does not.
        """
        if self._begins_as_asked(messages, len(messages) - 1, given, text, before):
            return text
        marked = marked_behind(messages, len(messages) - 2)
        _, shows, opening = self.render(marked[:-1], given, add_generation_prompt=True).rpartition(MARK)
        _, still_shows, rest = self.render(marked, given).rpartition(MARK)
        if shows and still_shows and before.endswith(opening) and text.endswith(rest):
            return before.removesuffix(opening) + rest
        return text

    def tagged(self, messages: list[Message], given: Given) -> Tagged:
        """The text of a conversation, and what tags enclose in it; None unless that is one span for each answer."""
        from transformers.utils.chat_template_utils import render_jinja_template

        template = self._tokenizer.get_chat_template(self._text, given.tools)
        if not GENERATION.search(template):
            return None
        rendered: Any = render_jinja_template(
            [[self._as_written(message) for message in messages]],
            tools=list(given.tools) if given.tools else None,
            chat_template=template,
            return_assistant_tokens_mask=True,
            **{**self._tokenizer.special_tokens_map, **given.kwargs},
        )
        (text,), (spans,) = rendered
        num_spoken = sum(message["role"] == "assistant" for message in messages)
        return (text, spans) if text == self.render(messages, given) and len(spans) == num_spoken else None

    def _final(self, name: str, messages: list[Message], given: Given, text: str) -> int:
        """The length of what the last turn says after its reasoning: its text, or its calls if it has no text."""
        last, whole = messages[-1], text
        thought, end, said = last["content"].rpartition(THINK_END)
        reasoning = last.get(REASONING) or thought
        if said.strip():
            start = len(last["content"]) - len(said.lstrip())
            marked = {**last, "content": last["content"][:start] + MARK + said.lstrip()}
        elif last.get("tool_calls"):
            marked = {**last, "content": thought + end + said + MARK}
            if MARK not in self.render([*messages[:-1], marked], given):
                # With text in place of the calls, the template writes the same up to where the calls begin, but gpt-oss
                # would then cut the reasoning of earlier calls. Without that, the last turn is the same.
                del marked["tool_calls"]
                messages = [*(without_reasoning(one) for one in messages[:-1]), last]
                text = self.render(messages, given)
        elif reasoning.strip():
            raise DefectError(
                "empty",
                f"'{name}' ends with its reasoning, so data.train_on: final has nothing to train on. Set it to last",
            )
        else:
            return 0
        rendered = self.render([*messages[:-1], marked], given)
        before = text[: common(text, rendered)]
        if not said.strip():
            before = OPEN_TAG.sub("", before)  # the tags of text and of calls may begin alike
        key, inside = (REASONING, "") if last.get(REASONING) else ("content", end + said)
        thinking = self.render([*messages[:-1], {**last, key: reasoning.rstrip() + MARK + inside}], given)
        is_whole = not reasoning.strip() or thinking.rfind(MARK) <= len(before)  # -1: the template leaves it out
        shows = rendered.startswith(before + MARK) if said.strip() else whole.endswith(text[len(before) :])
        if not (is_whole and shows):
            raise DefectError(
                "boundary",
                f"the chat template does not show where the reasoning of '{name}' ends {HINT}. Or set "
                "data.train_on: last, which trains the reasoning too",
            )
        return len(text) - len(before)

    def _as_written(self, message: Message) -> Message:
        """A message in the form the template expects."""
        message = plain(message)
        if message["role"] == "assistant" and REASONING in message:
            message |= dict.fromkeys(REASONING_NAMES, message[REASONING])  # gpt-oss, for one, reads "thinking"
        if not message.get("tool_calls") or not self._wants_text:
            return message
        return {**message, "tool_calls": [_with_text_arguments(call) for call in message["tool_calls"]]}

    @cached_property
    def _wants_text(self) -> bool:
        """Whether the template takes the arguments of a call only as JSON text, and fails on or misprints objects."""
        call = {"type": "function", "id": "call_0000", "function": {"name": "f", "arguments": {"k": "v"}}}
        said: list[Message] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}]
        said[-1]["tool_calls"] = [call]
        written = []
        for arguments in ({"k": "v"}, '{"k": "v"}'):
            call["function"] = {"name": "f", "arguments": arguments}
            try:
                text = self._tokenizer.apply_chat_template(said, chat_template=self._text, tokenize=False)
            except Exception:
                text = ""
            written.append(JSON_ARGUMENTS.search(str(text)) is not None)
        return written == [False, True]

    def prompt_turns(self, written: Written, given: Given) -> Iterator[tuple[str, str, str]]:
        """Role, and the text up to the start and the end, of the prompt's turns in what all sides begin with.

        Only of turns that marks around their text show.
        """
        asked = list(written.asked)
        text = self.render(asked, given, add_generation_prompt=True)
        shared = min(common(text, side.text) for side in written.sides)
        for index in range(written.num_prompt):
            try:
                marked = self.render(marked_behind(asked, index, before=MARK), given, add_generation_prompt=True)
            except DefectError:
                continue
            before, *rest = marked.split(MARK)
            shows = len(rest) == 2 and text.startswith(before) and text.endswith(rest[-1])
            if shows and len(before) <= shared:
                yield asked[index]["role"], before, text.removesuffix(rest[-1])

    def leaves_open(self, messages: list[Message], given: Given) -> bool:
        """Whether the template writes nothing but white space after the text of the last turn."""
        _, mark, closing = self.render(marked_behind(messages, len(messages) - 1), given).rpartition(MARK)
        return bool(mark) and not closing.strip()

    def before_next_turn(self, role: str) -> str:
        """What the template writes between an answer and the text of the next user or tool turn.

        Empty if it refuses such a conversation or renders the answer differently in it.
        """
        answer: Message = {"role": "assistant", "content": "b"}
        if role == "tool":
            answer["tool_calls"] = [{"type": "function", "function": {"name": "f", "arguments": {}}}]
        said = [{"role": "user", "content": "a"}, answer]
        try:
            written = self.render(said, NOTHING).rstrip()
            before, mark, _ = self.render([*said, {"role": role, "content": MARK}], NOTHING).partition(MARK)
        except DefectError:
            return ""
        return before.removeprefix(written) if mark and before.startswith(written) else ""

    def unclosed(self, side: str) -> str:
        """A text without what the template writes after the last turn only, if turns have an end of their own."""
        both = self._turn_end + self._conversation_end
        return side.removesuffix(self._conversation_end) if self._turn_end and side.endswith(both) else side

    def _find_ends(self) -> tuple[str, str]:
        """What the template writes after every answer, if that ends in a special token; and after the last answer only.

        Both are empty if it refuses a second question, or if it then omits the first answer.
        """
        said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": MARK}]
        try:
            texts = [self.render(turns, NOTHING).partition(MARK) for turns in (said, [*said, said[0]])]
        except DefectError:
            return "", ""
        (_, shows, last), (_, still_shows, followed) = texts
        special = special_token_pattern(self._tokenizer)
        if not (special and shows and still_shows) or followed.startswith(last.rstrip()):
            return "", ""
        pieces, others = (re.split(f"({special.pattern})", text) for text in (last, followed))
        shared = common(pieces, others)
        turn_end, end_tokens = "".join(pieces[:shared]), pieces[1:shared:2]
        is_end = bool(end_tokens) and turn_end.rstrip().endswith(end_tokens[-1])
        return turn_end if is_end else "", "".join(pieces[shared:])


def _as_spaced(text: str, before: str) -> str:
    """The beginning of a text that differs from the model's input in white space only; the input if there is none.

    Some templates write a line break after a turn only if another one follows.
    """
    if text.startswith(before) or not squeezed(text).startswith(squeezed(before)):
        return before
    end = 0
    for character in squeezed(before):
        end = text.index(character, end) + 1  # only white space is skipped
    space = before[len(before.rstrip()) :]
    return text[: end + common(space, text[end:])]


def without_reasoning(message: Message) -> Message:
    return {key: value for key, value in message.items() if key != REASONING}


def as_messages(turns: Turns, role: str) -> list[Message]:
    return [{"role": role, "content": turns}] if isinstance(turns, str) else turns


def _with_text_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function", {})
    arguments = function.get("arguments")
    if not isinstance(arguments, dict):
        return call
    return {**call, "function": {**function, "arguments": json.dumps(arguments, ensure_ascii=False)}}
