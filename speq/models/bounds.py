"""Limits on config.json, checked from files alone before anything is built."""

import re
from typing import Any

from speq.errors import CheckpointError
from speq.files.checkpoint import Checkpoint
from speq.files.safetensors_file import OTHER_VERSION

# Several times what any model has. A larger one is a damaged number, and would take hours or all
# memory.
MOST = {
    "num_hidden_layers": 1 << 10,
    "vocab_size": 1 << 22,
    "hidden_size": 1 << 17,
    "intermediate_size": 1 << 20,
    "moe_intermediate_size": 1 << 20,
    "shared_expert_intermediate_size": 1 << 20,
    "num_attention_heads": 1 << 12,
    "num_key_value_heads": 1 << 12,
    "head_dim": 1 << 14,
    "num_experts": 1 << 16,
    "num_local_experts": 1 << 16,
    "n_routed_experts": 1 << 16,
    "moe_num_experts": 1 << 16,
    "n_shared_experts": 1 << 10,
    "moe_num_shared_experts": 1 << 10,
    "num_experts_per_tok": 1 << 16,
    "moe_k": 1 << 16,
    "moe_topk": 1 << 16,
    "q_lora_rank": 1 << 17,
    "kv_lora_rank": 1 << 17,
    "qk_nope_head_dim": 1 << 14,
    "qk_rope_head_dim": 1 << 14,
    "v_head_dim": 1 << 14,
    "index_n_heads": 1 << 12,
    "index_head_dim": 1 << 14,
    "index_topk": 1 << 40,
    "conv_L_cache": 1 << 10,
    "max_position_embeddings": 1 << 40,
}
LAYER = re.compile(r"(?:^|\.)layers\.(\d{1,9})\.")
EMBEDDING = re.compile(r"(?:^|\.)(?:embed_tokens|embeddings)\.weight$")


def check_sizes(config: dict[str, Any], where: object) -> None:
    """Raise SpeqError for a size that no model has. Types are left to transformers."""
    for name, most in MOST.items():
        value = config.get(name)
        if isinstance(value, int | float) and not -most <= value <= most:
            raise CheckpointError(
                f"{where} has {name} {value!r:.40}; it must be at most {most}: download it again"
                ", or correct that value"
            )


def check_weights(config: dict[str, Any], checkpoint: Checkpoint) -> None:
    """Raise SpeqError if the config has more layers or tokens than the weights."""
    where = checkpoint.path / "config.json"
    part = checkpoint.part
    own = {
        name: at
        for name, at in checkpoint.tensors.items()
        if part is None or not part.is_beside(name)
    }
    layers = {int(m[1]) for m in map(LAYER.search, own) if m is not None}
    promised = config.get("num_hidden_layers")
    if layers and isinstance(promised, int) and promised > len(layers):
        raise CheckpointError(
            f"{where} has num_hidden_layers {promised} and {checkpoint.path} holds weights of "
            f"{len(layers)} layers; {OTHER_VERSION}"
        )
    vocab_size = config.get("vocab_size")
    for name, (file, info) in own.items():
        if not EMBEDDING.search(name) or not isinstance(vocab_size, int) or not info.shape:
            continue
        if info.shape[0] != vocab_size:
            raise CheckpointError(
                f"{file.path}: tensor {name} has shape {list(info.shape)}; config.json makes it "
                f"{[vocab_size, *info.shape[1:]]}; "
                f"{OTHER_VERSION}"
            )
