"""Shapes of published models: the few numbers of a config.json that give them, and its source."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speq.errors import OptionError
from speq.files.checkpoint import locate_config
from speq.files.fp8_settings import SQUARES
from speq.files.json_file import read_json
from speq.files.packed_settings import PACK_QUANTIZED
from speq.files.packing import COMPRESSED, MODELOPT
from speq.files.published_format import (
    FP8,
    INT4,
    MXFP4,
    NVFP4,
    WORDS,
    format_of,
)

PUBLISHED = "the published config.json"
# Neighbours of INT4 that share a scale, as llm-compressor's `W4A16` has them.
INT4_GROUP = 128
# What words are in.
BF16 = "bf16"
BY_HAND = "put together by hand, and compared with no published file"
# What both kinds of gpt-oss have.
GPT_OSS = """
"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "hidden_size": 2880,
"intermediate_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
"vocab_size": 201088, "sliding_window": 128, "num_experts_per_tok": 4, "eos_token_id": 200002,
"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 150000,
"tie_word_embeddings": false, "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast":
32.0, "beta_slow": 1.0, "truncate": false, "original_max_position_embeddings": 4096}
"""
# What DeepSeek-V2-Lite, Moonlight and GLM-4.7-Flash have, and what the first two do.
LATENTS = """
"hidden_size": 2048, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "hidden_act": "silu",
"n_routed_experts": 64, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
"tie_word_embeddings": false
"""
# Kinds of its layers, by the letters of its publisher.
NEMOTRON_KINDS = {"M": "linear_attention", "E": "moe", "*": "full_attention"}
NEMOTRON_LAYERS = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
LATENTS_16 = f"""{LATENTS}, "num_hidden_layers": 27, "num_attention_heads": 16,
"num_key_value_heads": 16, "q_lora_rank": null, "qk_nope_head_dim": 128, "v_head_dim": 128,
"n_shared_experts": 2, "moe_intermediate_size": 1408, "num_experts_per_tok": 6
"""


@dataclass(frozen=True, slots=True)
class PublishedShape:
    """A model's shapes.

    source      where they come from
    parameters  of the whole model as its publisher says, in billions; None: not said
    formats     in which it is published, the usual one first
    fields      the part of config.json that gives shapes, without its braces
    """

    name: str
    source: str
    parameters: float | None
    formats: tuple[str, ...]
    fields: str

    def content(self, layers: int | None, wanted: str | None) -> dict[str, Any]:
        """The config.json of a model of its first layers, published in a format. Raises SpeqError
        for layers or a format that it has not.
        """
        content = json.loads(f"{{{self.fields}}}")
        text = content.get("text_config", content)
        whole = text["num_hidden_layers"]
        if layers is not None and layers > whole:
            raise OptionError(
                f"layers is {layers} and {self.name} has {whole}; give as many or less"
            )
        text["num_hidden_layers"] = layers or whole
        for name, value in text.items():
            if isinstance(value, list) and len(value) == whole and layers:
                text[name] = value[:layers]
        weights = wanted or self.formats[0]
        if weights not in self.formats:
            raise OptionError(
                f"weights is {weights} and {self.name} is published in {', '.join(self.formats)}; "
                "give one of these"
            )
        content["dtype"] = text["dtype"] = "bfloat16"
        content.pop("torch_dtype", None)
        content.pop("quantization_config", None)
        if weights == FP8:
            fp8 = {"quant_method": FP8, "fmt": "e4m3", "activation_scheme": "dynamic"}
            content["quantization_config"] = fp8 | {"weight_block_size": [*SQUARES]}
        elif weights == MXFP4:
            content["quantization_config"] = {"quant_method": MXFP4}
        elif weights == NVFP4:
            nvfp4 = {"quant_method": MODELOPT.name, "quant_algo": "NVFP4", "ignore": ["lm_head"]}
            content["quantization_config"] = nvfp4
        elif weights == INT4:
            int4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": INT4_GROUP}
            groups = {"group_0": {"targets": ["Linear"], "weights": int4 | {"symmetric": True}}}
            content["quantization_config"] = {
                **{"quant_method": COMPRESSED.name, "format": PACK_QUANTIZED},
                **{"config_groups": groups, "ignore": ["lm_head"]},
            }
        return content


ROWS = (
    PublishedShape(
        *("Qwen3-30B-A3B", PUBLISHED, 30.5, (BF16, FP8, INT4, NVFP4)),
        """
"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048,
"intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48,
"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
"num_experts_per_tok": 8, "norm_topk_prob": true, "vocab_size": 151936, "eos_token_id": 151645,
"max_position_embeddings": 40960, "rope_theta": 1000000.0, "tie_word_embeddings": false
""",
    ),
    PublishedShape(
        *("Qwen3.6-35B-A3B", f"{PUBLISHED}, without pictures and MTP", 35.0, (BF16, FP8)),
        """
