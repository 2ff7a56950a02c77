"""From a PreferencePair to token ids, through the chat template, with the border of the prompt proven.

How the border is found. The template writes three texts: the prompt with its generation prompt, and the
prompt with each answer. Each is tokenised whole (special tokens come from the template only). If the prompt's
tokens begin both sequences, the border is there, and that is the proof. Else something merged across it (a
tokenizer that joins the last prompt character with the answer, or a template whose generation prompt is not
how it writes an answer): the border backs off to the last token common to all three, and the pair is counted.
A template that writes the prompt's own turns differently once an answer follows has no border: BadPairError.

How a completion ends. Tokens after the end-of-turn token are dropped if they are only white space (ChatML
writes "<|im_end|>\\n"): generation stops before them. Where the template writes nothing after the answer, EOS
is appended, else the model would never learn to stop. Where it writes something that is not a special token,
it has an end of its own, and nothing is added. Both are counted as `missing_eos`.

Without a template (`data.template: none`) a pair is plain text: [BOS] prompt + completion + EOS, with BOS
only where the tokenizer itself would add it.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import numpy as np

from isopref.data.content import question_id
from isopref.data.messages import Message, Turns
from isopref.data.shapes import BadPairError, PreferencePair
from isopref.data.surprises import special_token_pattern
from isopref.errors import ConfigError, DataError
from isopref.types import IntArray, PairTokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NO_TEMPLATE = "none"
Result = TypeVar("Result")

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TokenizeOptions:
    """What decides the tokens, besides the data and the tokenizer. Defaults live in the config's schema.

    template: None (the tokenizer's own), "none" (plain text) or the path of a .jinja file.
    max_length: most tokens of the prompt with its longer completion; None is no limit.
    truncation, for pairs over max_length: "drop" the pair; "keep_start" or "keep_end" of the prompt, cut so
        that the longer completion fits whole. Where it cannot fit beside one prompt token, the prompt keeps
        one token (its first or its last) and both completions keep their first max_length - 1 tokens.
    on_bad: "error" or "drop" (and count) records that give no pair.
    """

    template: str | None
    max_length: int | None
    truncation: Literal["drop", "keep_start", "keep_end"]
    on_bad: Literal["error", "drop"]

    def __post_init__(self) -> None:
        if self.max_length is not None and self.max_length < 2:
            raise ConfigError(
                f"data.max_length: {self.max_length} has no room for a prompt and an answer. Use 2 or more."
            )

    @property
    def raw(self) -> bool:
        return self.template == NO_TEMPLATE


class EncodedPair(NamedTuple):
    """A tokenised pair. `question_id` digests what was asked, before any template, tokenizer or cut."""

    tokens: PairTokens
    question_id: bytes
    notes: frozenset[str]  # of NOTES


NOTES = ("boundary_backoffs", "double_bos", "missing_eos", "truncated")


class _Texts(NamedTuple):
    """The three texts of a pair, and the bare answers (to see what the template writes after them)."""

    prompt: str
    sides: tuple[str, str]
    answers: tuple[str, str]

    def bare(self) -> list[bool]:
        """For each side, whether the template wrote nothing but white space after the answer."""
        found = []
        for text, answer in zip(self.sides, (answer.strip() for answer in self.answers), strict=True):
            after_prompt = text.startswith(self.prompt)  # else the generation prompt is not how it writes an answer
            same = text[len(self.prompt) :].strip() == answer if after_prompt else text.rstrip().endswith(answer)
            found.append(bool(answer) and same)
        return found


class PairEncoder:
    """Tokenises pairs with one tokenizer and one template. Raises ConfigError where there is no template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: TokenizeOptions) -> None:
        self._tokenizer = tokenizer
        self.options = options
        self._template = _template_text(tokenizer, options.template)
        self._bos: int | None = tokenizer.bos_token_id
        self._eos: int | None = tokenizer.eos_token_id
        self._ends = _end_tokens(tokenizer)
        self._is_space: dict[int, bool] = {}
        # Of text that a template writes around; plain text may well hold special tokens of its own.
        self.special_tokens = None if options.raw else special_token_pattern(tokenizer)
        self._starts_with_bos = self._bos is not None and tokenizer("a")["input_ids"][:1] == [self._bos]

    def key(self) -> str:
        """Digest of everything here that decides tokens: tokenizer, template, options. Content, not names."""
        options = self.options
        parts = {
            "tokenizer": _tokenizer_content(self._tokenizer),
            "special": [self._bos, self._eos, sorted(self._ends), str(self._tokenizer.special_tokens_map)],
            "starts_with_bos": self._starts_with_bos,
            "template": self._template if self._template is not None else self._tokenizer.chat_template,
            "options": [options.raw, options.max_length, options.truncation, options.on_bad],
        }
        return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()

    def encode(self, pairs: Sequence[PreferencePair]) -> list[EncodedPair | BadPairError | None]:
        """One result for each pair, in order; None: longer than max_length, in mode drop.

        Pairs are tokenised together, so that a fast tokenizer uses all cores; no result depends on another.
        """
        written = [_or_bad(self._write, pair) for pair in pairs]
        flat = [text for item in written if isinstance(item, _Texts) for text in (item.prompt, *item.sides)]
        ids = iter(self._tokenize(flat))
        return [
            _or_bad(self._finish, pair, item, next(ids), (next(ids), next(ids))) if isinstance(item, _Texts) else item
            for pair, item in zip(pairs, written, strict=True)
        ]

    # --- text ---

    def _write(self, pair: PreferencePair) -> _Texts:
        if self.options.raw:
            return self._write_raw(pair)
        prompt = _as_messages(pair.prompt, "user")
        answers = [_as_messages(side, "assistant") for side in (pair.chosen, pair.rejected)]
        start = self._render(prompt, pair, add_generation_prompt=True)
        chosen, rejected = (self._render(prompt + answer, pair) for answer in answers)
        return _Texts(start, (chosen, rejected), (answers[0][-1]["content"], answers[1][-1]["content"]))

    def _write_raw(self, pair: PreferencePair) -> _Texts:
        parts = (pair.prompt, pair.chosen, pair.rejected)
        if not all(isinstance(part, str) for part in parts):
            raise DataError(f"{pair.origin}: messages need a chat template. Set data.template: path.jinja.")
        prompt, chosen, rejected = (str(part) for part in parts)
        return _Texts(prompt, (prompt + chosen, prompt + rejected), (chosen, rejected))

    def _render(self, messages: list[Message], pair: PreferencePair, *, add_generation_prompt: bool = False) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                messages,
                tools=list(pair.tools) if pair.tools else None,
                chat_template=self._template,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
            )
        except Exception as error:  # a template is foreign code: it raises what it likes about a conversation
            raise BadPairError(pair.origin, "template", f"the chat template refuses it ({error})") from error
        assert isinstance(text, str)
        return text

    def _tokenize(self, texts: list[str]) -> list[IntArray]:
        if not texts:
            return []
        encoded = self._tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
        rows: list[IntArray] = [np.asarray(row, dtype=np.int32) for row in encoded["input_ids"]]
        if self.options.raw and self._starts_with_bos:
            bos = np.array([self._bos], dtype=np.int32)
            rows = [row if len(row) and row[0] == bos else np.concatenate([bos, row]) for row in rows]
        return rows

    # --- tokens ---

    def _finish(
        self, pair: PreferencePair, texts: _Texts, prompt: IntArray, sides: tuple[IntArray, IntArray]
    ) -> EncodedPair | None:
        notes: set[str] = set()
        border = min(_common(prompt, side) for side in sides)
        if border < len(prompt):
            notes.add("boundary_backoffs")
            self._check_border(pair, texts)
        if border == 0:
            raise BadPairError(pair.origin, "boundary", "not one token of the prompt stands before both answers")
        if self._bos is not None and border > 1 and prompt[0] == prompt[1] == self._bos:
            notes.add("double_bos")
        chosen, rejected = (
            self._end(side, border, bare, notes) for side, bare in zip(sides, texts.bare(), strict=True)
        )
        tokens = PairTokens(prompt[:border], chosen, rejected)
        cut = _truncate(tokens, self.options)
        if cut is None:
            return None
        if cut is not tokens:
            notes.add("truncated")
        if np.array_equal(cut.chosen, cut.rejected):
            when = "" if cut is tokens else " once cut to data.max_length"
            raise BadPairError(pair.origin, "tie", f"'chosen' and 'rejected' are the same tokens{when}")
        if not (len(cut.chosen) and len(cut.rejected)):
            raise BadPairError(pair.origin, "empty", "an answer has no tokens")
        asked = question_id(_as_messages(pair.prompt, "user"), pair.tools)
        return EncodedPair(cut, asked, frozenset(notes))

    def _check_border(self, pair: PreferencePair, texts: _Texts) -> None:
        """The prompt's turns must read the same before an answer; only the generation prompt may differ."""
        if self.options.raw:
            return
        turns = self._render(_as_messages(pair.prompt, "user"), pair).rstrip()
        if not all(side.startswith(turns) for side in texts.sides):
            raise BadPairError(
                pair.origin,
                "boundary",
                "the chat template writes the prompt differently once an answer follows, so where the answer "
                "begins cannot be proven (data.template: path.jinja can replace the template)",
            )

    def _end(self, side: IntArray, border: int, bare: bool, notes: set[str]) -> IntArray:
        """The completion, ended as the module's docstring says. `bare`: nothing but EOS can be its end."""
        bare = bare or self.options.raw
        last = len(side) - 1
        while last >= border and self._whitespace(int(side[last])):
            last -= 1
        if last >= border and int(side[last]) in ({self._eos} if bare else self._ends):
            return side[border : last + 1]
        if self._eos is None or not self.options.raw:
            notes.add("missing_eos")
        return np.append(side[border:], np.int32(self._eos)) if bare and self._eos is not None else side[border:]

    def _whitespace(self, token: int) -> bool:
        if token not in self._is_space:
            text = self._tokenizer.decode([token], skip_special_tokens=False)
            assert isinstance(text, str)
            self._is_space[token] = not text.strip()
        return self._is_space[token]


