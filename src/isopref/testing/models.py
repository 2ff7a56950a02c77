"""Tiny models of many architectures, built from configs with random weights, and random pairs for them."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from isopref.examples import FEWEST_SHARED, Example, PairTokens
from isopref.models.adapter import Kind, NewAdapter, add_adapter
from isopref.models.noise import disable_dropout
from isopref.types import FloatArray, IntArray

VOCABULARY = 97

_LLAMA_LIKE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": None,  # the embedding of a padding token gets no gradient, so the oracle's would be wrong
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,  # large enough that attention matters
}

# Not in ARCHITECTURES, because its experts do not support float64. It has many index heads: with few, the indexer would
# often give keys the same score and choose between them arbitrarily.
SPARSE_ATTENTION = (
    "deepseek_v32",
    {**_LLAMA_LIKE, "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8,
     "qk_nope_head_dim": 8, "v_head_dim": 8, "index_topk": 8, "index_n_heads": 16, "index_head_dim": 16,
     "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
     "first_k_dense_replace": 1},
)  # fmt: skip
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": (
        "gpt2",
        {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256,
         "initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "llama": ("llama", _LLAMA_LIKE),
    "llama_tied": ("llama", {**_LLAMA_LIKE, "tie_word_embeddings": True}),
    "llama_wide": ("llama", {**_LLAMA_LIKE, "intermediate_size": 256}),  # half its MLP gets 8-bit state
    "qwen2": ("qwen2", _LLAMA_LIKE),
    "qwen3": ("qwen3", _LLAMA_LIKE),
    "olmo2": ("olmo2", _LLAMA_LIKE),
    "olmo3": ("olmo3", {**_LLAMA_LIKE, "sliding_window": 12}),
    "mistral": ("mistral", {**_LLAMA_LIKE, "sliding_window": 12}),
    "gemma2": ("gemma2", {**_LLAMA_LIKE, "sliding_window": 12, "query_pre_attn_scalar": 8}),
    "gemma3": ("gemma3_text", {**_LLAMA_LIKE, "sliding_window": 12, "query_pre_attn_scalar": 8}),
    "gemma3_vision": (
        "gemma3",
        {"text_config": {**_LLAMA_LIKE, "sliding_window": 12, "query_pre_attn_scalar": 8},
         "vision_config": {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
                           "image_size": 28, "patch_size": 14},
         "mm_tokens_per_image": 4, "image_token_index": 2**20, "boi_token_index": 2**20, "eoi_token_index": 2**20},
    ),
    "granite": ("granite", {**_LLAMA_LIKE, "logits_scaling": 3.0}),
    "cohere": ("cohere", {**_LLAMA_LIKE, "logit_scale": 0.25}),
    "gpt_neox": ("gpt_neox", {**_LLAMA_LIKE, "rotary_pct": 0.5}),
    "phi3": ("phi3", _LLAMA_LIKE),
    "stablelm": ("stablelm", {**_LLAMA_LIKE, "partial_rotary_factor": 0.5}),  # its layers drop keyword arguments
    "gpt_oss": (  # with attention sinks
        "gpt_oss",
        {**_LLAMA_LIKE, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 12},
    ),
    "olmo_hybrid": (  # with Gated DeltaNet, whose states decay slowly here, so that a wrong state shows
        "olmo_hybrid",
        {**_LLAMA_LIKE, "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
         "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_a_log_max": 2.0},
    ),
    "lfm2": (  # with short convolutions
        "lfm2",
        {**_LLAMA_LIKE, "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    ),
    "bamba": (  # with Mamba2
        "bamba",
        {**_LLAMA_LIKE, "attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8,
         "mamba_n_groups": 2, "mamba_chunk_size": 8},
    ),
    "qwen3_moe": (
        "qwen3_moe",
        {**_LLAMA_LIKE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    ),
    "falcon": (
        "falcon",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
         "initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "mpt": (  # its biases depend on the position in the row, so it supports only padded rows
        "mpt",
        {"vocab_size": VOCABULARY, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 256,
         "initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "mamba": (  # the first version, which is unfolded
        "mamba",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4,
         "initializer_range": 0.1,  # with more, scores are so low that float32 rounds their differences by 3e-5
         "bos_token_id": 1, "eos_token_id": 2},
    ),
}  # fmt: skip


def tiny_model(
    architecture: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any
) -> PreTrainedModel:
    """A model with random weights that fits into a test, without dropout. The same seed gives the same weights."""
    return _tiny(AutoModelForCausalLM, architecture, dtype, seed, changes)


def tiny_reward_model(
    architecture: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any
) -> PreTrainedModel:
    """Like `tiny_model`, for sequence classification with one label."""
    return _tiny(AutoModelForSequenceClassification, architecture, dtype, seed, {**changes, "num_labels": 1})


def _tiny(auto: Any, architecture: str, dtype: torch.dtype, seed: int, changes: dict[str, Any]) -> PreTrainedModel:
    kind, settings = ARCHITECTURES[architecture]
    if "text_config" in settings:
        settings = {**settings, "text_config": {**settings["text_config"], **changes}}
    else:
        settings = {**settings, **changes}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: Any = auto.from_config(CONFIG_MAPPING[kind](**settings))
    disable_dropout(model)
    for parameter in model.parameters():  # as loading does: rotary frequencies keep their dtype
        parameter.data = parameter.data.to(dtype)
    model.eval()
    assert isinstance(model, PreTrainedModel)
    return model


def with_adapter(model: PreTrainedModel, kind: Kind, *, targets: Sequence[str] | None = None) -> PreTrainedModel:
    """The model with an adapter whose weights have left their initial values, so that all of them have a gradient."""
    dtype = next(model.parameters()).dtype
    add_adapter(model, NewAdapter(kind, rank=4, alpha=8.0, targets=targets), dtype=dtype, seed=0)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.data += 0.1 * noise.to(parameter)
    return model


def examples(pairs: Iterable[PairTokens]) -> list[Example]:
    """The pairs as examples."""
    return [pair.example for pair in pairs]


def random_pairs(num_pairs: int, *, seed: int = 0, longest: int = 14, vocabulary: int = VOCABULARY) -> list[PairTokens]:
    """Pairs of very different lengths."""
    rng = np.random.default_rng(seed)
    return [
        PairTokens(
            *(
                rng.integers(3, vocabulary, size=int(n))
                for n in (rng.integers(1, longest), *rng.integers(1, longest, 2))
            )
        )
        for _ in range(num_pairs)
    ]


def tree_examples(*, seed: int = 0) -> list[Example]:
    """Examples with one, two, three, five and eight answers, some with nested beginnings, some with the same prompt."""
    rng = np.random.default_rng(seed)

    def tokens(count: int) -> IntArray:
        return rng.integers(3, VOCABULARY, size=count)

    def in_a_chain(count: int, prompt: IntArray) -> Example:
        """An example that compares each answer with the next one, and the first with the last."""
        answers = tuple(tokens(int(n)) for n in rng.integers(1, 16, size=count))
        chain = [(k, k + 1) for k in range(count - 1)]
        comparisons = tuple([*chain, (0, count - 1)] if count > 2 else chain)
        return Example(prompt, answers, comparisons, tuple(float(-k // 2) for k in range(count)))  # some are ties

    def nested(prompt: IntArray) -> Example:
        """Answers that diverge at different depths: four share `trunk`, and three of these also share `branch`."""
        trunk, branch = tokens(FEWEST_SHARED + 3), tokens(FEWEST_SHARED + 1)
        deep = [np.concatenate([trunk, branch, tokens(n)]) for n in (4, 6)]
        answers = (deep[0], np.append(trunk, tokens(1)), deep[1], np.append(trunk, branch), tokens(3))
        return Example(prompt, answers, ((0, 1), (2, 1), (0, 4), (3, 4)), (0.9, 0.2, 0.7, 0.7, 0.1))

    prompt = tokens(7)
    return [
        in_a_chain(1, tokens(5)),
        in_a_chain(3, prompt),
        nested(tokens(9)),
        in_a_chain(2, prompt),
        in_a_chain(8, tokens(2)),
        nested(prompt),
        in_a_chain(2, tokens(20)),
    ]


def labelled_trees(examples: Sequence[Example]) -> list[Example]:
    """The examples with labels instead of comparisons and scores: about every third answer is bad."""
    return [
        Example(one.prompt, one.answers, (), tuple(float((k + n) % 3 > 0) for k in range(len(one.answers))))
        for n, one in enumerate(examples)
    ]


def with_context(some: Iterable[Example], *, seed: int = 0, fractions: bool = False) -> list[Example]:
    """The examples with turns of context in their answers, which end with a trained turn.

    With `fractions`, turns also have weights other than 0 and 1, and the first one may be context. Each answer has its
    own weights, even if it shares its beginning with another.
    """
    rng = np.random.default_rng(seed)

    def weights(count: int) -> FloatArray:
        borders = np.sort(rng.choice(np.arange(1, count), size=min(count - 1, int(rng.integers(0, 5))), replace=False))
        turns = np.diff([0, *borders, count])
        trained = (np.arange(len(turns)) + rng.integers(2)) % 2 == 0 if fractions else np.arange(len(turns)) % 2 == 0
        trained[-1] = True
        sizes = rng.uniform(0.1, 2.0, len(turns)) if fractions else np.ones(len(turns))
        return np.repeat(trained * sizes, turns)

    return [one._replace(weights=tuple(weights(len(answer)) for answer in one.answers)) for one in some]


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer(chat_template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per byte, which can encode any text."""
    alphabet = sorted(ByteLevel.alphabet())
    special = ["<pad>", "<|im_start|>", "<|im_end|>"]
    core = Tokenizer(BPE({token: i for i, token in enumerate(special + alphabet)}, []))
    core.pre_tokenizer = ByteLevel(add_prefix_space=False)
    core.decoder = ByteLevelDecoder()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def tiny_folder(
    folder: Path, architecture: str = "llama", *, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any
) -> Path:
    """A Hugging Face folder of a tiny model with its tokenizer."""
    tokenizer = byte_tokenizer()
    tiny_model(architecture, dtype=dtype, seed=seed, vocab_size=len(tokenizer), **changes).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