"model_type": "qwen3_5_moe", "architectures": ["Qwen3_5MoeForConditionalGeneration"],
"tie_word_embeddings": false, "text_config": {
"model_type": "qwen3_5_moe_text", "hidden_size": 2048, "num_hidden_layers": 40, "head_dim": 256,
"num_attention_heads": 16, "num_key_value_heads": 2, "num_experts": 256, "num_experts_per_tok": 8,
"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "full_attention_interval": 4,
"linear_conv_kernel_dim": 4, "linear_num_key_heads": 16, "linear_key_head_dim": 128,
"linear_num_value_heads": 32, "linear_value_head_dim": 128, "vocab_size": 248320,
"max_position_embeddings": 262144, "eos_token_id": 248044, "tie_word_embeddings": false,
"rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "mrope_interleaved": true,
"partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]}}
""",
    ),
    PublishedShape(
        *("gpt-oss-20b", PUBLISHED, 20.9, (MXFP4,)),
        f'{GPT_OSS}, "num_hidden_layers": 24, "num_local_experts": 32',
    ),
    PublishedShape(
        *("gpt-oss-120b", PUBLISHED, 116.8, (MXFP4,)),
        f'{GPT_OSS}, "num_hidden_layers": 36, "num_local_experts": 128',
    ),
    PublishedShape(
        *("DeepSeek-V2-Lite", BY_HAND, 15.7, (BF16,)),
        f"""{LATENTS_16},
"model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"],
"intermediate_size": 10944, "vocab_size": 102400, "rope_theta": 10000, "topk_method": "greedy",
"norm_topk_prob": false, "routed_scaling_factor": 1.0, "max_position_embeddings": 163840,
"eos_token_id": 100001
""",
    ),
    PublishedShape(
        *("Moonlight-16B-A3B", BY_HAND, 16.0, (BF16,)),
        f"""{LATENTS_16},
"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"],
"intermediate_size": 11264, "vocab_size": 163840, "rope_theta": 50000.0, "norm_topk_prob": true,
"routed_scaling_factor": 2.446, "max_position_embeddings": 8192, "eos_token_id": 163585
""",
    ),
    PublishedShape(
        *("GLM-4.7-Flash", BY_HAND, None, (BF16,)),
        f"""{LATENTS},
"model_type": "glm4_moe_lite", "architectures": ["Glm4MoeLiteForCausalLM"],
"num_hidden_layers": 47, "num_attention_heads": 20, "num_key_value_heads": 20,
"q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256, "n_shared_experts": 1,
"moe_intermediate_size": 1536, "num_experts_per_tok": 4, "intermediate_size": 10240,
"vocab_size": 154880, "rope_theta": 1000000.0, "norm_topk_prob": true,
"routed_scaling_factor": 1.8, "eos_token_id": 154820, "max_position_embeddings": 202752
""",
    ),
    PublishedShape(
        *("Nemotron-3-Nano-30B-A3B", BY_HAND, 31.6, (BF16, FP8, NVFP4)),
        """
"model_type": "nemotron_h", "architectures": ["NemotronHForCausalLM"], "hidden_size": 2688,
"num_hidden_layers": 52, "layers_block_type": KINDS, "num_attention_heads": 32,
"num_key_value_heads": 2, "head_dim": 128, "intermediate_size": 1856, "mamba_num_heads": 64,
"mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4, "chunk_size": 128,
"n_routed_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 1856,
"moe_shared_expert_intermediate_size": 3712, "n_group": 1, "topk_group": 1,
"norm_topk_prob": true, "routed_scaling_factor": 2.5, "vocab_size": 131072,
"max_position_embeddings": 262144, "eos_token_id": 2, "tie_word_embeddings": false
""".replace("KINDS", json.dumps([NEMOTRON_KINDS[each] for each in NEMOTRON_LAYERS])),
    ),
    PublishedShape(
        *("Gemma-4-26B-A4B", f"{PUBLISHED}, without pictures", 25.2, (BF16,)),
        """
"model_type": "gemma4", "architectures": ["Gemma4ForConditionalGeneration"],
"tie_word_embeddings": true, "text_config": {
"model_type": "gemma4_text", "hidden_size": 2816, "intermediate_size": 2112, "head_dim": 256,
"moe_intermediate_size": 704, "num_hidden_layers": 30, "num_attention_heads": 16,
"num_key_value_heads": 8, "num_global_key_value_heads": 2, "global_head_dim": 512,
"attention_k_eq_v": true, "num_experts": 128, "top_k_experts": 8, "enable_moe_block": true,
"layer_types": KINDS, "sliding_window": 1024, "final_logit_softcapping": 30.0,
"hidden_size_per_layer_input": 0,
"use_bidirectional_attention": "vision", "max_position_embeddings": 262144, "vocab_size": 262144,
"eos_token_id": 1, "tie_word_embeddings": true, "rope_parameters": {"full_attention":
{"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
"sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"}}}
""".replace("KINDS", json.dumps([*["sliding_attention"] * 5, "full_attention"] * 5)),
    ),
)
SHAPES = {each.name: each for each in ROWS}


def shape_named(given: str) -> PublishedShape:
    """A row of `SHAPES`, or the shapes of a folder's config.json. Raises SpeqError."""
    if given in SHAPES:
        return SHAPES[given]
    path = Path(given)
    if not path.exists():
        raise OptionError(
            f"shapes are {given!r}, neither a published model's nor a folder's; give one of "
            f"{', '.join(SHAPES)}, or a folder with a config.json"
        )
    folder = locate_config(path.parent if path.name == "config.json" else path)
    content = read_json(folder / "config.json")
    kind, packed, _ = format_of(content, folder)
    if packed is not None and packed.packing is not COMPRESSED:
        raise OptionError(
            f"shapes are {given!r}, in {kind} as {packed.packing.name} packs it; of codes of four "
            f"bits random weights are in {INT4} by {COMPRESSED.name} only: give a checkpoint of "
            "that, or the original"
        )
    formats = (BF16 if kind == WORDS else kind,)
    name = folder.resolve().name
    return PublishedShape(
        name, str(folder / "config.json"), None, formats, json.dumps(content)[1:-1]
    )
