"""EAGLE-3 heads as they are published, of random words, and what one computes, in numpy."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_act": "silu",
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
}


def eagle_config(hidden_size: int, vocab_size: int, draft_vocab_size: int, **more: Any) -> Any:
    sizes = {"hidden_size": hidden_size, "vocab_size": vocab_size}
    return LLAMA | sizes | {"draft_vocab_size": draft_vocab_size} | more


def random_tensors(config: dict[str, Any], seed: int, embedding: bool = False) -> Any:
    """As SafeAILab and SGLang name them."""
    generator = torch.Generator().manual_seed(seed)
    d, w, v = config["hidden_size"], config["intermediate_size"], config["draft_vocab_size"]
    target = config.get("target_hidden_size") or d
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    width = config.get("head_dim") or d // heads

    def drawn(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator) * size[-1] ** -0.5

    def norm() -> torch.Tensor:
        return 1 + 0.2 * torch.randn(d, generator=generator)

    said = torch.randperm(config["vocab_size"], generator=generator)[:v].sort().values
    tensors = {
        "fc.weight": drawn(d, 3 * target),
        "midlayer.hidden_norm.weight": norm(),
        "midlayer.input_layernorm.weight": norm(),
        "midlayer.post_attention_layernorm.weight": norm(),
        "midlayer.self_attn.q_proj.weight": drawn(heads * width, 2 * d),
        "midlayer.self_attn.k_proj.weight": drawn(kv_heads * width, 2 * d),
        "midlayer.self_attn.v_proj.weight": drawn(kv_heads * width, 2 * d),
        "midlayer.self_attn.o_proj.weight": drawn(d, heads * width),
        "midlayer.mlp.gate_proj.weight": drawn(w, d),
        "midlayer.mlp.up_proj.weight": drawn(w, d),
        "midlayer.mlp.down_proj.weight": drawn(d, w),
        "norm.weight": norm(),
        "lm_head.weight": drawn(v, d) * 3,
        "d2t": said - torch.arange(v),
        "t2d": torch.zeros(config["vocab_size"], dtype=torch.bool).index_fill_(0, said, True),
    }
    if embedding:
        tensors["embed_tokens.weight"] = drawn(config["vocab_size"], d) * 4
    return tensors


def write_eagle(path: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file({name: each.contiguous() for name, each in tensors.items()}, path / FILE)
    return path


FILE = "model.safetensors"


def write_random_eagle(
    path: Path, hidden_size: int, vocab_size: int, draft_vocab_size: int, seed: int = 0
) -> Path:
    """A head that knows nothing of a model of these sizes."""
    config = eagle_config(hidden_size, vocab_size, draft_vocab_size)
    return write_eagle(path, config, random_tensors(config, seed))


def as_speculators(config: dict[str, Any], tensors: dict[str, Any]) -> tuple[Any, Any]:
    """The same head as vLLM's speculators write it."""
    own = ("draft_vocab_size", "target_hidden_size", "norm_before_residual")
    own += ("eagle_aux_hidden_state_layer_ids",)
    renamed = {name.replace("midlayer.", "layers.0."): each for name, each in tensors.items()}
    outer = {name: config[name] for name in own if name in config}
    layer = {name: value for name, value in config.items() if name not in (*own, "architectures")}
    outer |= {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": layer,
    }
    return outer, renamed


def frequencies(config: dict[str, Any], width: int) -> Any:
    """Of rotary positions; Llama 3's are slower where they are slow."""
    steps = np.arange(0, width, 2) / width
    found = config["rope_theta"] ** -steps
    scaling = config.get("rope_scaling")
    if scaling is None:
        return found
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * found / (2 * math.pi)
    share = np.clip((turns - low) / (high - low), 0, 1)
    return share * found + (1 - share) * found / scaling["factor"]


def eagle_in_numpy(path: Path, config: dict[str, Any], embedded: Any, features: Any, fed: int = 0):  # type: ignore[no-untyped-def]
    """Entries from position 0 on, one at a time, in float64: {"feature": [T, H], "scores": [T, D]}.

    features  [T, 3 * H] of the exact model; the last `fed` rows are the head's own instead, of
              which the first H elements count
    """
    w = {name: each.double().numpy() for name, each in load_file(path / FILE).items()}
    d, heads = config["hidden_size"], config["num_attention_heads"]
    kv_heads, epsilon = config["num_key_value_heads"], config["rms_norm_eps"]
    width = config.get("head_dim") or d // heads
    angles = frequencies(config, width)

    def normed(row: Any, name: str) -> Any:
        return row / np.sqrt((row**2).mean() + epsilon) * w[name]

    def turned(row: Any, at: int) -> Any:
        both = row[..., : width // 2] + 1j * row[..., width // 2 :]
        both = both * np.exp(1j * at * angles)
        return np.concatenate([both.real, both.imag], -1)

    keys, values, states = [], [], []
    for at, (e, f) in enumerate(zip(np.asarray(embedded), np.asarray(features), strict=True)):
        own = at >= len(features) - fed
        g = f[:d] if own else w["fc.weight"] @ f
        n = normed(g, "midlayer.hidden_norm.weight")
        pair = np.concatenate([normed(e, "midlayer.input_layernorm.weight"), n])
        q, k, v = (w[f"midlayer.self_attn.{each}_proj.weight"] @ pair for each in "qkv")
        q = turned(q.reshape(heads, width), at)
        keys.append(turned(k.reshape(kv_heads, width), at))
        values.append(v.reshape(kv_heads, width))
        seen = []
        for head in range(heads):
            shared = head * kv_heads // heads
            scores = np.array([key[shared] @ q[head] for key in keys]) / width**0.5
            shares = np.exp(scores - scores.max())
            shares /= shares.sum()
            seen.append(sum(s * value[shared] for s, value in zip(shares, values, strict=True)))
        h = n if config.get("norm_before_residual") else g
        h = h + w["midlayer.self_attn.o_proj.weight"] @ np.concatenate(seen)
        m = normed(h, "midlayer.post_attention_layernorm.weight")
        gate, up = (w[f"midlayer.mlp.{each}_proj.weight"] @ m for each in ("gate", "up"))
        states.append(h + w["midlayer.mlp.down_proj.weight"] @ (gate / (1 + np.exp(-gate)) * up))
    said = [w["lm_head.weight"] @ normed(h, "norm.weight") for h in states]
    return {"feature": np.stack(states), "scores": np.stack(said)}


def said_by(path: Path) -> list[int]:
    """The exact model's numbers of the tokens that a head says."""
    flags = load_file(path / FILE)["t2d"]
    return flags.nonzero()[:, 0].tolist()
