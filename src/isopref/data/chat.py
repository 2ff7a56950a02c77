"""Turns a PreferencePair into token ids through the chat template, with a verified boundary after the prompt.

How the boundary is found. The template renders three texts: the prompt with its generation prompt, and the prompt with
each answer. Each is tokenised as a whole (special tokens come only from the template). If both sequences begin with the
prompt's tokens, the boundary is proven. Otherwise the boundary backs off to the last token common to all three, and the
pair is counted: under `boundary_backoffs` if the tokenizer merges the last prompt character with the answer, under
`generation_prompt_backoffs` if the generation prompt differs from how the template renders an answer (for example, only
one of them has "<think>"). If a template renders the prompt's own turns differently once an answer follows, the answer
is read after the prompt as the model is given it; if that cannot be proven, there is no boundary: BadPairError.

How trained turns are found. An answer may be a conversation: assistant turns are trained, the others are context. The
model's input for a trained turn is the turns before it plus the generation prompt. The rendered conversation must begin
with that input, except for the generation prompt, and the turn begins where it ends. templates.py proves where the turn
ends, including its end token. The prompt of the pair is the common prefix of all sequences, up to the first trained
token.

How a completion ends. Generation stops at the end-of-turn token, so tokens after it are dropped if they are only white
space (ChatML writes "<|im_end|>\\n") or the same token again (the answer's own text ended with it). What a template
writes after the last turn of any conversation (Phi-3: EOS) is dropped, too, if the turn itself has an end token before
that. If a template writes no end token after the last turn, the model would never learn to stop. The answer then ends
with the token that opens the next turn, if the model stops at it (GLM's <|user|>, or <|observation|> after a tool
call), and otherwise with EOS, if nothing follows the answer. Counted as `added_ends`. If the template ends answers with
plain text, nothing is added; counted as `missing_eos`.

Without a template (`data.template: none`) a pair is plain text: [BOS] prompt + completion + EOS, with BOS only if the
tokenizer itself would add it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import numpy as np

from isopref.data.compare import Compare, comparisons
from isopref.data.content import question_id
from isopref.data.conversations import Conversation, TrainOn, conversation
from isopref.data.judged import BadPairError, LabelledAnswer, Preference, PreferencePair
from isopref.data.messages import DefectError, Turns
from isopref.data.omissions import NOTHING, Given
from isopref.data.surprises import special_token_pattern
from isopref.data.template_files import NO_TEMPLATE
from isopref.data.templates import ChatTemplate, Side, Turn, Written, as_messages
from isopref.data.tokenizer import end_tokens, tokenizer_content
from isopref.data.truncation import Span, stretch_to_cut
from isopref.errors import ConfigError, DataError
from isopref.examples import PAIR, Example
from isopref.types import FloatArray, IntArray

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class TokenizeOptions:
    """What determines the tokens, besides the data and the tokenizer. Defaults live in the config's schema.

    template: None (the tokenizer's own), "none" (plain text) or the path of a .jinja file.
    max_length: maximum tokens of the prompt plus its longer completion; None: no limit.
    truncation, for pairs over max_length: "drop" the pair; "keep_start" or "keep_end" of the prompt, truncated so that
        the longer completion fits. Only the text of turns is cut, never what opens and closes the prompt (see
        truncation.py). If the completions leave no room for a single token of text, the pair is dropped.
    on_bad: "error", or "drop" (and count) records that do not yield a pair.
    stops: tokens at which the model's generation stops, besides EOS.
    compare, min_gap: which answers of a list are compared (see compare.py).
    train_on: which turns of an answer are trained: every "assistant" turn, the "last" one, or its "final" text after
        its reasoning.
    """

    template: str | None
    max_length: int | None
    truncation: Literal["drop", "keep_start", "keep_end"]
    on_bad: Literal["error", "drop"]
    stops: tuple[int, ...] = ()
    compare: Compare = "all"
    min_gap: float = 0.0
    train_on: TrainOn = "assistant"

    def __post_init__(self) -> None:
        if self.raw and self.train_on != "assistant":
            raise ConfigError(
                f"data.train_on: {self.train_on} needs turns, but data.template: none writes plain text. Remove one."
            )
        if self.max_length is not None and self.max_length < 2:
            raise ConfigError(
                f"data.max_length: {self.max_length} leaves no room for a prompt and an answer. Use 2 or more."
            )

    @property
    def raw(self) -> bool:
        return self.template == NO_TEMPLATE


class _Sequence(NamedTuple):
    """Tokens of a prompt with one of its answers, their weights, and where the first trained turn begins."""

    tokens: IntArray
    weights: FloatArray
    first: int


class EncodedPair(NamedTuple):
    """A tokenised pair or list. `question_id`: digest of the prompt before templating, tokenising and truncation."""

    tokens: Example
    question_id: bytes
    notes: frozenset[str]  # of NOTES


NEXT_ROLES = ("user", "tool")
NOTES = ("boundary_backoffs", "generation_prompt_backoffs", "double_bos", "added_ends", "missing_eos", "truncated")


class PairEncoder:
    """Tokenises pairs with one tokenizer and one template. Raises ConfigError if there is no template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: TokenizeOptions) -> None:
        self._tokenizer = tokenizer
        self.options = options
        self._template = ChatTemplate(tokenizer, options.template)
        self._bos: int | None = tokenizer.bos_token_id
        self._eos: int | None = tokenizer.eos_token_id
        self._ends = end_tokens(tokenizer)
        self._is_space: dict[int, bool] = {}
        # Not for plain text, which may legitimately contain special tokens.
        self.special_tokens = None if options.raw else special_token_pattern(tokenizer)
        self._starts_with_bos = self._bos is not None and tokenizer("a")["input_ids"][:1] == [self._bos]
        self._stop_before = {role: None if options.raw else self._find_stop_before(role) for role in NEXT_ROLES}

    def key(self) -> str:
        """Digest of everything here that determines tokens: tokenizer, template, options. Content, not names."""
        options = self.options
        parts = {
            "tokenizer": tokenizer_content(self._tokenizer),
            "split_special_tokens": self._tokenizer.split_special_tokens,  # not part of tokenizer.json
            "special": [self._bos, self._eos, sorted(self._ends), str(self._tokenizer.special_tokens_map)],
            "starts_with_bos": self._starts_with_bos,
            "stop_before": self._stop_before,
            "template": self._template.content,
            "options": [options.raw, options.max_length, options.truncation, options.on_bad],
            "compare": [options.compare, options.min_gap],
            "train_on": options.train_on,
        }
        return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()

    def encode(self, pairs: Sequence[Preference]) -> list[EncodedPair | BadPairError | None]:
        """One result for each pair or list, in order; None: over max_length, and dropped.

        They are tokenised together so that a fast tokenizer uses all cores; no result depends on another.
        """
        written = [_or_bad(self._write, pair) for pair in pairs]
        texts = dict.fromkeys(text for item in written if isinstance(item, Written) for text in _texts(item))
        tokens = dict(zip(texts, self._tokenize(list(texts)), strict=True))
        return [
            _or_bad(self._finish, pair, item, tokens) if isinstance(item, Written) else item
            for pair, item in zip(pairs, written, strict=True)
        ]

    def encode_prompts(self, prompts: Sequence[Turns], given: Given = NOTHING) -> list[IntArray]:
        """Prompts without answers, ready for generation. Raises DataError if the template refuses one."""
        return self._tokenize([self._write_prompt(prompt, given) for prompt in prompts])

    def _write_prompt(self, prompt: Turns, given: Given) -> str:
        if self.options.raw and isinstance(prompt, str):
            return prompt
        try:
            return self._template.render(as_messages(prompt, "user"), given, add_generation_prompt=True)
        except DefectError as defect:
            raise DataError(f"the prompt {prompt!r}: {defect.args[-1]}. Set data.template, or change it.") from defect

    def _write(self, pair: Preference) -> Written:
        if not self.options.raw:
            prompt = as_messages(pair.prompt, "user")
            answers = dict(zip(pair.names, self._conversations(pair), strict=True))
            return self._template.write(prompt, answers, _given(pair))
        sides = [pair.prompt + one for one in pair.answers if isinstance(pair.prompt, str) and isinstance(one, str)]
        if not isinstance(pair.prompt, str) or len(sides) < len(pair.answers):
            raise DataError(f"{pair.origin}: messages need a chat template. Set data.template: path.jinja.")
        return Written(tuple(Side(side, (Turn(pair.prompt, None),)) for side in sides))

    def _conversations(self, pair: Preference) -> list[Conversation]:
        prompt, train_on = as_messages(pair.prompt, "user"), self.options.train_on
        named = zip(pair.answers, pair.names, strict=True)
        return [conversation(prompt, as_messages(answer, "assistant"), train_on, name) for answer, name in named]

    def _tokenize(self, texts: list[str]) -> list[IntArray]:
        if not texts:
            return []
        encoded = self._tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
        rows: list[IntArray] = [np.asarray(row, dtype=np.int32) for row in encoded["input_ids"]]
        if self.options.raw and self._starts_with_bos:
            bos = np.array([self._bos], dtype=np.int32)
            rows = [row if len(row) and row[0] == bos else np.concatenate([bos, row]) for row in rows]
        return rows

    def _finish(self, pair: Preference, written: Written, tokens_of: Mapping[str, IntArray]) -> EncodedPair | None:
        notes: set[str] = set()
        found = [self._sequence(pair, number, side, tokens_of, notes) for number, side in enumerate(written.sides)]
        first = found[0].tokens
        border = min(min(one.first, _common(first, one.tokens)) for one in found)
        if border == 0:
            raise DefectError("boundary", "not one token of the prompt comes before all answers")
        if self._bos is not None and border > 1 and first[0] == first[1] == self._bos:
            notes.add("double_bos")
        answers = tuple(one.tokens[border:] for one in found)
        weights = tuple(one.weights[border:] for one in found)
        plain = all((one == 1).all() for one in weights)
        tokens = Example(
            first[:border], answers, self._comparisons(pair), pair.scores, _gaps(pair), () if plain else weights
        )
        cut = self._truncate(tokens, pair, written)
        if cut is None:
            return None
        if cut is not tokens:
            notes.add("truncated")
        for better, worse in cut.comparisons:
            if np.array_equal(cut.answers[better], cut.answers[worse]):
                raise DefectError("tie", f"'{pair.names[better]}' and '{pair.names[worse]}' are the same tokens")
        if not all(cut.trained):
            raise DefectError("empty", "an answer has no tokens")
        asked = question_id(as_messages(pair.prompt, "user"), pair.tools)
        return EncodedPair(cut, asked, frozenset(notes))

    def _sequence(
        self, pair: Preference, number: int, side: Side, tokens_of: Mapping[str, IntArray], notes: set[str]
    ) -> _Sequence:
        """The tokens of a prompt with one of its answers, and where they are trained. Adds to the notes."""
        tokens = tokens_of[side.text]
        starts = [_common(tokens_of[turn.before], tokens) for turn in side.turns]
        for turn, start in zip(side.turns, starts, strict=True):
            if turn.is_asked_otherwise:
                notes.add("generation_prompt_backoffs")
            elif start < len(tokens_of[turn.before]):
                as_written = side.text.startswith(turn.before)
                notes.add("boundary_backoffs" if as_written else "generation_prompt_backoffs")
        last, last_start = side.turns[-1], starts[-1]
        is_open = partial(self._is_open, pair, number, last.before, side.text)
        completion = self._end(tokens, last_start, self._next_role(pair, number), is_open, notes)
        weights = np.zeros(last_start + len(completion))
        weights[last_start:] = last.weight
        for turn, start in zip(side.turns[:-1], starts[:-1], strict=True):
            assert turn.end is not None, "only the last turn ends with the text"
            end = self._end_inside(tokens, start, _common(tokens_of[side.text[: turn.end]], tokens), notes)
            weights[start:end] = turn.weight
        return _Sequence(np.concatenate([tokens[:last_start], completion]), weights, starts[0])

    def _end_inside(self, tokens: IntArray, start: int, end: int, notes: set[str]) -> int:
        """Where a turn ends that is not the last one: after its end token, as the module's docstring describes."""
        last = self._last_word(tokens, start, end)
        following = self._first_word(tokens, end)
        if last < start or int(tokens[last]) not in self._ends:
            # The model may stop at the token that opens the next turn.
            if following < len(tokens) and int(tokens[following]) in (self._eos, *self.options.stops):
                return following + 1
            notes.add("missing_eos")
            return max(end, start)
        while (before := self._last_word(tokens, start, last)) >= start and tokens[before] == tokens[last]:
            last = before
        return last + 1

    def _comparisons(self, pair: Preference) -> tuple[tuple[int, int], ...]:
        if isinstance(pair, PreferencePair):
            if self.options.min_gap and pair.gap is not None and pair.gap < self.options.min_gap:
                raise DefectError(
                    "tie", f"the scores differ by {pair.gap:g}, less than data.min_gap ({self.options.min_gap:g})"
                )
            return PAIR
        if isinstance(pair, LabelledAnswer):
            return ()
        found = comparisons(pair.scores, self.options.compare, self.options.min_gap)
        if not found:
            gap = f" by at least data.min_gap ({self.options.min_gap:g})" if self.options.min_gap else ""
            raise DefectError("tie", f"no two answers differ in their scores{gap}: {list(pair.scores)}")
        return found

    def _end(
        self, side: IntArray, border: int, next_role: str, is_open: Callable[[], bool], notes: set[str]
    ) -> IntArray:
        """The completion with its end, as the module's docstring describes."""
        last, stop = self._last_word(side, border, len(side)), self._stop_before[next_role]
        token = int(side[last]) if last >= border else None
        # If the template adds nothing after an answer, a special token at its end is part of its text.
        if token is not None and (token in (self._eos, stop) or (token in self._ends and not is_open())):
            while (before := self._last_word(side, border, last)) >= border and side[before] == token:
                last = before
            return side[border : last + 1]
        added = stop if stop is not None else self._eos if is_open() else None
        if added is None:
            notes.add("missing_eos")
            return side[border:]
        if not self.options.raw:
            notes.add("added_ends")
        return np.append(side[border:], np.int32(added))

    def _next_role(self, pair: Preference, number: int) -> str:
        """Who speaks after an answer."""
        is_call = not self.options.raw and self._conversations(pair)[number].messages[-1].get("tool_calls")
        return "tool" if is_call else "user"

    def _is_open(self, pair: Preference, number: int, before: str, written: str) -> bool:
        """Whether nothing but white space is written after an answer."""
        if self.options.raw:
            return True
        messages = self._conversations(pair)[number].messages
        said = messages[-1]["content"].strip()
        if written.removeprefix(before).strip() == said != "":
            return True
        if written.rstrip()[-1:] != said[-1:]:
            return False  # without a slow call of the template
        return self._template.leaves_open(messages, _given(pair))

    def _find_stop_before(self, role: str) -> int | None:
        """The token that opens a turn of `role` after an answer, if the model stops at it."""
        opening = (int(token) for token in self._tokenize([self._template.before_next_turn(role)])[0])
        first = next((token for token in opening if not self._whitespace(token)), None)
        return first if first in (self._eos, *self.options.stops) else None

    def _last_word(self, side: IntArray, border: int, end: int) -> int:
        """Index of the last token before `end` that is not white space; border - 1 if there is none."""
        last = end - 1
        while last >= border and self._whitespace(int(side[last])):
            last -= 1
        return last

    def _first_word(self, side: IntArray, start: int) -> int:
        """Index of the first token from `start` on that is not white space; the end if there is none."""
        while start < len(side) and self._whitespace(int(side[start])):
            start += 1
        return start

    def _truncate(self, tokens: Example, pair: Preference, written: Written) -> Example | None:
        """`tokens` itself if it fits; None: dropped. Answers are never truncated."""
        prompt, limit, truncation = tokens.prompt, self.options.max_length, self.options.truncation
        longer = max(map(len, tokens.answers))
        if limit is None or len(prompt) + longer <= limit:
            return tokens
        if truncation == "drop":
            return None
        cut = stretch_to_cut(len(prompt), self._spans(prompt, pair, written), limit - longer, truncation=truncation)
        return tokens._replace(prompt=np.delete(prompt, slice(*cut))) if cut else None

    def _spans(self, prompt: IntArray, pair: Preference, written: Written) -> list[Span]:
        """Where the text of turns is among the prompt's tokens; everything but BOS if unknown, as in plain text."""
        found = [] if self.options.raw else list(self._template.prompt_turns(written, _given(pair)))
        texts = [text for _, start, end in found for text in (start, end)]
        places = iter([_common(prompt, tokens) for tokens in self._tokenize(texts)])
        spans = [Span(role, next(places), next(places)) for role, *_ in found]
        return spans or [Span("", int(prompt[0] == self._bos), len(prompt))]

    def _whitespace(self, token: int) -> bool:
        if token not in self._is_space:
            text = self._tokenizer.decode([token], skip_special_tokens=False)
            assert isinstance(text, str)
            self._is_space[token] = not text.strip()
        return self._is_space[token]


def _or_bad(function: Callable[..., Result], pair: Preference, *args: Any) -> Result | BadPairError:
    """The result, or the error: one bad pair must not stop the others."""
    try:
        return function(pair, *args)
    except DefectError as defect:
        return BadPairError(pair.origin, *defect.args)


def _gaps(pair: Preference) -> tuple[float, ...]:
    """Score gaps that the example's scores do not express: those of a pair are 1 and 0."""
    return (pair.gap,) if isinstance(pair, PreferencePair) and pair.gap is not None else ()


def _given(pair: Preference) -> Given:
    return Given(pair.tools, pair.template_kwargs)


def _texts(written: Written) -> Iterator[str]:
    """Every text whose tokens are needed."""
    for side in written.sides:
        yield side.text
        for turn in side.turns:
            yield turn.before
            if turn.end is not None:
                yield side.text[: turn.end]


def _common(first: IntArray, second: IntArray) -> int:
    """Length of the common prefix."""
    length = min(len(first), len(second))
    differs = first[:length] != second[:length]
    return int(differs.argmax()) if differs.any() else length
