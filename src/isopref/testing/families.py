"""Tiny models of every causal-LM architecture that transformers knows, built from configs with random weights.

A config's fields are made small by name (`SMALL`). `SETTINGS` has what a family needs in addition, or names
differently. It includes windows and chunks shorter than a test's sequences, and factors other than 1 on the logits, so
that a test fails if isopref ignores them.
"""

from dataclasses import fields
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from isopref.models.noise import disable_dropout
from isopref.testing.models import VOCABULARY

MOST_WEIGHTS = 20_000_000  # a model with more is not tiny: a part of it was not made small
FAMILIES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)

SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "emb_dim", "embedding_size", "hidden_dim", "dim_model"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads", "linear_num_value_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "linear_num_key_heads", "mamba_n_groups", "n_groups", "mamba_ngroups"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "max_target_positions"), 256),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "altup_num_inputs"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 24),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "expert_ffn_hidden_size", "encoder_ffn_dim"), 24),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "index_head_dim", "index_n_heads", "mamba_d_head"), 16),
    **dict.fromkeys(("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "index_topk"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim", "query_pre_attn_scalar"), 8),
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size", "hidden_size_per_layer_input"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "linear_num_heads", "n_mamba_heads", "rotary_dim"), 4),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size", "laurel_rank"), 8),  # several chunks in a test's sequences
    **dict.fromkeys(("encoder_layers", "n_group", "topk_group", "first_k_dense_replace", "max_window_layers"), 1),
    **dict.fromkeys(("sliding_window", "window_size", "attention_window_size"), 12),
    **dict.fromkeys(("initializer_range", "init_std"), 0.3),  # large enough that attention matters
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    "mamba_d_ssm": 64,
    "mamba_head_dim": 16,
    "zero_expert_num": 2,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_ONE_OF_EACH = {"layer_types": ["linear_attention", "full_attention"]}
