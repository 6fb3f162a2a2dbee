"""A layer that predicts tokens ahead (MTP), added to a small checkpoint as its family is published,
and what such a layer computes: of glm4_moe in numpy, of all by transformers' own decoder layer.
"""

import importlib
import json
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from tests.helpers.picture_files import fused, stored_tensors

FILE = "model.safetensors"


@dataclass(frozen=True)
class Layout:
    """Where a small checkpoint of three layers has such a layer, and what is its family's own.

    parts    names of: the decoder layer, the norms of embeddings and of hidden states, what both go
             into, the last norm
    like     the layer of the model that has the same tensors
    classes, rotary  what names of transformers' classes begin with, and the rest of that of
             positions
    copies   names of copies of the model's embedding and head
    zeroed   whether the embedding of the first entry is 0
    passed_normed  whether the next hidden state is what comes out of the last norm
    centre   what weights of norms lie around
    window   tokens that a row sees, its own included, in layers with windows; None: all
    settings  of config.json
    """

    parts: tuple[str, str, str, str, str]
    like: int
    classes: str
    rotary: str = "RotaryEmbedding"
    copies: tuple[str, ...] = ()
    zeroed: bool = False
    passed_normed: bool = False
    centre: float = 1.0
    window: int | None = None
    settings: dict[str, int] = field(default_factory=lambda: {"num_nextn_predict_layers": 1})

    @property
    def others(self) -> tuple[str, ...]:
        """Names of all tensors of its own but the decoder layer's."""
        own = (name for name in self.parts[1:] if name != "model.norm")
        return tuple(f"{name}.weight" for name in (*own, *self.copies))


def behind(classes: str) -> Layout:
    at = "model.layers.3"
    names = (at, f"{at}.enorm", f"{at}.hnorm", f"{at}.eh_proj", f"{at}.shared_head.norm")
    copies = (f"{at}.embed_tokens", f"{at}.shared_head.head")
    return Layout(names, 2, classes, copies=copies, zeroed=True)


def apart(
    classes: str, rotary: str, like: int = 0, centre: float = 0.0, window: int | None = None
) -> Layout:
    norms = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden")
    return Layout(
        ("mtp.layers.0", *norms, "mtp.fc", "mtp.norm"),
        like,
        classes,
        rotary,
        passed_normed=True,
        centre=centre,
        window=window,
        settings={"mtp_num_hidden_layers": 1},
    )


HY_V3_PARTS = ("", ".enorm", ".hnorm", ".eh_proj", ".final_layernorm")
LAYOUTS = {
    "hy_v3": Layout(
        *(tuple(f"model.layers.3{each}" for each in HY_V3_PARTS), 2, "HYV3"),
        zeroed=True,
        passed_normed=True,
    ),
    "glm4_moe": behind("Glm4Moe"),
    "glm4_moe_lite": behind("Glm4MoeLite"),
    "deepseek_v3": behind("DeepseekV3"),
    "qwen3_next": apart("Qwen3Next", "RotaryEmbedding"),
    "qwen3_5_moe": apart("Qwen3_5Moe", "TextRotaryEmbedding"),
    "mellum": apart("Mellum", "RotaryEmbedding", centre=1.0, window=24),
    "ernie4_5_moe": Layout(
        (
            "model.mtp_block.0",
            "model.mtp_emb_norm.0",
            "model.mtp_hidden_norm.0",
            "model.mtp_linear_proj.0",
            "model.norm",
        ),
        0,
        "Ernie4_5_Moe",
        passed_normed=True,
    ),
}


def layout_of(model: Path) -> Layout:
    return LAYOUTS[json.loads((model / "config.json").read_text())["model_type"]]


def own_tensors(model: Path) -> dict[str, Tensor]:
    """Those of the layer, but for copies of the model's."""
    layout = layout_of(model)
    tensors = load_file(model / FILE)
    of_copies = {f"{name}.weight" for name in layout.copies}
    names = {name for name in tensors if name.startswith(f"{layout.parts[0]}.")} | {*layout.others}
    return {name: tensors[name] for name in names - of_copies}


