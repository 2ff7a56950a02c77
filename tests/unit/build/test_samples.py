"""What a run shows of its prompts."""

import numpy as np
import pytest

from isopref.build.samples import last_turn
from isopref.testing.models import byte_tokenizer

START, END = "<|im_start|>", "<|im_end|>"


@pytest.mark.parametrize(
    ("prompt", "asked"),
    [
        (f"{START}system\nBe brief.{END}\n{START}user\nWhat?\n\nAnswer:{END}\n{START}assistant\n", "What?\n\nAnswer:"),
        (f"{START}user\nOne?{END}\n{START}assistant\nYes.{END}\n{START}user\nTwo?{END}\n{START}assistant\n", "Two?"),
        (f"{START}user\nWhat?{END}\n{START}assistant\n<think>\n\n</think>\n\n", "What?"),
        (f"{START}user{END}\n\nWhat?{START}assistant{END}\n\n", "What?"),  # a role between tokens of its own
        ("[INST] What? [/INST]", "[INST] What? [/INST]"),
        ("Question: What?\nAnswer:", "Question: What?\nAnswer:"),
        ("model trains: why?", "model trains: why?"),
        ("model", "model"),
    ],
)
def test_the_last_turn_is_shown_whole(prompt: str, asked: str) -> None:
    tokenizer = byte_tokenizer()
    assert last_turn(tokenizer, np.array(tokenizer(prompt, add_special_tokens=False)["input_ids"])) == asked
