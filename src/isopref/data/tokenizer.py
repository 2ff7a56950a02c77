"""Properties of a tokenizer: the tokens that end a turn, and its content for a digest."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def end_tokens(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Tokens that can end a turn: EOS, and special tokens that mean nothing else (<|im_end|>, <|eot_id|>).

    The padding token is one of them: many tokenizers pad with the end of a turn, and no template writes padding.
    """
    special = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    ends = (special | set(tokenizer.all_special_ids)) - {tokenizer.bos_token_id, tokenizer.unk_token_id}
    return frozenset(ends | {tokenizer.eos_token_id} - {None})


def tokenizer_content(tokenizer: PreTrainedTokenizerBase) -> Any:
    """Everything that determines its tokens, as JSON values."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        content = json.loads(backend.to_str())
        # State of the last call, not of the tokenizer.
        return {key: value for key, value in content.items() if key not in ("truncation", "padding")}
    files = (getattr(tokenizer, name, None) for name in tokenizer.vocab_files_names)
    return [
        type(tokenizer).__name__,
        sorted(tokenizer.get_vocab().items()),
        [hashlib.blake2b(Path(file).read_bytes()).hexdigest() for file in files if file and Path(file).is_file()],
        sorted((index, repr(token)) for index, token in tokenizer.added_tokens_decoder.items()),
        {name: value for name, value in tokenizer.init_kwargs.items() if isinstance(value, bool | int | float)},
    ]
