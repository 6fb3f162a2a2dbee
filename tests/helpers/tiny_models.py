"""Small random checkpoints of every supported family, written as real ones are."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
)

from speq.config import SamplingParams
from speq.models import families
from speq.version import is_before, transformers_version
from tests.helpers.picture_files import put_beside_pictures
from tests.reference import sampling_order
from tests.reference.noise import noise

VOCAB = 264
EOS = 256

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": EOS,
    "eos_token_id": EOS,
    "pad_token_id": EOS,
    # Large enough that logits are far apart and ties do not decide.
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
}
FAMILY_OPTIONS: dict[str, dict[str, Any]] = {
    "qwen2_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 64,
        "intermediate_size": 96,
        "mlp_only_layers": [1],
    },
    "qwen3_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "intermediate_size": 96,
        "head_dim": 32,
        "norm_topk_prob": True,
    },
    "qwen3_next": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
        "intermediate_size": 96,
        "head_dim": 32,
        "partial_rotary_factor": 0.25,
        "layer_types": ["full_attention", "linear_attention", "linear_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
        "linear_conv_kernel_dim": 4,
    },
    "qwen3_5_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
        "head_dim": 32,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
        "layer_types": ["full_attention", "linear_attention", "linear_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
        "linear_conv_kernel_dim": 4,
    },
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 4, "intermediate_size": 32},
    "mixtral": {
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "intermediate_size": 96,
        "sliding_window": 32,
    },
    "phimoe": {
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "intermediate_size": 80,
        "attention_bias": True,
        "lm_head_bias": True,
    },
    "deepseek_v2": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_shared_experts": 1,
        "moe_intermediate_size": 32,
        "intermediate_size": 96,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 24,
        "q_lora_rank": None,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "num_key_value_heads": 4,
        "topk_method": "greedy",
        "n_group": None,
        "topk_group": None,
        "routed_scaling_factor": 1.0,
    },
    "glm4_moe": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_shared_experts": 1,
        "moe_intermediate_size": 32,
        "intermediate_size": 96,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        "routed_scaling_factor": 1.5,
        "head_dim": 32,
        "use_qk_norm": True,
        "attention_bias": True,
    },
    "glm4_moe_lite": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 32,
        "intermediate_size": 96,
        "kv_lora_rank": 24,
        "q_lora_rank": 40,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 24,
        "num_key_value_heads": 4,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.8,
    },
    "deepseek_v3": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_shared_experts": 1,
        "moe_intermediate_size": 32,
        "intermediate_size": 96,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 24,
        "q_lora_rank": 40,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "num_key_value_heads": 4,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
    },
    "dots1": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_shared_experts": 2,
        "moe_intermediate_size": 32,
        "intermediate_size": 96,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "sliding_window": 24,
        "max_window_layers": 2,
    },
    "solar_open": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "head_dim": 32,
    },
    "minimax_m2": {
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "intermediate_size": 32,
        "head_dim": 32,
        "rotary_dim": 16,
    },
    "ernie4_5_moe": {
        "moe_num_experts": 8,
        "moe_k": 3,
        "moe_num_shared_experts": 2,
        "moe_intermediate_size": 32,
        "intermediate_size": 96,
    },
    "hunyuan_v1_moe": {
        "num_experts": 8,
        "moe_topk": [3, 3, 3],
        "intermediate_size": 48,
        "head_dim": 32,
        "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0},
    },
    "gpt_oss": {
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "intermediate_size": 96,
        "head_dim": 32,
        "sliding_window": 24,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 128,
        },
    },
}
FAMILY_OPTIONS["mellum"] = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "head_dim": 32,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}
FAMILY_OPTIONS["hy_v3"] = {
    "num_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "num_shared_experts": 1,
    "moe_intermediate_size": 32,
    "intermediate_size": 96,
    "head_dim": 32,
    "router_scaling_factor": 2.5,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
}
FAMILY_OPTIONS["exaone_moe"] = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "num_shared_experts": 1,
    "moe_intermediate_size": 32,
    "intermediate_size": 96,
    "head_dim": 32,
    "n_group": 2,
    "topk_group": 1,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
}
FAMILY_OPTIONS["laguna"] = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "intermediate_size": 96,
    "head_dim": 32,
    "num_attention_heads_per_layer": [4, 6, 4],
    "sliding_window": 24,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    "moe_routed_scaling_factor": 2.5,
}
FAMILY_OPTIONS["afmoe"] = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "num_shared_experts": 1,
    "num_dense_layers": 1,
    "moe_intermediate_size": 32,
    "intermediate_size": 96,
    "head_dim": 32,
    "route_scale": 2.5,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "mup_enabled": True,
}
FAMILY_OPTIONS["gemma4"] = {
    "num_experts": 8,
    "top_k_experts": 3,
    "enable_moe_block": True,
    "moe_intermediate_size": 32,
    "intermediate_size": 96,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 24,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
}
FAMILY_OPTIONS["lfm2_moe"] = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "intermediate_size": 96,
    "num_dense_layers": 1,
    "layer_types": ["conv", "conv", "full_attention"],
    "conv_L_cache": 3,
}
FAMILY_OPTIONS["granitemoe"] = {
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "intermediate_size": 32,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.125,
    "residual_multiplier": 0.7,
    "logits_scaling": 3.0,
}
FAMILY_OPTIONS["granitemoehybrid"] = {
    **FAMILY_OPTIONS["granitemoe"],
    "tie_word_embeddings": True,
    "shared_intermediate_size": 48,
    "layer_types": ["mamba", "mamba", "attention"],
    "mamba_n_heads": 4,
    "mamba_n_groups": 2,
    "mamba_d_head": 32,
    "mamba_d_state": 24,
    "mamba_chunk_size": 16,
}
FAMILY_OPTIONS["nemotron_h"] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48,
    "intermediate_size": 96,
    "head_dim": 16,
    "layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "mlp"],
    "mamba_num_heads": 4,
    "n_groups": 2,
    "mamba_head_dim": 32,
    "ssm_state_size": 24,
    "chunk_size": 16,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
}
FAMILY_OPTIONS["kimi_linear"] = {
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "intermediate_size": 96,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "linear_head_dim": 16,
    "linear_num_heads": 4,
}
FAMILY_OPTIONS["bailing_hybrid"] = {
    **{
        name: value
        for name, value in FAMILY_OPTIONS["kimi_linear"].items()
        if not name.startswith("linear_")
    },
    "head_dim": 16,
    "num_nextn_predict_layers": 0,
}
FAMILY_OPTIONS["flex_olmo"] = FAMILY_OPTIONS["olmoe"]
FAMILY_OPTIONS["sarvam_mla"] = FAMILY_OPTIONS["deepseek_v3"] | {"q_lora_rank": None}
FAMILY_OPTIONS["sarvam_moe"] = {
    **{name: value for name, value in FAMILY_OPTIONS["glm4_moe"].items() if name != "head_dim"},
    "head_dim": 16,
}
FAMILY_OPTIONS["mimo_v2_flash"] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "intermediate_size": 96,
    "num_key_value_heads": 1,
    "head_dim": 24,
    "v_head_dim": 16,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "sliding_window": 24,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
}
FAMILY_OPTIONS["mistral4"] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "intermediate_size": 96,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 24,
    "q_lora_rank": 40,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    # Queries are multiplied from position 16 on.
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 32.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.5,
    },
}
FAMILY_OPTIONS["kimi_k25"] = {**FAMILY_OPTIONS["deepseek_v3"], "n_group": 1, "topk_group": 1}
FAMILY_OPTIONS["deepseek_v32"] = {
    **FAMILY_OPTIONS["deepseek_v3"],
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 16,
}
FAMILY_OPTIONS["glm_moe_dsa"] = {
    **FAMILY_OPTIONS["deepseek_v32"],
    "indexer_types": ["full", "shared", "full"],
}
FAMILY_OPTIONS["glm5_next"] = {
    **{
        name: value
        for name, value in FAMILY_OPTIONS["deepseek_v32"].items()
        if name not in ("first_k_dense_replace", "qk_rope_head_dim")
    },
    "layer_types": ["linear_attention", "indexed_attention", "indexed_attention"],
    "indexer_types": ["full", "full", "shared"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "index_kpool": 4,
    "swiglu_limit": 1.5,
}
FAMILY_OPTIONS["qwen3_vl_moe"] = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "intermediate_size": 96,
    "mlp_only_layers": [1],
    "head_dim": 32,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [6, 5, 5],
        "mrope_interleaved": True,
    },
}
FAMILY_OPTIONS["glm4v_moe"] = {
    **{name: value for name, value in FAMILY_OPTIONS["glm4_moe"].items() if name != "use_qk_norm"},
    "head_dim": 16,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
    },
}
FAMILY_OPTIONS["minimax_m3_vl"] = {
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "intermediate_size": 32,
    "dense_intermediate_size": 96,
    "shared_intermediate_size": 48,
    "head_dim": 32,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
    },
    "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_block_size": 8,
    "index_topk_blocks": 3,
}
FAMILY_OPTIONS["qwen4_exp"] = {
    **{
        name: value
        for name, value in FAMILY_OPTIONS["qwen3_5_moe"].items()
        if name != "layer_types"
    },
    "layer_types": ["indexed_attention", "linear_attention", "linear_attention"],
    "hc_count": 2,
    "hc_lowrank": 16,
    "ple_layer_ids": [2],
    "ple_embed_dim": 48,
    "heads_per_ngram": 3,
    "ngram_vocab_size_base": 60,
    "make_ngram_vocab_size_divisible_by": 8,
    "split_ngram_parts": 5,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
    "output_gate_type": "sigmoid",
}
FAMILY_OPTIONS["step3p7"] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "share_expert_dim": 48,
    "intermediate_size": 96,
    "head_dim": 32,
    "num_sliding_attention_heads": 6,
    "sliding_window": 24,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "moe_router_scaling_factor": 2.5,
    "swiglu_limits": [0.0, 0.0, 0.05],
    "swiglu_limits_shared": [0.0, 0.05, 0.1],
    "rope_theta": [50000.0, 10000.0, 10000.0],
    "partial_rotary_factors": [0.5, 1.0, 1.0],
}
FAMILY_OPTIONS["deepseek_v4"] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 24,
    "o_groups": 2,
    "o_lora_rank": 16,
    "layer_types": [
        "compressed_sparse_attention",
        "heavily_compressed_attention",
        "sliding_attention",
    ],
    "compress_rate_csa": 4,
    "compress_rate_hca": 12,
    "num_hash_layers": 1,
    "sliding_window": 8,
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 4,
    "hc_mult": 2,
    "swiglu_limit": 1.0,
}
# Of models of pictures and text, the part that is of pictures.
VISION: dict[str, dict[str, Any]] = {
    "gemma4": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "patch_size": 4,
        "position_embedding_size": 16,
    },
    "qwen3_vl_moe": {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": 64,
        "patch_size": 4,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    },
    "minimax_m3_vl": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 4,
    },
    "glm4v_moe": {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": 64,
        "image_size": 16,
        "patch_size": 4,
    },
}
VISION["glm5_next"] = VISION["glm4v_moe"]
VISION["mistral4"] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
VISION["step3p7"] = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
}
VISION["kimi_k25"] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "patch_size": 4,
    "pos_emb_height": 4,
    "pos_emb_width": 4,
}
# Types of models of pictures and text, where a family is that of the text.
WHOLES = {"mistral4": "mistral3"}
# Those that the installed transformers has in a form that speq runs.
FAMILIES = tuple(
    family
    for family in FAMILY_OPTIONS
    if not is_before(transformers_version(), families.FAMILIES[family].since)
)
# Families some of whose layers have no attention, and keep states.
WITH_STATES = tuple(
    family
    for family in (
        *("qwen3_next", "qwen3_5_moe", "lfm2_moe", "granitemoehybrid", "nemotron_h"),
        *("kimi_linear", "bailing_hybrid", "qwen4_exp", "glm5_next"),
    )
    if family in FAMILIES
)
# Families whose attention is over what an indexer chooses.
INDEXED = tuple(each for each in ("deepseek_v32", "glm_moe_dsa") if each in FAMILIES)
# Families that are mostly built like another one here run in the wider checks, as do those whose
# own part has tests of its own (test_delta.py, test_gemma4.py, test_qwen3_vl.py ...). Those that
# differ in next to nothing run in the long ones.
LIKE_OTHERS = (
    *("qwen3_moe", "phimoe", "glm4_moe", "ernie4_5_moe", "qwen3_next", "qwen3_5_moe", "gemma4"),
    *("lfm2_moe", "mellum", "laguna", "afmoe", "granitemoehybrid", "nemotron_h", "glm5_next"),
    *("kimi_linear", "deepseek_v32", "minimax_m3_vl", "qwen4_exp", "step3p7"),
    "deepseek_v4",
)
ALIKE = (
    *("olmoe", "deepseek_v3", "dots1", "solar_open"),
    *("glm4_moe_lite", "minimax_m2", "hunyuan_v1_moe", "hy_v3", "exaone_moe"),
    *("qwen3_vl_moe", "glm4v_moe", "granitemoe", "bailing_hybrid"),
    *("mistral4", "kimi_k25", "mimo_v2_flash", "sarvam_moe", "sarvam_mla", "flex_olmo"),
    "glm_moe_dsa",
)
# One family of each kind of cache: heads, latents, states, sinks, convolutions, widths by layer,
# and keys of an indexer.
UNLIKE_IN_CACHES = tuple(
    family
    for family in (
        *("qwen2_moe", "deepseek_v2", "qwen3_next", "gpt_oss", "lfm2_moe", "gemma4"),
        "deepseek_v32",
    )
    if family in FAMILIES
)
# Families with layers that select the tokens attention sees. Their passes are transformers', but
# for experts.
SELECTING = tuple(
    family for family in ("minimax_m3_vl", "glm5_next", "deepseek_v4") if family in FAMILIES
)
MARKS: dict[str, Any] = dict.fromkeys(LIKE_OTHERS, pytest.mark.wide)
MARKS |= dict.fromkeys(ALIKE, pytest.mark.full)
BY_FAMILY = [
    pytest.param(family, marks=[MARKS[family]] if family in MARKS else []) for family in FAMILIES
]
BY_WALKED = [each for each in BY_FAMILY if each.values[0] not in SELECTING]
WALKED = [family for family in FAMILIES if family not in SELECTING]
# Ends of names of what is published in float32, whatever the other weights are in.
IN_FLOAT32 = {
    "ernie4_5_moe": ("e_score_correction_bias", ".mlp.gate.weight"),
    "hunyuan_v1_moe": (".mlp.gate.wg.weight",),
    "bailing_hybrid": ("e_score_correction_bias", "conv1d.weight", "dt_bias", "A_log"),
    "glm5_next": (
        *("e_score_correction_bias", "conv1d.weight", "dt_bias", "A_log"),
        *("_hc.base", "_hc.scale"),
    ),
}
# Ends of names of what transformers leaves at 0, and how far it is spread. Some gates and ups come
# to lie beyond where the clamped activation ends.
SPREAD = {
    "granitemoehybrid": {
        "_layernorm.weight": 3.0,
        "dt_bias": 2.0,
        "A_log": 1.0,
        "mamba.D": 1.0,
        "conv1d.bias": 0.5,
    },
    "nemotron_h": {
        "norm.weight": 3.0,
        "dt_bias": 2.0,
        "A_log": 1.0,
        "mixer.D": 1.0,
        "conv1d.bias": 0.5,
    },
    **{
        each: {"layernorm.weight": 2.0, "o_norm.weight": 1.0, "dt_bias": 1.0, "A_log": 1.0}
        for each in ("kimi_linear", "bailing_hybrid")
    },
    **{
        each: {"indexer.k_norm.weight": 1.0, "indexer.k_norm.bias": 0.5}
        for each in ("deepseek_v32", "glm_moe_dsa")
    },
    "qwen4_exp": {"ple.conv1d.weight": 0.5, "norm.weight": 0.3, "ngram_embedding.weight": 1.0},
    "glm5_next": {
        "o_norm.weight": 1.0,
        "dt_bias": 1.0,
        "A_log": 1.0,
        "k_norm.weight": 1.0,
        "k_norm.bias": 0.5,
        "compress_ape": 1.0,
        "compress_gate": 0.3,
        "_hc.base": 0.5,
        "_hc.fn": 0.2,
    },
    "gpt_oss": {
        "gate_up_proj_bias": 4.0,
        "down_proj_bias": 0.5,
        "_proj.bias": 0.5,
        "sinks": 1.0,
    },
    "mimo_v2_flash": {"sinks": 1.0},
    "step3p7": {"layernorm.weight": 1.0, "q_norm.weight": 0.5, "k_norm.weight": 0.5},
    "deepseek_v4": {
        **{"sinks": 1.0, "position_bias": 0.5, "norm.weight": 1.0, "layernorm.weight": 1.0},
        **{"_hc.base": 1.0, "_hc.scale": 0.5, "hc_base": 1.0},
    },
    # Layers say more than the token before, which is what the tied head would repeat.
    "gemma4": {
        "post_attention_layernorm.weight": 3.0,
        "post_feedforward_layernorm.weight": 3.0,
        "layernorm_1.weight": 1.0,
        "layernorm_2.weight": 1.0,
        "router.scale": 1.0,
        "per_expert_scale": 1.0,
        "layer_scalar": 1.0,
    },
}
# What experts of a layer are below, where it is not `model.layers.L.mlp.experts`; by the model's
# names.
EXPERTS_BELOW = {
    "granitemoe": "model.layers.{}.block_sparse_moe.experts",
    "granitemoehybrid": "model.layers.{}.block_sparse_moe.experts",
    "gemma4": "model.layers.{}.experts",
    "nemotron_h": "model.layers.{}.mixer.experts",
    "lfm2_moe": "model.layers.{}.feed_forward.experts",
}
# Families whose experts have biases, which no draft with desc_act fits.
BIASED = ("gpt_oss",)
# Families whose part of text is written alone and then put beside others, with what that part is.
BESIDE_PICTURES = {"qwen3_5_moe": "qwen3_5_moe_text", "qwen4_exp": "qwen4_exp_text"}
# Families that are published with experts of a layer as [E, H, 2F] and [E, F, H]; transformers
# saves a new model otherwise.
PUBLISHED_TRANSPOSED = ("qwen3_vl_moe",)
# Names that transformers' loader reads and `save_pretrained` does not write again.
SAVED_OTHERWISE = {"kimi_k25": ("language_model.model.blocks.", "language_model.model.layers.")}
FUSED = (".experts.gate_up_proj", ".experts.down_proj")
# Names on disk of the same.
STACKED_LINEAR = {
    ".block_sparse_moe.input_linear.weight": ".block_sparse_moe.experts.gate_up_proj",
    ".block_sparse_moe.output_linear.weight": ".block_sparse_moe.experts.down_proj",
}
APART = re.compile(r"\.moe\.(gate_proj|up_proj|down_proj)\.weight$")
CORRECTION = ("e_score_correction_bias", ".expert_bias")


def write_tokenizer(path: Path) -> None:
    """One token per byte, and an end of text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: index for index, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(path)


