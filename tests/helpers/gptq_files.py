"""GPTQ checkpoints written and read a second time, from the format's description, in plain numpy.

Nothing of speq's own packing is used here: a mistake would have to be made twice.
"""

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.picture_files import PREFIX
from tests.helpers.tiny_models import EXPERTS_BELOW, experts_alone

FIELDS = ("qweight", "qzeros", "scales", "g_idx")
OLD_NAMES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


@dataclass(frozen=True)
class Packing:
    """How a checkpoint is written.

    names   "new", "old" (block_sparse_moe, w1), "fused" (gate_up_proj for each expert) or
            "stacked" (3-D gate_up_proj and down_proj)
    files   "single", "sharded" or "autogptq" (its file name, and quantize_config.json alone)
    """

    version: int = 1
    desc_act: bool = False
    group_size: int = 32
    names: str = "new"
    files: str = "single"

    @property
    def config(self) -> dict[str, Any]:
        return {
            "bits": 4,
            "group_size": self.group_size,
            "desc_act": self.desc_act,
            "sym": True,
            "quant_method": "gptq",
            "checkpoint_format": {1: "gptq", 2: "gptq_v2"}[self.version],
            "damp_percent": 0.01,
        }


def words(values: np.ndarray) -> np.ndarray:
    """[..., 8] numbers of 0 to 15, the first lowest, as one int32 each."""
    out = np.zeros(values.shape[:-1], dtype=np.uint32)
    for at in range(8):
        out |= values[..., at].astype(np.uint32) << np.uint32(4 * at)
    return out.view(np.int32)


