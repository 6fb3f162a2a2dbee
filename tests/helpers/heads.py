"""Draft heads of small models, and what a head computes, a second time in numpy."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from speq.heads.head_file import head_path, model_digest, write_head
from speq.heads.head_shape import HeadShape, NamedLayers
from speq.heads.moe_head import MoEHead
from speq.models.opened import open_model


def random_head(shape: HeadShape, seed: int = 0) -> MoEHead:
    """Weights that are random throughout, gates and norms among them."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, size in shape.tensors():
        drawn = torch.randn(size, generator=generator)
        weights[name] = 1 + 0.2 * drawn if name.endswith("norm") else drawn * size[-1] ** -0.5
    return MoEHead(shape, weights)


def write_random_head(
    model: Path, seed: int = 0, stand: tuple[float, ...] = (), names: bool = False, **sizes: Any
) -> Path:
    """A head that knows nothing, beside its model, where drafter head finds it.

    stand  what it says of its drafts
    names  whether it names experts, of every second layer from the first on
    """
    opened = open_model(model)
    digest = model_digest(opened.checkpoint, opened.family.names)
    hidden_size, experts = opened.shape.hidden_size, opened.shape.experts
    layers = tuple(range(0, len(experts.layers), 2))
    named = NamedLayers(layers, experts.num_experts, opened.shape.top_k) if names else None
    opened.close()
    given = {"width": 32, "window": 48, "named": named} | sizes
    shape = HeadShape(hidden_size, **given)
    path, head = head_path(model), random_head(shape, seed)
    head.acceptance_rates = stand
    path.parent.mkdir(parents=True, exist_ok=True)
    write_head(path, head, digest, torch.float32)
    return path


def head_in_numpy(head: MoEHead, embedded: Any, features: Any) -> dict[str, Any]:
    """Rows [T, H] that follow one another from position 0 on, one at a time, in float64."""
    shape = head.shape
    w = {name: weight.double().numpy() for name, weight in head.weights().items()}
    e, f = (np.asarray(rows, dtype=np.float64) for rows in (embedded, features))

    def normed(rows: Any, name: str) -> Any:
        return rows / np.sqrt((rows**2).mean(-1, keepdims=True) + 1e-6) * w[f"{name}_norm"]

    def softmax(rows: Any) -> Any:
        powers = np.exp(rows - rows.max(-1, keepdims=True))
        return powers / powers.sum(-1, keepdims=True)

    count, width = len(e), shape.head_width
    x = np.concatenate([normed(e, "embedding"), normed(f, "feature")], 1) @ w["enter"].T
    qkv = (normed(x, "attention") @ w["qkv"].T).reshape(count, 3, shape.num_heads, width)

    def turned(row: Any, at: int) -> Any:
        out = row.copy()
        for pair in range(width // 2):
            angle = at * 10_000.0 ** (-2 * pair / width)
            turn = complex(np.cos(angle), np.sin(angle))
            both = turn * (row[..., pair] + 1j * row[..., pair + width // 2])
            out[..., pair], out[..., pair + width // 2] = both.real, both.imag
        return out

    queries, keys = (np.stack([turned(qkv[t, part], t) for t in range(count)]) for part in (0, 1))
    seen = np.zeros_like(x)
    for t in range(count):
        first = max(t + 1 - shape.window, 0)
        for h in range(shape.num_heads):
            shares = softmax(keys[first : t + 1, h] @ queries[t, h] / width**0.5)
            seen[t, h * width : (h + 1) * width] = shares @ qkv[first : t + 1, 2, h]
    u = x + seen @ w["output"].T
    added = []
    for branch in range(shape.branches):
        gate, up = np.split(normed(u, "branch") @ w[f"gate_up.{branch}"].T, 2, axis=1)
        added.append((gate / (1 + np.exp(-gate)) * up) @ w[f"down.{branch}"].T)
    branches = np.stack([u + each for each in added], 1)
    mixing = softmax(u @ w["gate"].T)
    found = {
        "branches": branches,
        "mixing": mixing,
        "feature": (mixing[..., None] * branches).sum(1),
    }
    if shape.contrast:
        s = 1.5 * softmax(u @ w["contrast"].T + w["contrast_bias"])
        found["after"] = u + s[:, :1] * added[0] - s[:, 1:] * added[1]
    return found
