"""Converts models between Hugging Face and OLMo-core, and reads and writes OLMo-core checkpoints.

OLMo-core converts weights but not configs. The mapping here covers the architectures that convert exactly, and a
converted model is used only after its logits have been shown to match the original's.
"""

import copy
import importlib
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from olmo_core.config import Config, DType
from olmo_core.distributed.checkpoint import save_model_and_optim_state
from olmo_core.nn.attention import AttentionBackendName, AttentionConfig, SlidingWindowAttentionConfig
from olmo_core.nn.feed_forward import ActivationFunction, FeedForwardConfig
from olmo_core.nn.hf.config import get_hf_config
from olmo_core.nn.hf.convert import convert_state_from_hf, convert_state_to_hf
from olmo_core.nn.layer_norm import LayerNormConfig, LayerNormType
from olmo_core.nn.lm_head import LMHeadConfig
from olmo_core.nn.rope import (
    PIRoPEScalingConfig,
    RoPEConfig,
    RoPEScalingConfig,
    StepwiseRoPEScalingConfig,
    YaRNRoPEScalingConfig,
)
from olmo_core.nn.transformer import TransformerBlockConfig, TransformerBlockType, TransformerConfig
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from isopref.errors import ModelError
from isopref.models.finite import check_finite
from isopref.models.hf import WEIGHTS, load_tokenizer
from isopref.models.native import NativeModel, drop_weights
from isopref.models.noise import disable_dropout
from isopref.models.plain import NotPlainError, PlainPlanner, PlainReader
from isopref.types import Segments

BLOCKS = {
    "llama": TransformerBlockType.default,
    "qwen3": TransformerBlockType.default,
    "olmo2": TransformerBlockType.reordered_norm,
    "olmo3": TransformerBlockType.reordered_norm,
    "gemma3_text": TransformerBlockType.peri_norm,
}
# Where a norm multiplies by its weight: before or after rounding to the input's dtype.
NORMS = {"llama": LayerNormType.qwen_rms, "qwen3": LayerNormType.qwen_rms}
ACTIVATIONS = {"silu": ActivationFunction.silu, "gelu_pytorch_tanh": ActivationFunction.gelu_tanh}

EXACT = (torch.float32, torch.float64)
ROPE_KEYS = (
    "rope_type",
    "type",
    "rope_theta",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
)

# How much the logits of two correct computations may differ, relative to their norm.
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}
PROOF_TOKENS = 80
HF_CONFIG = "hf_config"  # in a checkpoint written by isopref: what OLMo-core's own config cannot express
THIN_WORDS = 128
FAR = 32768  # maximum number of positions compared


def from_hf(model: PreTrainedModel, *, setting: str = "model.path") -> NativeModel:
    """The model with OLMo-core's modules; `model` loses its weights. Raises ModelError if the conversion is inexact."""
    disable_dropout(model)
    config = transformer_config(model, setting)
    if model.dtype not in EXACT:  # in half precision rounding would hide a small difference
        thin = _thin(model)
        _prove(_built(transformer_config(thin, setting), _to_native(thin, thin.state_dict(), setting), thin), setting)
    state = model.state_dict()
    native = _built(config, _to_native(model, state, setting), model)
    _check_round_trip(native, state, setting)
    _prove(native, setting)
    drop_weights(model)
    return native


def read_checkpoint(
    path: str, *, dtype: torch.dtype, trust_remote_code: bool = False, setting: str = "model.path"
) -> PreTrainedModel:
    """The Hugging Face model of an OLMo-core checkpoint, verified to give the same logits.

    Raises ModelError if there is no Hugging Face form. OLMo 2, OLMo 3 and checkpoints written by isopref have one.
    """
    folder = Path(path).expanduser()
    with _named_faults(path, setting):
        config, hf_config = _read_configs(folder)
        wide = torch.promote_types(dtype, torch.float32)
        names = config.build(init_device="meta").state_dict()
        state: dict[str, Any] = {"model": {name: torch.empty(one.shape, dtype=wide) for name, one in names.items()}}
        reader = PlainReader(folder / WEIGHTS)
        reader.read_metadata()  # its refusal is clear; `load` would wrap it in an error of its own
        load(state, storage_reader=reader, planner=PlainPlanner(), no_dist=True)
        model: Any = AutoModelForCausalLM.from_config(hf_config, dtype=wide)
        model.load_state_dict(convert_state_to_hf(hf_config, state["model"]))
    tokenizer = load_tokenizer(path, trust_remote_code=trust_remote_code, setting=setting)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        for of_model in (model.config, model.generation_config):
            setattr(of_model, name, getattr(tokenizer, name))
    check_finite(model, f"{setting}: {path}")
    _prove(_built(config, state["model"], model.eval()), setting)
    model.to(dtype)
    assert isinstance(model, PreTrainedModel)
    return model


