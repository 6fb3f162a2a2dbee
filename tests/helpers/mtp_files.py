"""A layer behind the last that predicts tokens ahead (MTP), added to a small glm4_moe checkpoint as
it is published, and what such a layer computes, in numpy.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

FILE = "model.safetensors"


def write_mtp(path: Path, model: Path, seed: int = 0, own: tuple[str, ...] = ()) -> Path:
    """A copy of a model with such a layer, of random words.

    own  of "embed_tokens" and "shared_head.head": those that are not the model's own
    """
    shutil.copytree(model, path, ignore=shutil.ignore_patterns(".speq"))
    config = json.loads((path / "config.json").read_text())
    last = config["num_hidden_layers"]
    (path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    tensors = load_file(path / FILE)
    generator = torch.Generator().manual_seed(seed)

    def like(tensor: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        drawn = torch.randn(tensor.shape, generator=generator)
        drawn = 1 + 0.2 * drawn if tensor.dim() == 1 else drawn * tensor.shape[-1] ** -0.5
        return (scale * drawn).to(tensor.dtype)

    before, prefix = f"model.layers.{last - 1}.", f"model.layers.{last}."
    added = {
        name.replace(before, prefix): like(tensor)
        for name, tensor in tensors.items()
        if name.startswith(before)
    }
    norm, embedding = tensors["model.norm.weight"], tensors["model.embed_tokens.weight"]
    for name in ("enorm", "hnorm", "shared_head.norm"):
        added[f"{prefix}{name}.weight"] = like(norm)
    size = len(norm)
    added[prefix + "eh_proj.weight"] = like(norm.new_empty(size, 2 * size))
    for name, same in (
        ("embed_tokens", embedding),
        ("shared_head.head", tensors["lm_head.weight"]),
    ):
        added[f"{prefix}{name}.weight"] = like(same, 3.0) if name in own else same.clone()
    save_file(tensors | added, path / FILE, metadata={"format": "pt"})
    return path


def mtp_in_numpy(model: Path, config: Any, embedded: Any, features: Any) -> dict[str, Any]:
    """Entries from position 0 on, one at a time, in float64: {"feature": [T, H], "scores": [T, V]}.

    config  as transformers reads it
    """
    prefix = f"model.layers.{config.num_hidden_layers}."
    w = {
        name.removeprefix(prefix): each.double().numpy()
        for name, each in load_file(model / FILE).items()
        if name.startswith(prefix)
    }
    heads, kv_heads, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    rope = config.rope_parameters
    turning = int(width * rope.get("partial_rotary_factor", 1.0))
    angles = rope["rope_theta"] ** -(np.arange(0, turning, 2) / turning)

    def normed(row: Any, name: str) -> Any:
        mean = (row**2).mean(-1, keepdims=True)
        return row / np.sqrt(mean + config.rms_norm_eps) * w[f"{name}.weight"]

    def product(row: Any, name: str) -> Any:
        return w[f"{name}.weight"] @ row + w.get(f"{name}.bias", 0.0)

    def turned(rows: Any, at: int) -> Any:
        half = turning // 2
        both = rows[:, :half] + 1j * rows[:, half:turning]
        both = both * np.exp(1j * at * angles)
        return np.concatenate([both.real, both.imag, rows[:, turning:]], -1)

    def mlp(row: Any, name: str) -> Any:
        gate = product(row, f"{name}.gate_proj")
        return product(
            gate / (1 + np.exp(-gate)) * product(row, f"{name}.up_proj"), f"{name}.down_proj"
        )

    def routed(row: Any) -> Any:
        scores = 1 / (1 + np.exp(-product(row, "mlp.gate")))
        choice = scores + w["mlp.gate.e_score_correction_bias"]
        groups = choice.reshape(config.n_group, -1)
        best = np.sort(groups, -1)[:, -2:].sum(-1).argsort()[::-1][: config.topk_group]
        allowed = np.isin(np.arange(len(choice)) // groups.shape[1], best)
        chosen = np.where(allowed, choice, -np.inf).argsort()[::-1][: config.num_experts_per_tok]
        shares = scores[chosen]
        if config.norm_topk_prob:
            shares = shares / shares.sum()
        parts = [mlp(row, f"mlp.experts.{expert}") for expert in chosen]
        return config.routed_scaling_factor * sum(
            s * part for s, part in zip(shares, parts, strict=True)
        )

    keys, values, states = [], [], []
    for at, (e, f) in enumerate(zip(np.asarray(embedded), np.asarray(features), strict=True)):
        pair = np.concatenate([normed(e * (at > 0), "enorm"), normed(f, "hnorm")])
        x = product(pair, "eh_proj")
        row = normed(x, "input_layernorm")
        q = product(row, "self_attn.q_proj").reshape(heads, width)
        k = product(row, "self_attn.k_proj").reshape(kv_heads, width)
        values.append(product(row, "self_attn.v_proj").reshape(kv_heads, width))
        q, k = normed(q, "self_attn.q_norm"), normed(k, "self_attn.k_norm")
        keys.append(turned(k, at))
        q, seen = turned(q, at), []
        for head in range(heads):
            shared = head * kv_heads // heads
            scores = np.array([key[shared] @ q[head] for key in keys]) / width**0.5
            shares = np.exp(scores - scores.max())
            shares /= shares.sum()
            seen.append(sum(s * value[shared] for s, value in zip(shares, values, strict=True)))
        x = x + product(np.concatenate(seen), "self_attn.o_proj")
        row = normed(x, "post_attention_layernorm")
        states.append(x + routed(row) + mlp(row, "mlp.shared_experts"))
    said = [product(normed(h, "shared_head.norm"), "shared_head.head") for h in states]
    return {"feature": np.stack(states), "scores": np.stack(said)}