def _or_bad(function: Callable[..., Result], *args: Any) -> Result | BadPairError:
    """The result, or the BadPairError that was raised: one bad pair must not stop its neighbours."""
    try:
        return function(*args)
    except BadPairError as bad:
        return bad


def _as_messages(turns: Turns, role: str) -> list[Message]:
    return [{"role": role, "content": turns}] if isinstance(turns, str) else turns


def _common(first: IntArray, second: IntArray) -> int:
    """Length of the common prefix."""
    length = min(len(first), len(second))
    differs = first[:length] != second[:length]
    return int(differs.argmax()) if differs.any() else length


def _truncate(tokens: PairTokens, options: TokenizeOptions) -> PairTokens | None:
    """`tokens` itself where it fits; None: dropped. Both sides keep the same prompt, one token at least."""
    longer = max(len(tokens.chosen), len(tokens.rejected))
    if options.max_length is None or len(tokens.prompt) + longer <= options.max_length:
        return tokens
    if options.truncation == "drop":
        return None
    keep = max(1, options.max_length - longer)
    prompt = tokens.prompt[:keep] if options.truncation == "keep_start" else tokens.prompt[-keep:]
    room = options.max_length - len(prompt)
    return PairTokens(prompt, tokens.chosen[:room], tokens.rejected[:room])


