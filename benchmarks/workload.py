"""What the benchmarks train on: model shapes with random weights, and pairs of real lengths with random tokens."""

import importlib.metadata
import itertools
import platform
from datetime import date
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from isopref.data.schedule import epoch_order
from isopref.examples import Example
from isopref.types import IntArray

Item = TypeVar("Item")

LENGTHS = Path(__file__).parent / "lengths"
EVEN = (512, 256, 256)  # prompt, chosen and rejected of every pair of "even"
LONGEST = 1024  # prompt, chosen and rejected are each clipped to this
TURNS, SHARED, LONGEST_RUN = 3, 0.9, 3500  # for "agents": earlier turns, shared part of a trajectory, its most tokens

_COMMON: dict[str, Any] = {"max_position_embeddings": 4096, "rope_theta": 500000.0}
SHAPES: dict[str, dict[str, Any]] = {  # of Llamas, unless they name another `model_type`
    "1b": {
        **_COMMON, "num_hidden_layers": 16, "hidden_size": 2048, "intermediate_size": 8192,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256,
        "tie_word_embeddings": True,
    },
    "3b": {  # to check `isopref plan`, which was not fitted to this shape
        **_COMMON, "num_hidden_layers": 28, "hidden_size": 3072, "intermediate_size": 8192,
        "num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
        "tie_word_embeddings": True,
    },
    "8b": {
        **_COMMON, "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
        "tie_word_embeddings": False,
    },
    "olmoe": {  # of OLMoE-1B-7B: 64 experts, of which 8 compute a token
        "model_type": "olmoe", "max_position_embeddings": 4096, "num_hidden_layers": 16, "hidden_size": 2048,
        "intermediate_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 50304,
        "num_experts": 64, "num_experts_per_tok": 8, "tie_word_embeddings": False,
    },
    "135m": {
        **_COMMON, "num_hidden_layers": 30, "hidden_size": 576, "intermediate_size": 1536,
        "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152,
        "tie_word_embeddings": True,
    },
    "tiny": {
        **_COMMON, "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512,
        "tie_word_embeddings": True,
    },
    "tiny-olmoe": {
        "model_type": "olmoe", "max_position_embeddings": 4096, "num_hidden_layers": 2, "hidden_size": 64,
        "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 512,
        "num_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": False,
    },
}  # fmt: skip
TINY = {"olmoe": "tiny-olmoe"}  # shapes that replace others on a CPU; all others are replaced by "tiny"


def model(shape: str, *, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """A model of this shape with random weights, built on the device."""
    return causal_lm({"model_type": "llama", **SHAPES[shape]}, dtype=dtype, device=device)


def causal_lm(config: dict[str, Any], *, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """A model with random weights from the fields of a config, which include its `model_type`."""
    return made(AutoModelForCausalLM.from_config, AutoConfig.for_model(**config), dtype=dtype, device=device)


def reward_model(shape: str, *, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """A model of this shape with random weights and a head that gives one score."""
    config = LlamaConfig(**{**SHAPES[shape], "num_labels": 1})
    return made(LlamaForSequenceClassification, config, dtype=dtype, device=device)


def made(kind: Any, config: PreTrainedConfig, *, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """The model that `kind` builds from a config, with random weights, on the device."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            found: PreTrainedModel = kind(config)
            return found
    finally:
        torch.set_default_dtype(before)


def lengths(name: str, count: int, *, seed: int = 0) -> IntArray:
    """Lengths of `count` pairs of a real data set ("chat" or "hh"), which is repeated if it is too short: count, 3.

    In "even", all pairs have the same length. In "agents", a pair is two runs of an agent that diverge late.
    """
    if name == "even":
        return np.tile(np.array(EVEN), (count, 1))
    if name == "agents":
        return _late_divergence(count, seed)
    every = np.load(LENGTHS / f"{name}_lengths.npy").astype(np.int64)
    drawn = every[np.resize(np.random.RandomState(seed).permutation(len(every)), count)]
    clipped: IntArray = np.clip(drawn, 1, LONGEST)
    return clipped


def _late_divergence(count: int, seed: int) -> IntArray:
    """Trajectories that share their first 90%: several chat turns, then two answers of chat's proportions."""
    turns_3 = lengths("chat", TURNS * count, seed=seed).reshape(count, TURNS, 3)
    shared = np.minimum(turns_3[:, :, :2].sum((1, 2)), LONGEST_RUN)
    answers_2 = turns_3[:, 0, 1:]
    scale = shared * (1 - SHARED) / SHARED / answers_2.mean(1)
    apart_2 = np.maximum(1, np.round(answers_2 * scale[:, None])).astype(np.int64)
    return np.concatenate([shared[:, None], apart_2], axis=1)


def examples(name: str, count: int, *, answers: int, labelled: bool = False, vocabulary: int) -> list[Example]:
    """Examples with this many answers and the lengths of a real data set. Single answers are good and bad in turn.

    Two answers make a pair. Of more answers, all pairs are compared, and their lengths come from several pairs.
    """
    random = np.random.RandomState(1)
    of_pairs = lengths(name, count * -(-answers // 2)).reshape(count, -1, 3)
    found = []
    for number, pairs_3 in enumerate(of_pairs):
        counts = [pairs_3[0, 0], *pairs_3[:, 1:].ravel()[:answers]]
        prompt, *tokens = (random.randint(3, vocabulary, size) for size in counts)
        comparisons = () if labelled else tuple(itertools.combinations(range(answers), 2))
        scores = (float(number % 2 == 0),) if answers == 1 else tuple(float(answers - 1 - n) for n in range(answers))
        found.append(Example(prompt, tuple(tokens), comparisons, scores))
    return found


def in_order(every: list[Item]) -> list[Item]:
    """The pairs in the order of isopref's first epoch (seed 0), so that a peer gets the same global batches."""
    return [every[i] for i in epoch_order(len(every), seed=0, epoch=1)]


def versions() -> dict[str, str]:
    """Date, hardware and versions, without which a figure means nothing."""
    cuda = torch.cuda.is_available()
    wanted = (
        "torch",
        "triton",
        "transformers",
        "ai2-olmo-core",
        "trl",
        "liger-kernel",
        "flash-attn-4",
        "flash-linear-attention",
        "peft",
        "torchao",
    )
    installed = {one.name.lower(): one.version for one in importlib.metadata.distributions()}
    return {
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name() if cuda else f"{torch.get_num_threads()} CPU threads",
        "cpu": _cpu(),
        "python": platform.python_version(),
        **{name: installed[name] for name in wanted if name in installed},
    }


def _cpu() -> str:
    """The CPU's name, if Linux reports it. It matters for a trainer that waits for its host."""
    about = Path("/proc/cpuinfo")
    lines = about.read_text().splitlines() if about.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