def write_model(
    path: Path,
    model_type: str,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    max_shard_size: str = "5GB",
    **overrides: Any,
) -> Path:
    """A random model of a family, with a tokenizer, as `save_pretrained` writes it; of those that
    transformers has no small whole of, as `put_beside_pictures` does.
    """
    config = config_of(model_type, **overrides)
    return write_random(path, model_type, config, dtype, seed, max_shard_size)


def write_random(
    path: Path,
    model_type: str,
    config: Any,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    max_shard_size: str = "5GB",
) -> Path:
    """`write_model` of a configuration as `of_options` makes it."""
    torch.manual_seed(seed)
    model = model_class(config).from_config(config, dtype=torch.float32).to(dtype)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith(IN_FLOAT32.get(model_type, CORRECTION)):
            tensor.data = tensor.data.float()
        for ending, spread in SPREAD.get(model_type, {}).items():
            if name.endswith(ending):
                tensor.data.normal_(std=spread)
        if name.endswith(CORRECTION):  # which experts are chosen depends on it
            tensor.data.copy_(0.2 * torch.randn(tensor.shape))
        if name.endswith("tid2eid"):  # experts of each token id
            ids = torch.rand(len(tensor), config.n_routed_experts).argsort(1)
            tensor.data.copy_(ids[:, : tensor.shape[1]])
        if name.endswith(".gate.weight") and not tensor.any():  # transformers 5.17 leaves some at 0
            tensor.data.normal_(std=COMMON["initializer_range"])
    model.save_pretrained(path, max_shard_size=max_shard_size)
    if model_type in PUBLISHED_TRANSPOSED:
        transpose_experts(path)
    if model_type in SAVED_OTHERWISE:
        rename_tensors(path, *SAVED_OTHERWISE[model_type])
    if model_type in BESIDE_PICTURES:
        put_beside_pictures(path, model_type)
    write_tokenizer(path)
    return path


