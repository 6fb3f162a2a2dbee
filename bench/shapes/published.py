"""Shapes of published models: what a config.json says of sizes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speq.errors import CheckpointError, OptionError
from speq.files.json_file import read_json

PUBLISHED_CONFIG = "the published config.json"
BY_HAND = "put together by hand from its report and from transformers' defaults"


@dataclass(frozen=True, slots=True)
class PublishedShape:
    """A row of the table.

    parameters  as its publisher counts them, embeddings included
    source      where the sizes come from
    config      fields of config.json
    """

    name: str
    parameters: float
    source: str
    config: dict[str, Any]


# Of every family here: plain SwiGLU experts, whose weights are published in 16 bits.
COMMON = {"hidden_act": "silu", "tie_word_embeddings": False, "dtype": "bfloat16"}
# Multi-head latent attention of one width throughout the families.
LATENT = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
SHAPES = (
    PublishedShape(
        "qwen3-30b-a3b",
        30.5e9,
        PUBLISHED_CONFIG,
        {
            "model_type": "qwen3_moe",
            "vocab_size": 151_936,
            "hidden_size": 2048,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "intermediate_size": 6144,
            "norm_topk_prob": True,
            "rope_theta": 1_000_000.0,
            "max_position_embeddings": 40_960,
        },
    ),
    PublishedShape(
        "qwen3-235b-a22b",
        235e9,
        PUBLISHED_CONFIG,
        {
            "model_type": "qwen3_moe",
            "vocab_size": 151_936,
            "hidden_size": 4096,
            "num_hidden_layers": 94,
            "num_attention_heads": 64,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1536,
            "intermediate_size": 12_288,
            "norm_topk_prob": True,
            "rope_theta": 1_000_000.0,
            "max_position_embeddings": 40_960,
        },
    ),
    PublishedShape(
        "deepseek-v2-lite",
        15.7e9,
        BY_HAND,
        LATENT
        | {
            "model_type": "deepseek_v2",
            "vocab_size": 102_400,
            "hidden_size": 2048,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "q_lora_rank": None,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 1408,
            "intermediate_size": 10_944,
            "topk_method": "greedy",
            "max_position_embeddings": 163_840,
        },
    ),
    PublishedShape(
        "moonlight-16b-a3b",
        16e9,
        BY_HAND,
        LATENT
        | {
            "model_type": "deepseek_v3",
            "vocab_size": 163_840,
            "hidden_size": 2048,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "q_lora_rank": None,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 1408,
            "intermediate_size": 11_264,
            "max_position_embeddings": 8192,
        },
    ),
)
BY_NAME = {shape.name: shape for shape in SHAPES}


def shape_of(given: str, layers: int | None) -> PublishedShape:
    """The shape of a name of the table, or of a folder with a config.json, cut to so many layers.

    Raises SpeqError for what is neither, or has fewer layers.
    """
    if given in BY_NAME:
        shape = BY_NAME[given]
    elif Path(given).is_dir():
        path = Path(given) / "config.json"
        shape = PublishedShape(Path(given).resolve().name, 0.0, str(path), read_json(path))
    else:
        raise OptionError(
            f"shape {given!r} is neither a folder with a config.json nor one of "
            f"{', '.join(BY_NAME)}"
        )
    whole = shape.config.get("num_hidden_layers")
    if not isinstance(whole, int):
        raise CheckpointError(
            f"{shape.source} has no num_hidden_layers; give the folder of a model"
        )
    if layers is None:
        return shape
    if layers > whole:
        raise OptionError(f"layers is {layers} and {shape.name} has {whole}; give at most as many")
    config = COMMON | shape.config | {"num_hidden_layers": layers}
    return PublishedShape(shape.name, 0.0, shape.source, config)
