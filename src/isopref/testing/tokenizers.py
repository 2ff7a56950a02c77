"""Tiny tokenizers, trained on the fly, and chat templates in the style of well-known models."""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATES = {
    "chatml": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "llama3": (
        "{{ bos_token }}{% for m in messages %}<|header|>{{ m.role }}<|/header|>\n\n{{ m.content | trim }}<|eot|>"
        "{% endfor %}{% if add_generation_prompt %}<|header|>assistant<|/header|>\n\n{% endif %}"
    ),
    "mistral": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }}{{ eos_token }}"
        "{% elif m.role == 'user' %}[INST] {{ m.content }} [/INST]"
        "{% else %}{{ raise_exception('only user and assistant turns') }}{% endif %}{% endfor %}"
    ),
    # The generation prompt ends with a space, which byte-level tokenizers join with the answer's first word.
    "merging": (
        "{% for m in messages %}{{ 'A: ' if m.role == 'assistant' else 'Q: ' }}{{ m.content }}"
        "{{ eos_token if m.role == 'assistant' else '\n' }}{% endfor %}{% if add_generation_prompt %}A: {% endif %}"
    ),
    # Nothing after an answer.
    "endless": "{% for m in messages %}### {{ m.role }}\n{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}### assistant\n{% endif %}",
}
SPECIAL = ("<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>", "<|header|>", "<|/header|>", "<|eot|>")
WORDS = (
    "the quick brown fox jumps over the lazy dog and asks: what is the answer? yes. no. maybe, but only on "
    "sunny days. user assistant system Human Assistant Q: A: [INST] [/INST] hello world why how who when"
)


def tiny_tokenizer(template: str | None = "chatml", *, kind: Literal["byte", "meta"] = "byte") -> Any:
    """A new tokenizer with one of TEMPLATES, or without a template (None).

    kind "byte": byte-level BPE, like GPT-2 and Llama 3; decoding restores the text byte for byte.
    kind "meta": BPE with spaces as U+2581, like Llama 2; characters that it was not trained on become <unk>.
    """
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained(kind)),
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=list(SPECIAL[3:]),
    )
    tokenizer.chat_template = TEMPLATES[template] if template else None
    return tokenizer


@cache
def _trained(kind: str) -> str:
    if kind == "byte":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
        alphabet = ["\n"]
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([WORDS] * 4, trainer)
    return str(tokenizer.to_str())