def checkpoint_config(path: str, *, setting: str = "model.path") -> PreTrainedConfig:
    """The config of a checkpoint's Hugging Face form. Raises ModelError."""
    with _named_faults(path, setting):
        return _read_configs(Path(path).expanduser())[1]


def empty_checkpoint(path: str, *, setting: str = "model.path") -> PreTrainedModel:
    """The checkpoint's Hugging Face model without weights, on the meta device. Raises ModelError."""
    config = checkpoint_config(path, setting=setting)
    with _named_faults(path, setting), torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model


@contextmanager
def _named_faults(path: str, setting: str) -> Iterator[None]:
    """Turns OLMo-core's many kinds of errors on unexpected input into a ModelError."""
    try:
        yield
    except (Exception, CheckpointException) as error:
        of_rank = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
        reason = f"{type(of_rank).__name__}: {' '.join(str(of_rank).split())[:300]}"
        raise ModelError(
            f"{setting}: cannot load the OLMo-core checkpoint {path} ({reason}). Only OLMo 2, OLMo 3 and checkpoints "
            "written by isopref can be loaded; convert others to a Hugging Face folder and give that."
        ) from error


def _read_configs(folder: Path) -> tuple[TransformerConfig, PreTrainedConfig]:
    """A checkpoint's config, and the config of its Hugging Face form."""
    content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    _check_classes(content["model"])
    config = TransformerConfig.from_dict(content["model"])
    config.apply(_use_torch_attention)
    if HF_CONFIG in content:
        if content[HF_CONFIG]["model_type"] not in BLOCKS:
            raise ValueError(f"{HF_CONFIG} has the model_type {content[HF_CONFIG]['model_type']}")
        return config, AutoConfig.for_model(**content[HF_CONFIG])
    hf_config = get_hf_config(config.build(init_device="meta"))
    hf_config.max_position_embeddings = _context(content)
    return config, hf_config


def _check_classes(content: Any) -> None:
    """Raise NotPlainError for a class that is not a config: OLMo-core would call whatever the file names."""
    if isinstance(content, dict):
        name = content.get(Config.CLASS_NAME_FIELD)
        if name is not None:
            module, _, last = str(name).rpartition(".")
            of_olmo_core = module.split(".")[0] == "olmo_core"
            found = getattr(importlib.import_module(module), last, None) if of_olmo_core else None
            if not (isinstance(found, type) and issubclass(found, Config)):
                raise NotPlainError(f"config.json names {name}, which is not a config class of OLMo-core")
        for value in content.values():
            _check_classes(value)
    elif isinstance(content, list):
        for value in content:
            _check_classes(value)