def config_of(model_type: str, **overrides: Any) -> Any:
    """The configuration of a small model; of families in VISION with both parts, of others in
    BESIDE_PICTURES that of text.
    """
    return of_options(model_type, COMMON | FAMILY_OPTIONS[model_type] | overrides)


def transpose_experts(path: Path) -> None:
    """Rewrite a folder's experts, stored by layer, as their transposes."""
    for file in path.glob("*.safetensors"):
        tensors = {
            name: tensor.mT.contiguous() if name.endswith(FUSED) else tensor
            for name, tensor in load_file(file).items()
        }
        save_file(tensors, file, metadata={"format": "pt"})


def rename_tensors(path: Path, saved: str, published: str) -> None:
    """Rewrite the names in a folder's only file."""
    file = path / "model.safetensors"
    tensors = {name.replace(saved, published): each for name, each in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})


def model_class(config: Any) -> Any:
    """transformers' class of models that generate text, alone or of pictures too."""
    known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForCausalLM if known else AutoModelForImageTextToText


def of_options(model_type: str, options: dict[str, Any]) -> Any:
    """`config_of`, of all options that it is to have."""
    if model_type not in VISION:
        return AutoConfig.for_model(BESIDE_PICTURES.get(model_type, model_type), **options)
    whole = WHOLES.get(model_type, model_type)
    return AutoConfig.for_model(
        whole,
        text_config=options if whole == model_type else {**options, "model_type": model_type},
        vision_config=VISION[model_type],
        tie_word_embeddings=options["tie_word_embeddings"],
        eos_token_id=EOS,
        initializer_range=options["initializer_range"],
    )