def digit(word: int, at: int) -> int:
    """Number `at` of a word, as Python counts."""
    return ((word % (1 << 32)) // 16**at) % 16


def packed_inputs(codes: np.ndarray) -> np.ndarray:
    """[K, N] codes as qweight [K / 8, N]."""
    return words(codes.reshape(-1, 8, codes.shape[1]).transpose(0, 2, 1))


def packed_zeros(zeros: np.ndarray, version: int) -> np.ndarray:
    """[groups, N] zero points as qzeros [groups, N / 8], as GPTQModel writes them."""
    packed = words(zeros.reshape(len(zeros), -1, 8))
    if version == 2:
        return packed
    less = (packed.astype(np.int64) - 0x11111111) % (1 << 32)
    return less.astype(np.uint32).view(np.int32)


def groups_of(columns: int, packing: Packing, rng: np.random.Generator) -> np.ndarray:
    """g_idx [K]."""
    size = columns if packing.group_size == -1 else min(packing.group_size, columns)
    groups = np.arange(columns) // size
    return rng.permutation(groups) if packing.desc_act else groups


def packed(weight: np.ndarray, g_idx: np.ndarray, version: int) -> dict[str, np.ndarray]:
    """weight [N, K] rounded to nearest, and packed."""
    rows, columns = weight.shape
    groups = int(g_idx.max()) + 1
    codes = np.zeros((columns, rows), dtype=np.int64)
    scales = np.zeros((groups, rows), dtype=np.float16)
    for group in range(groups):
        inside = g_idx == group
        scales[group] = np.abs(weight[:, inside]).max(1) / 7
        steps = weight[:, inside] / scales[group].astype(np.float64)[:, None]
        codes[inside] = np.clip(np.rint(steps), -8, 7).T + 8
    return {
        "qweight": packed_inputs(codes),
        "qzeros": packed_zeros(np.full((groups, rows), 8), version),
        "scales": scales,
        "g_idx": g_idx.astype(np.int32),
    }


def dequantised(parts: dict[str, np.ndarray], version: int, dtype: type = np.float16) -> np.ndarray:
    """Weights [N, K], element after element; in float16 rounded as packages do, else exact."""
    qweight, qzeros, scales = (parts[name] for name in ("qweight", "qzeros", "scales"))
    columns, rows = 8 * qweight.shape[0], qweight.shape[1]
    out = np.zeros((rows, columns), dtype=dtype)
    less = 0x11111111 if version == 1 else 0
    zeros = [
        np.array([digit(int(group[n // 8]) + less, n % 8) for n in range(rows)]) for group in qzeros
    ]
    for k in range(columns):
        group = int(parts["g_idx"][k])
        codes = np.array([digit(int(word), k % 8) for word in qweight[k // 8]])
        out[:, k] = scales[group].astype(dtype) * (codes - zeros[group]).astype(dtype)
    return out


EXPERT = re.compile(r"layers\.(\d+)\.(?:\w+\.)?experts\.(\d+)\.(\w+)\.weight$")
# Parts of each expert by (model layer, expert, projection).
Written = dict[tuple[int, int, str], dict[str, np.ndarray]]


def write_gptq(path: Path, model: Path, packing: Packing, seed: int = 0) -> Written:
    """The model at `model` with its experts packed; what was written of each of them."""
    path.mkdir(parents=True)
    tensors = experts_alone(load_file(model / "model.safetensors"))
    written, others = pack_experts(tensors, packing, np.random.default_rng(seed))
    config = json.loads((model / "config.json").read_text())
    below = EXPERTS_BELOW.get(config["model_type"], "model.layers.{}.mlp.experts")
    experts = named(written, packing, below)
    if any(name.startswith(PREFIX) for name in others):
        experts = {PREFIX + name.removeprefix("model."): each for name, each in experts.items()}
    entries = others | experts
    if packing.files == "autogptq":
        (path / "quantize_config.json").write_text(json.dumps(packing.config))
        save_file(entries, path / f"gptq_model-4bit-{packing.group_size}g.safetensors")
    else:
        config["quantization_config"] = packing.config
        save(path, entries, 3 if packing.files == "sharded" else 1)
    (path / "config.json").write_text(json.dumps(config))
    return written


def pack_experts(
    tensors: dict[str, torch.Tensor], packing: Packing, rng: np.random.Generator
) -> tuple[Written, dict[str, torch.Tensor]]:
    written: Written = {}
    others: dict[str, torch.Tensor] = {}
    orders: dict[tuple[int, int], np.ndarray] = {}
    for name, tensor in sorted(tensors.items()):
        if ".experts." not in name or name.endswith("_bias") or name.startswith("mtp."):
            others[name] = tensor
            continue
        match = EXPERT.search(name)
        assert match is not None
        old = {new: projection for projection, new in OLD_NAMES.items()}
        layer, expert, projection = int(match[1]), int(match[2]), match[3]
        projection = old.get(projection, projection)
        weight = tensor.double().numpy()
        if projection == "down_proj":
            g_idx = groups_of(weight.shape[1], packing, rng)
        else:  # gate and up see the same inputs
            if (layer, expert) not in orders:
                orders[layer, expert] = groups_of(weight.shape[1], packing, rng)
            g_idx = orders[layer, expert]
        written[layer, expert, projection] = packed(weight, g_idx, packing.version)
    return written, others


def named(written: Written, packing: Packing, below: str) -> dict[str, torch.Tensor]:
    """Tensors by the names of a checkpoint.

    below  what experts of a layer are below
    """
    out: dict[str, torch.Tensor] = {}
    modules: dict[tuple[int, int], dict[str, dict[str, np.ndarray]]] = {}
    for (layer, expert, projection), parts in written.items():
        modules.setdefault((layer, expert), {})[projection] = parts
    for (layer, expert), projections in modules.items():
        if packing.names in ("fused", "stacked"):
            gate, up = projections.pop("gate_proj"), projections.pop("up_proj")
            both = {name: np.concatenate([gate[name], up[name]], 1) for name in FIELDS[:3]}
            projections["gate_up_proj"] = both | {"g_idx": gate["g_idx"]}
        for projection, parts in projections.items():
            prefix = f"{below.format(layer)}.{expert}.{projection}"
            if packing.names == "old":
                block = f"model.layers.{layer}.block_sparse_moe"
                prefix = f"{block}.experts.{expert}.{OLD_NAMES[projection]}"
            for field, value in parts.items():
                out[f"{prefix}.{field}"] = torch.from_numpy(value.copy())
    return stacked(out, modules, below) if packing.names == "stacked" else out


def stacked(entries: dict[str, torch.Tensor], experts: Any, below: str) -> dict[str, torch.Tensor]:
    layers = sorted({layer for layer, _ in experts})
    count = 1 + max(expert for _, expert in experts)
    out = {}
    for layer in layers:
        for module in ("gate_up_proj", "down_proj"):
            for field in FIELDS:
                block = below.format(layer)
                each = [entries[f"{block}.{expert}.{module}.{field}"] for expert in range(count)]
                out[f"{block}.{module}.{field}"] = torch.stack(each)
    return out


def save(path: Path, entries: dict[str, torch.Tensor], shards: int = 1) -> None:
    """One file, or several and an index, with an expert's parts spread over them."""
    if shards == 1:
        save_file(entries, path / "model.safetensors")
        return
    names = [f"model-{at + 1:05}-of-{shards:05}.safetensors" for at in range(shards)]
    where = {name: names[at % shards] for at, name in enumerate(sorted(entries))}
    for file in names:
        save_file({n: entries[n] for n, held in where.items() if held == file}, path / file)
    index = {"metadata": {}, "weight_map": where}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def edit(path: Path, **changes: Any) -> None:
    """Change quantization_config in config.json; a setting of None is taken out."""
    config = json.loads((path / "config.json").read_text())
    settings = config["quantization_config"] | changes
    config["quantization_config"] = {k: v for k, v in settings.items() if v is not None}
    (path / "config.json").write_text(json.dumps(config))


def copy_folder(source: Path, target: Path) -> Path:
    """A copy without the drafts that other tests left there."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(".speq"))
    return target