_LATENT = {"num_key_value_heads": 4}  # latent attention has as many keys as queries
_DECODES = {"is_decoder": True, "pad_token_id": 0}
_VISION = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14, "depth": 1, "num_heads": 2, "out_hidden_size": 32, "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid"), _ONE_OF_EACH),
    **dict.fromkeys(("granitemoehybrid", "minimax"), _ONE_OF_EACH),
    **dict.fromkeys(("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite"), _LATENT),
    **dict.fromkeys(("longcat_flash", "youtu"), _LATENT),
    **dict.fromkeys(("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra"), _DECODES),
    **dict.fromkeys(("ernie", "megatron-bert", "rembert", "roberta", "roberta-prelayernorm"), _DECODES),
    **dict.fromkeys(("roformer", "roc_bert", "xlm-roberta", "xlm-roberta-xl"), _DECODES),
    "bailing_hybrid": {**_LATENT, **_ONE_OF_EACH},
    "bamba": {"attn_layer_indices": [1]},
    "big_bird": {**_DECODES, "attention_type": "original_full"},
    "cohere": {"logit_scale": 0.3},
    "cohere2": {"logit_scale": 0.3},
    "cohere2_moe": {"logit_scale": 0.3},
    "cohere_compass_text": {
        "logit_scale": 0.3,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
            for kind in ("sliding_attention", "full_attention")
        },
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v4": {
        "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"],
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
    },
    "dots1": {"n_shared_experts": 1},
    "falcon_h1": {"lm_head_multiplier": 0.3},
    **{kind: {"text_config": {}, "vision_config": _VISION} for kind in ("gemma3", "llama4", "qwen3_5")},
    **{kind: {"text_config": {}, "vision_config": _VISION} for kind in ("qwen3_5_moe", "qwen4_exp")},
    "mllama": {"text_config": {"cross_attention_layers": [1]}, "vision_config": _VISION},
    **{kind: {"text_config": {"pad_token_id": 0}} for kind in ("gemma4_unified", "emu3")},
    "gemma4": {"text_config": {"pad_token_id": 0}, "vision_config": _VISION},
    "glm_moe_dsa": {**_LATENT, "indexer_types": ["full", "shared"]},
    "hy_v4": {"indexer_types": ["full", "shared"]},
    "fuyu": {"text_config": {"model_type": "persimmon"}},
    "got_ocr2": {
        "text_config": {"model_type": "qwen2"},
        "vision_config": {
            **_VISION,
            "image_size": 1024,
            "patch_size": 16,
            "output_channels": 8,
            "global_attn_indexes": [0],
            "mlp_dim": 16,
        },
    },
    "moss_transcribe_diarize": {"text_config": {"model_type": "qwen3"}},
    "gemma3n_text": {"layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granite": {"logits_scaling": 3.0},
    "granitemoe": {"logits_scaling": 3.0},
    "hyperclovax": {"logits_scaling": 0.3},
    "inkling_text": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 8,
        "sliding_window_size": 12,
        "d_rel": 4,
        "rel_extent": 64,
        "logits_mup_width_multiplier": 3.0,
        "unpadded_vocab_size": 91,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {**_LATENT, **_ONE_OF_EACH},
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "llama4_text": {
        "attention_chunk_size": 6,
        "floor_scale": 4,
        "intermediate_size_mlp": 48,
        "layer_types": ["chunked_attention", "full_attention"],
        "no_rope_layers": [1, 0],
    },
    "longcat_flash": {**_LATENT, "num_layers": 1, "moe_topk": 2},
    "mamba2": {"head_dim": 16},
    "minicpm3": {**_LATENT, "dim_model_base": 16},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "index_block_size": 4,
        "index_topk_blocks": 2,
        "index_n_heads": 2,
    },
    "modernbert-decoder": {"pad_token_id": 0},
    "nemotron_h": {"layers_block_type": ["linear_attention", "full_attention", "mlp", "moe"]},
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", "indexed_attention"],
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "recurrent_gemma": {"logits_soft_cap": 3.0, "lru_width": 32, "num_hidden_layers": 3},
    "reformer": {
        "is_decoder": True,
        "attn_layers": ["local", "lsh"],
        "axial_pos_shape": [16, 16],
        "axial_pos_embds_dim": [16, 16],
        "attention_head_size": 8,
        "feed_forward_size": 48,
        "num_buckets": 2,
    },
    "rembert": {**_DECODES, "input_embedding_size": 32, "output_embedding_size": 32},
    "roc_bert": {
        **_DECODES,
        "pronunciation_vocab_size": 16,
        "shape_vocab_size": 16,
        "pronunciation_embed_dim": 8,
        "shape_embed_dim": 8,
    },
    "xmod": {**_DECODES, "default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "n_mamba_heads": 2,
        "attention_head_dim": 16,
        "num_key_value_heads": 4,
    },
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"], "num_key_value_heads": 4, "n_mamba_heads": 4},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}


def tiny_config(kind: str) -> Any:
    """A small config of a family."""
    settings = dict(SETTINGS.get(kind, {}))
    config = CONFIG_MAPPING[kind]
    if "text_config" in settings:
        named = settings["text_config"].get("model_type")
        text = CONFIG_MAPPING[named] if named else config.sub_configs["text_config"]
        settings["text_config"] = {**_small(text), **SETTINGS.get(text.model_type, {}), **settings["text_config"]}
    return config(**{**_small(config), **settings})


def _small(config: Any) -> dict[str, Any]:
    known = {field.name for field in fields(config)}
    return {name: value for name, value in SMALL.items() if name in known}


class NotTinyError(Exception):
    """A family that was not built small."""


def tiny_family(kind: str, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """A model of a family with random weights, without dropout. Raises NotTinyError."""
    try:
        config = tiny_config(kind)
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
    except Exception as error:  # a config that the general settings do not fit
        raise NotTinyError(f"{type(error).__name__}: {str(error).strip().splitlines()[0]}") from error
    if size > MOST_WEIGHTS:
        raise NotTinyError(f"{size:,} weights with the settings used here, of which not all were made small")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: Any = AutoModelForCausalLM.from_config(config)
        _vary(model)
    disable_dropout(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.eval()
    assert isinstance(model, PreTrainedModel)
    return model


@torch.no_grad()
def _vary(model: nn.Module) -> None:
    """Add noise to biases, scales and all other weights that start as zeros or ones: in those, a mistake would hide."""
    for parameter in model.parameters():
        if parameter.numel() > 1 and bool((parameter == parameter.flatten()[0]).all()):
            parameter.add_(0.3 * torch.randn_like(parameter))