def write_perturbed(path: Path, source: Path, noise: float, seed: int = 0) -> Path:
    """A copy whose expert weights are moved by `noise` of their spread: a poor draft."""
    path.mkdir(parents=True)
    for name in ("config.json", "generation_config.json"):
        (path / name).write_bytes((source / name).read_bytes())
    generator = torch.Generator().manual_seed(seed)
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        if ".experts." in name:
            spread = noise * float(tensor.float().std())
            moved = tensor.float() + spread * torch.randn(tensor.shape, generator=generator)
            tensors[name] = moved.to(tensor.dtype)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def write_fused(path: Path, source: Path) -> Path:
    """A copy that has all experts of a layer in two tensors, as transformers holds them."""
    path.mkdir(parents=True)
    for file in source.iterdir():
        if file.suffix == ".json":
            (path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(source / "model.safetensors")
    for name, tensor in load_plain(source, dtype="auto").state_dict().items():
        if name.endswith(FUSED):
            tensors[name] = tensor.contiguous()
    alone = re.compile(r"\.experts\.\d+\.")
    fused = {name: tensor for name, tensor in tensors.items() if not alone.search(name)}
    save_file(fused, path / "model.safetensors", metadata={"format": "pt"})
    return path


def layers_of(model: Any) -> Any:
    """Decoder layers of plain transformers' model, of one of pictures and text too."""
    return getattr(model.model, "language_model", model.model).layers


def experts_of(layer: Any) -> Any:
    """All experts of a layer; None: it has none."""
    names = ("mlp", "feed_forward", "block_sparse_moe", "mixer")
    holders = (layer, *(getattr(layer, name, None) for name in names))
    return next((each.experts for each in holders if hasattr(each, "experts")), None)


def matrices_of(experts: Any, at: int) -> tuple[torch.Tensor, torch.Tensor]:
    """gate_up_proj [2F, H], gate over up, or up_proj [F, H], and down_proj [H, F] of one of a
    layer's experts, as transformers holds them.
    """
    gate_up, down = up_of(experts)[at].detach(), experts.down_proj[at].detach()
    if type(experts).__name__ != "GptOssExperts":
        return gate_up, down
    return torch.cat([gate_up[:, 0::2].T, gate_up[:, 1::2].T]), down.T


def put_matrices(experts: Any, at: int, gate_up: torch.Tensor, down: torch.Tensor) -> None:
    """Give transformers' experts one of other matrices, as `matrices_of` returns them."""
    if type(experts).__name__ == "GptOssExperts":
        gate_up, down = torch.stack(gate_up.chunk(2), 1).flatten(0, 1).T, down.T
    up_of(experts).data[at], experts.down_proj.data[at] = gate_up, down


def up_of(experts: Any) -> torch.Tensor:
    """What is before the activation of all of transformers' experts of a layer."""
    up: torch.Tensor | None = getattr(experts, "gate_up_proj", None)
    of_ungated: torch.Tensor | None = getattr(experts, "up_proj", None)
    found = of_ungated if up is None else up
    assert found is not None
    return found


def model_name(stored: str) -> str:
    """A tensor's name, where a checkpoint calls experts of a layer a linear layer, or the model
    otherwise.
    """
    for on_disk, own in STACKED_LINEAR.items():
        stored = stored.replace(on_disk, own)
    return re.sub(r"^(backbone|language_model\.model)\.", "model.", stored)


def experts_alone(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of a checkpoint, those of all experts of a layer as tensors of experts alone.

    Where they have biases they lie as gpt_oss has them: transposed, with gate and up in turns.
    Where their inputs are not what the router's are, they are transposed.
    """
    alone: dict[str, torch.Tensor] = {}
    for stored_name, tensor in tensors.items():
        name = model_name(stored_name)
        apart = APART.search(name)
        if apart is not None:
            experts = f"{name[: apart.start()]}.mlp.experts"
            for at, matrix in enumerate(tensor):
                alone[f"{experts}.{at}.{apart[1]}.weight"] = matrix
            continue
        prefix, _, projection = name.rpartition(".")
        if not name.endswith(FUSED):
            alone[name] = tensor
            continue
        in_turns = f"{name}_bias" in tensors
        router = tensors.get(f"{prefix.removesuffix('.experts')}.gate.weight")
        hidden = tensor.shape[2 if projection == "gate_up_proj" else 1]
        turned = in_turns or (router is not None and hidden != router.shape[1])
        for at, stored in enumerate(tensor):
            matrix = stored.T if turned else stored
            parts = {"down_proj": matrix}
            if projection == "gate_up_proj":
                halves = (matrix[0::2], matrix[1::2]) if in_turns else matrix.chunk(2)
                parts = dict(zip(("gate_proj", "up_proj"), halves, strict=True))
            for each, part in parts.items():
                alone[f"{prefix}.{at}.{each}.weight"] = part.contiguous()
    return alone


def load_plain(path: Path, dtype: torch.dtype | str = torch.float32) -> Any:
    """The same checkpoint as plain transformers loads it: the oracle.

    Its plainest experts: the grouped ones do not compute in float64.
    """
    made = model_class(AutoConfig.from_pretrained(path))
    return made.from_pretrained(path, dtype=dtype, experts_implementation="eager").eval()


class Chosen(LogitsProcessor):
    """Makes the likeliest token the one that is chosen as options say, drawn ones by the noise of
    the seed.
    """

    def __init__(self, prompt: int, options: SamplingParams) -> None:
        self.prompt, self.options = prompt, options

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        options, tokens = self.options, input_ids[0].tolist()
        logits = sampling_order.penalised(
            scores[0].double().numpy(),
            tokens[: self.prompt],
            tokens[self.prompt :],
            options.repetition_penalty,
            options.presence_penalty,
            options.frequency_penalty,
        )
        chosen = int(logits.argmax())
        if not options.greedy:
            assert options.seed is not None
            probs = sampling_order.distribution(
                logits, options.temperature, options.top_k, options.top_p, options.min_p
            )
            times = noise(options.seed, len(tokens) - self.prompt, len(logits))
            chosen = sampling_order.drawn(probs, times.astype(np.float64))
        return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([chosen]), 0.0)


def drawn_tokens(
    model: Any, prompt_token_ids: list[int], count: int, options: SamplingParams
) -> list[int]:
    """As `greedy_tokens`, chosen as options say: penalties, and what shapes a distribution."""
    chosen = LogitsProcessorList([Chosen(len(prompt_token_ids), options)])
    return greedy_tokens(model, prompt_token_ids, count, chosen)


def greedy_tokens(
    model: Any, prompt_token_ids: list[int], count: int, processors: Any = None
) -> list[int]:
    """`count` greedy tokens of plain transformers' generate, an end of text not ending it."""
    # Its own steps of one token leave out the least step of Nemotron's Mamba layers, which its
    # passes over many tokens have.
    whole = model.config.model_type == "nemotron_h"
    output = model.generate(
        torch.tensor([prompt_token_ids]),
        attention_mask=torch.ones(1, len(prompt_token_ids), dtype=torch.long),
        max_new_tokens=count,
        do_sample=False,
        logits_processor=processors,
        use_cache=not whole,
        eos_token_id=None,
        pad_token_id=EOS if model.config.get_text_config().vocab_size > EOS else 0,
    )
    return output[0, len(prompt_token_ids) :].tolist()
