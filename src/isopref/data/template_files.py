"""Which chat template a run has: the tokenizer's own, one in a file, or none. Refuses one that does not compile."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from isopref.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NO_TEMPLATE = "none"

log = logging.getLogger(__name__)


def template_text(tokenizer: PreTrainedTokenizerBase, template: str | None) -> str | None:
    """The template to pass to the tokenizer; None: the tokenizer's own (it may have a second one for tools)."""
    if template == NO_TEMPLATE:
        return None
    if template is None:
        _check_own(tokenizer)
        return None
    text = read_template(template)
    _check(text, tokenizer, f"'{template}'", "Fix the file.")
    return text


def read_template(path: str) -> str:
    """The text of a template file. Raises ConfigError."""
    try:
        return Path(path).expanduser().read_text(encoding="utf-8-sig")  # a byte-order mark would begin every prompt
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"data.template: '{path}' cannot be read ({error}). "
            "Use null (the tokenizer's own), 'none' or the path of a .jinja file."
        ) from error


def _check_own(tokenizer: PreTrainedTokenizerBase) -> None:
    name, own = f"the tokenizer '{tokenizer.name_or_path}'", tokenizer.chat_template
    way_out = "Set data.template to none (plain text: prompt, completion, EOS) or to the path of a .jinja file."
    if not own:
        raise ConfigError(f"data.template: {name} has no chat template. {way_out}")
    for text in own.values() if isinstance(own, dict) else [own]:
        _check(text, tokenizer, f"the chat template of {name}", way_out)


def _check(text: str, tokenizer: PreTrainedTokenizerBase, name: str, way_out: str) -> None:
    """Compile a template. Raises ConfigError if that fails, rather than an error for a record later."""
    from jinja2 import TemplateSyntaxError

    if "strftime_now" in text:
        log.warning("The chat template writes today's date, so the tokens will differ on another day.")
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}], chat_template=text, tokenize=False)
    except TemplateSyntaxError as error:
        reason = str(error.message).rstrip(".")
        raise ConfigError(f"data.template: {name}, line {error.lineno}: {reason}. {way_out}") from error
    except Exception:
        pass  # it compiles, and may refuse this conversation
