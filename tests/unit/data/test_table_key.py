"""The key of a table follows all that decides its tokens, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AddedToken, PreTrainedTokenizer

from isopref.data.chat import PairEncoder, TokenizeOptions
from isopref.testing.tokenizers import TEMPLATES, tiny_tokenizer


def options(**changes: Any) -> TokenizeOptions:
    return TokenizeOptions(**{"template": None, "max_length": None, "truncation": "drop", "on_bad": "error", **changes})


def test_the_key_follows_all_that_decides_tokens_and_nothing_else(tmp_path: Path) -> None:
    def key(tokenizer: Any = None, **kwargs: Any) -> str:
        return PairEncoder(tokenizer or tiny_tokenizer("chatml"), options(**kwargs)).key()

    path = tmp_path / "same.jinja"
    path.write_text(TEMPLATES["chatml"])
    padded, renamed = tiny_tokenizer("chatml"), tiny_tokenizer("chatml")
    renamed.name_or_path = "another/name"
    assert key() == key(renamed) == key(template=str(path))
    padded.bos_token = None  # with BOS the encoder's own first call resets what the last caller left behind
    plain = key(padded)
    padded.backend_tokenizer.enable_padding(length=9)
    padded.backend_tokenizer.enable_truncation(5)
    assert key(padded) == plain

    grown, other_eos, split = (tiny_tokenizer("chatml") for _ in range(3))
    grown.add_tokens(["fox jumps"])
    other_eos.eos_token = "<|im_end|>"
    split.split_special_tokens = True
    keys = [
        key(),
        plain,
        *(key(other) for other in (grown, other_eos, split)),
        *(key(other) for other in (tiny_tokenizer("llama3"), tiny_tokenizer("chatml", kind="meta"))),
        *(key(max_length=9, truncation=truncation) for truncation in ("drop", "keep_start", "keep_end")),
        key(template="none"),
    ]
    assert len(set(keys)) == len(keys) == 11


class Letters(PreTrainedTokenizer):
    """A tokenizer without a tokenizer.json: in Python, with a file and settings of its own."""

    vocab_files_names = {"order_file": "order.txt"}  # noqa: RUF012

    def __init__(self, order_file: Path, lower: bool = False, **kwargs: Any):
        self.order_file, self.lower = str(order_file), lower
        self.letters = {letter: i for i, letter in enumerate("abAB")}
        super().__init__(order_file=str(order_file), lower=lower, eos_token="</s>", **kwargs)  # type: ignore[no-untyped-call]

    @property
    def vocab_size(self) -> int:
        return len(self.letters)

    def get_vocab(self) -> dict[str, int]:
        return {**self.letters, **self.added_tokens_encoder}

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return list(text.lower() if self.lower else text)

    def _convert_token_to_id(self, token: str) -> int | None:
        return self.letters.get(token)


def test_the_key_follows_the_files_and_settings_of_a_tokenizer_in_python(tmp_path: Path) -> None:
    for folder, order in (("one", "ab"), ("same", "ab"), ("other", "ba")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "order.txt").write_text(order)

    def key(folder: str, **settings: Any) -> str:
        tokenizer = Letters(tmp_path / folder / "order.txt", **settings)
        return PairEncoder(tokenizer, options(template="none")).key()

    assert key("one") == key("same")
    keys = [
        key("one"),
        key("other"),
        key("one", lower=True),
        key("one", split_special_tokens=True),
        *(key("one", added_tokens_decoder={9: AddedToken("<x>", lstrip=lstrip)}) for lstrip in (False, True)),
    ]
    assert len(set(keys)) == len(keys)