def _template_text(tokenizer: PreTrainedTokenizerBase, template: str | None) -> str | None:
    """The template to pass on; None leaves the choice to the tokenizer (it may own one more, for tools)."""
    if template == NO_TEMPLATE:
        return None
    if template is None:
        if not tokenizer.chat_template:
            raise ConfigError(
                f"data.template: the tokenizer '{tokenizer.name_or_path}' has no chat template. "
                "Set data.template to none (plain text: prompt, completion, EOS) or to the path of a .jinja file."
            )
        text, used = str(tokenizer.chat_template), None
    else:
        try:
            text = used = Path(template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"data.template: '{template}' cannot be read ({error}). "
                "It is null (the tokenizer's own), 'none' or the path of a .jinja file."
            ) from error
    if "strftime_now" in text:
        log.warning("The chat template writes today's date: tokens built on another day will differ.")
    return used


def _end_tokens(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Tokens that can end a turn: EOS, and special tokens without another office (<|im_end|>, <|eot_id|>)."""
    special = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    offices = {tokenizer.bos_token_id, tokenizer.unk_token_id, tokenizer.pad_token_id}
    ends = (special | set(tokenizer.all_special_ids)) - offices
    return frozenset(ends | {tokenizer.eos_token_id} - {None})


def _tokenizer_content(tokenizer: PreTrainedTokenizerBase) -> Any:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return [type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())]
    content = json.loads(backend.to_str())
    # State of the last call, not of the tokenizer.
    return {key: value for key, value in content.items() if key not in ("truncation", "padding")}