def write_mtp(path: Path, model: Path, seed: int = 0, own: tuple[str, ...] = ()) -> Path:
    """A copy of a model with such a layer, of random words.

    own  of "embed_tokens" and "shared_head.head": those that are not the model's own
    """
    shutil.copytree(model, path, ignore=shutil.ignore_patterns(".speq"))
    layout = layout_of(path)
    config = json.loads((path / "config.json").read_text())
    of_text = config.get("text_config", config)
    of_text |= layout.settings
    (path / "config.json").write_text(json.dumps(config))
    tensors, plain = load_file(path / FILE), stored_tensors(path)
    generator = torch.Generator().manual_seed(seed)

    def like(tensor: Tensor, scale: float = 1.0) -> Tensor:
        drawn = torch.randn(tensor.shape, generator=generator)
        of_norm = tensor.dim() == 1
        drawn = layout.centre + 0.2 * drawn if of_norm else drawn * tensor.shape[-1] ** -0.5
        return (scale * drawn).to(tensor.dtype)

    decoder, *norms, projection, last = layout.parts
    before = re.compile(rf"^model\.(language_model\.)?layers\.{layout.like}\.")
    added = {
        before.sub(f"{decoder}.", name): like(tensor)
        for name, tensor in tensors.items()
        if before.match(name)
    }
    norm = plain["model.norm.weight"]
    for name in (*norms, last):
        if name != "model.norm":
            added[f"{name}.weight"] = like(norm)
    size = len(norm)
    added[f"{projection}.weight"] = like(norm.new_empty(size, 2 * size))
    ends = (plain["model.embed_tokens.weight"], plain["lm_head.weight"])
    for name, same in zip(layout.copies, ends, strict=False):
        is_own = name.endswith(own) if own else False
        added[f"{name}.weight"] = like(same, 3.0) if is_own else same.clone()
    kept = {name: each for name, each in tensors.items() if not name.startswith("mtp.")}
    save_file(kept | added, path / FILE, metadata={"format": "pt"})
    return path


class PlainMtp:
    """Such a layer in float64: transformers' decoder layer with its own experts, over a whole text
    at once, and what lies around it.

    words  the checkpoint, of 16 or 32 bits
    """

    def __init__(self, words: Path) -> None:
        self.layout = layout = layout_of(words)
        model_type = json.loads((words / "config.json").read_text())["model_type"]
        config: Any = AutoConfig.from_pretrained(words).get_text_config()
        config._attn_implementation = config._experts_implementation = "eager"
        self.epsilon = config.rms_norm_eps
        # Of layers whose rotary embeddings differ.
        self.kinds = [] if layout.window is None else [config.layer_types[layout.like]]
        self.window = layout.window if self.kinds == ["sliding_attention"] else None
        tensors = {name: each.double() for name, each in fused(stored_tensors(words)).items()}
        module = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
        decoder: Any = getattr(module, f"{layout.classes}DecoderLayer")(config, layout.like)
        self.rotary = getattr(module, layout.classes + layout.rotary)(config)
        prefix = f"{layout.parts[0]}."
        inside = {
            name.removeprefix(prefix): each
            for name, each in tensors.items()
            if name.startswith(prefix) and name not in layout.others
        }
        self.decoder = decoder.double().eval()
        self.decoder.load_state_dict(inside)
        _, *names = (f"{name}.weight" for name in layout.parts)
        self.enorm, self.hnorm, self.projection, self.last = (tensors[name] for name in names)
        self.table, self.head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
        if layout.copies:
            self.table, self.head = (tensors[f"{name}.weight"] for name in layout.copies)

    def normed(self, rows: Tensor, weight: Tensor) -> Tensor:
        mean = (rows**2).mean(-1, keepdim=True)
        return rows / (mean + self.epsilon).sqrt() * (weight + 1 - self.layout.centre)

    @torch.no_grad()
    def __call__(self, token_ids: list[int], features: Tensor) -> tuple[Tensor, Tensor]:
        """Entries from position 0 on: what takes the place of features [T, H], scores [T, V].

        token_ids  of the embeddings; features: [T, H] of the tokens before them
        """
        embedded, features = self.table[token_ids], features.double()
        if self.layout.zeroed:
            embedded[0] = 0
        pair = [self.normed(embedded, self.enorm), self.normed(features, self.hnorm)]
        x = (torch.cat(pair, -1) @ self.projection.T)[None]
        count = len(token_ids)
        mask = torch.full((count, count), float("-inf"), dtype=torch.float64).triu(1)
        if self.window is not None:
            mask = mask + torch.full_like(mask, float("-inf")).tril(-self.window)
        positions = torch.arange(count)[None]
        if hasattr(self.rotary, "mrope_section"):  # transformers 5.17 wants all three kinds
            positions = positions.expand(3, 1, count)
        hidden = self.decoder(
            x,
            attention_mask=mask[None, None],
            position_embeddings=self.rotary(x, positions, *self.kinds),
        )[0]
        normed = self.normed(hidden, self.last)
        return (normed if self.layout.passed_normed else hidden), normed @ self.head.T


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