def write_checkpoint(
    model: NativeModel,
    tokenizer: Any,
    folder: Path,
    *,
    is_first: bool = True,
    barrier: Callable[[], None] = lambda: None,
) -> None:
    """Write an OLMo-core checkpoint that `read_checkpoint` reads, and whose `model_and_optim` OLMo-core reads.

    All ranks call this together. Written to a temporary folder and renamed, so a folder of that name is complete.
    """
    partial = folder.with_name(f".{folder.name}.partial")
    if is_first:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        context = model.config.get_text_config().max_position_embeddings
        content = {
            "model": model.native_config.as_config_dict(),
            "dataset": {"sequence_length": context},
            HF_CONFIG: model.config.to_dict(),
        }
        (partial / "config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        tokenizer.save_pretrained(partial)
    barrier()
    save_model_and_optim_state(partial / WEIGHTS, model.transformer)
    barrier()
    if is_first:
        shutil.rmtree(folder, ignore_errors=True)  # left by a run that was killed before it wrote the Hugging Face form
        partial.rename(folder)


def _use_torch_attention(config: Any) -> None:
    """Use torch's attention, so that OLMo-core's kernels need not be installed: packed rows use isopref's own."""
    if isinstance(config, AttentionConfig):
        config.backend, config.use_flash = AttentionBackendName.torch, None


def _context(content: dict[str, Any]) -> int:
    """The longest sequence a checkpoint was trained on, from its config.json."""
    for section, name in (("train_module", "max_sequence_length"), ("dataset", "sequence_length")):
        length = (content.get(section) or {}).get(name)
        if length is not None:
            return int(length)
    raise ValueError("config.json has neither train_module.max_sequence_length nor dataset.sequence_length")


def transformer_config(model: PreTrainedModel, setting: str = "model.path") -> TransformerConfig:
    """The OLMo-core config of a Hugging Face model. Raises ModelError if there is none."""
    config: Any = model.config
    if config.model_type not in BLOCKS:
        raise _refusal(model, f"only {', '.join(BLOCKS)} convert exactly, but this is {config.model_type}", setting)
    if _activation(config) not in ACTIVATIONS:
        raise _refusal(model, f"OLMo-core has no {_activation(config)} activation", setting)
    head_width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if getattr(config, "query_pre_attn_scalar", head_width) != head_width:
        raise _refusal(model, "OLMo-core's config has no scale for queries (query_pre_attn_scalar)", setting)
    kinds = _kinds(config)
    gemma = config.model_type == "gemma3_text"
    norm = LayerNormConfig(
        name=NORMS.get(config.model_type, LayerNormType.rms), eps=config.rms_norm_eps, bias=False, dtype=DType.float32
    )
    return TransformerConfig(
        d_model=config.hidden_size,
        vocab_size=config.vocab_size,
        n_layers=config.num_hidden_layers,
        block={kind: _block(model, kind, norm, head_width, setting) for kind in sorted(set(kinds))},
        block_pattern=list(kinds),
        lm_head=LMHeadConfig(layer_norm=norm, bias=False, dtype=DType.float32),
        embed_scale=config.hidden_size**0.5 if gemma else None,
        tie_word_embeddings=bool(config.tie_word_embeddings),
    )


def _block(
    model: PreTrainedModel, kind: str, norm: LayerNormConfig, head_width: int, setting: str
) -> TransformerBlockConfig:
    config: Any = model.config
    window = None
    if kind == "sliding_attention":
        window = SlidingWindowAttentionConfig(
            pattern=[config.sliding_window],
            force_full_attention_on_first_layer=False,
            force_full_attention_on_last_layer=False,
        )
    return TransformerBlockConfig(
        name=BLOCKS[config.model_type],
        sequence_mixer=AttentionConfig(
            n_heads=config.num_attention_heads,
            n_kv_heads=config.num_key_value_heads,
            head_dim=head_width,
            bias=False,
            rope=_rope(model, kind, setting),
            qk_norm=None if config.model_type == "llama" else norm,
            use_head_qk_norm=config.model_type in ("qwen3", "gemma3_text"),
            sliding_window=window,
            backend=AttentionBackendName.torch,
        ),
        feed_forward=FeedForwardConfig(
            hidden_size=config.intermediate_size, bias=False, activation=ACTIVATIONS[_activation(config)]
        ),
        layer_norm=norm,
    )


def _rope(model: PreTrainedModel, kind: str, setting: str) -> RoPEConfig:
    config: Any = model.config
    rope = config.rope_parameters
    rope = rope.get(kind, rope)  # some models have separate rotary angles for each kind of layer
    name = rope.get("rope_type", "default")
    extra = [key for key, value in rope.items() if key not in ROPE_KEYS and value is not None]
    if extra:
        raise _refusal(model, f"OLMo-core's rotary angles have no {extra[0]}", setting)
    factor, before = rope.get("factor"), rope.get("original_max_position_embeddings")
    scaling: RoPEScalingConfig | None = None
    if name == "linear":
        scaling = PIRoPEScalingConfig(factor=factor)
    elif name == "llama3":
        scaling = StepwiseRoPEScalingConfig(
            factor=factor,
            low_freq_proportion=1 - 1 / rope["low_freq_factor"],
            high_freq_proportion=1 / rope["high_freq_factor"],
            old_context_len=before,
        )
    elif name == "yarn":
        scaling = YaRNRoPEScalingConfig(
            factor=factor,
            beta_fast=rope.get("beta_fast") or 32,
            beta_slow=rope.get("beta_slow") or 1,
            old_context_len=before,
        )
    elif name != "default":
        raise _refusal(model, f"OLMo-core has no rotary angles of type {name}", setting)
    return RoPEConfig(theta=rope["rope_theta"], scaling=scaling)


def _built(config: TransformerConfig, state: dict[str, Tensor], twin: PreTrainedModel) -> NativeModel:
    transformer = config.build(init_device="meta")
    transformer.load_state_dict(state, assign=True)
    if transformer.tie_word_embeddings and transformer.embeddings is not None:
        transformer.lm_head.w_out.weight = transformer.embeddings.weight
    return NativeModel(transformer, config, twin)


def _to_native(model: PreTrainedModel, state: dict[str, Tensor], setting: str) -> dict[str, Tensor]:
    try:
        native: dict[str, Tensor] = convert_state_from_hf(model.config, state, model_type=model.config.model_type)
    except RuntimeError as error:  # a weight without a counterpart, such as a bias
        raise _refusal(model, " ".join(str(error).split())[:200], setting) from error
    return native


def _thin(model: PreTrainedModel) -> PreTrainedModel:
    """A random float32 model of the same config, with one layer of each kind and a small vocabulary."""
    config: Any = copy.deepcopy(model.config)
    kinds = sorted(set(_kinds(config)))
    config.num_hidden_layers, config.vocab_size = len(kinds), THIN_WORDS
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = kinds
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        thin: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    disable_dropout(thin.eval())
    return thin


def _check_round_trip(native: NativeModel, state: dict[str, Tensor], setting: str) -> None:
    """Raise ModelError if weights would not survive a round trip: adding 1 to Gemma's norms rounds in bfloat16."""
    back = convert_state_to_hf(native.config, dict(native.transformer.state_dict()))
    for name, tensor in back.items():
        off = float((tensor.float() - state[name].float()).abs().max())
        if off > 1e-6:
            reason = f"{name} changes by {off:.2g} in a round trip; model.dtype: float32 is exact"
            raise _refusal(native.twin, reason, setting)


@torch.no_grad()
def _prove(native: NativeModel, setting: str) -> None:
    """Raise ModelError unless a model and its twin, which still has its weights, have the same windows and logits.

    Logits are compared at adjacent positions and at positions far apart, which reveal differently scaled rotary angles;
    with a mask, transformers treats the latter as one sequence. The sequences are too short to reveal a window.
    """
    model, config = native.twin, native.config.get_text_config()
    windows = [config.sliding_window if kind == "sliding_attention" else None for kind in _kinds(config)]
    if native.windows != windows:
        raise _refusal(model, f"its layers would have windows of {native.windows}, not {windows}", setting)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(config.vocab_size, (1, PROOF_TOKENS), generator=generator)
    far = torch.arange(PROOF_TOKENS)[None] * max(1, min(FAR, config.max_position_embeddings) // PROOF_TOKENS)
    head = native.get_output_embeddings()
    for theirs, ours in (({}, {}), ({"position_ids": far}, {"position_ids": far, "segments": _one_sequence(far)})):
        expected = model(input_ids=ids, attention_mask=torch.ones_like(ids), **theirs).logits
        found = head(native(input_ids=ids, **ours).last_hidden_state)
        off = float((found - expected).float().norm() / expected.float().norm())
        if not off <= TOLERANCE[expected.dtype]:
            raise _refusal(model, f"its logits would be off by {off:.2g} of their norm", setting)


def _kinds(config: Any) -> list[str]:
    """The attention type of each layer, in transformers' terms."""
    return list(getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers)


def _one_sequence(position_ids: Tensor) -> Segments:
    whole = torch.tensor([0, position_ids.shape[1]], dtype=torch.int32)
    bounds = (0, position_ids.shape[1])
    return Segments(whole, whole, None, None, bounds, bounds, follows=(-1,), longest=int(position_ids.max()) + 1)


def _activation(config: Any) -> str:
    return str(getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", None))


def _refusal(model: PreTrainedModel, reason: str, setting: str) -> ModelError:
    return ModelError(
        f"{setting}: {type(model).__name__} cannot be trained with model.native: true, because OLMo-core would not "
        f"compute the same: {reason}. Set model.native: false."
    )
