"""Checkpoints whose experts are in MXFP4 as gpt_oss is published, of that family and of others, and
their words from the format's definition, in numpy.
"""

import json
import re
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.tiny_models import experts_alone
from tests.reference.scaled import E2M1 as VALUES
from tests.reference.scaled import MXFP4_BLOCK as BLOCK

# Families that tests run in MXFP4.
MXFP4_FAMILIES = ("gpt_oss", "qwen3_moe")
EXPERT = re.compile(r"(.*\.experts\.)(\d+)\.(gate|up|down)_proj\.weight$")


def coded(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Nearest codes [N, K / 32, 16], scales [N, K / 32] and words [N, K] of a matrix."""
    blocks = matrix.reshape(len(matrix), -1, BLOCK)
    largest = np.abs(blocks).max(2)
    exponents = np.ceil(np.log2(np.maximum(largest, 1e-30) / VALUES[-1]))
    scaled = blocks / 2.0 ** exponents[..., None]
    codes = np.abs(np.abs(scaled)[..., None] - VALUES).argmin(-1)
    words = np.where(scaled < 0, -VALUES[codes], VALUES[codes]) * 2.0 ** exponents[..., None]
    signed = codes | (scaled < 0) << 3
    packed = signed[..., 0::2] | signed[..., 1::2] << 4
    scales = (exponents + 127).astype(np.uint8)
    return packed.astype(np.uint8), scales, words.reshape(matrix.shape).astype(np.float32)


def fused(alone: dict[str, torch.Tensor], like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of experts alone, as those of all experts of a layer that gpt_oss has."""
    made = {}
    for name, tensor in like.items():
        prefix, _, projection = name.rpartition(".")
        if f"{name}_bias" not in like:
            made[name] = alone[name]
            continue
        parts = []
        for at in range(len(tensor)):
            named = ("gate_proj", "up_proj") if projection == "gate_up_proj" else ("down_proj",)
            rows = [alone[f"{prefix}.{at}.{each}.weight"] for each in named]
            parts.append(torch.stack(rows, 1).flatten(0, 1).T)
        made[name] = torch.stack(parts).contiguous()
    return made


def write_mxfp4(path: Path, words: Path, source: Path) -> Path:
    """A model with its experts as MXFP4 in `path`, and what they stand for in `words`."""
    published: dict[str, torch.Tensor] = {}
    plain: dict[str, torch.Tensor] = {}
    experts: dict[str, dict[tuple[int, str], np.ndarray]] = defaultdict(dict)
    tensors = load_file(source / "model.safetensors")
    alone = experts_alone(tensors)
    for name, tensor in alone.items():
        match = EXPERT.match(name)
        if match is None:
            published[name] = plain[name] = tensor
        else:
            experts[match[1]][int(match[2]), match[3]] = tensor.float().numpy()
    for prefix, matrices in experts.items():
        parts: dict[str, list[np.ndarray]] = defaultdict(list)
        for expert in range(1 + max(at for at, _ in matrices)):
            gate, up, down = (matrices[expert, which] for which in ("gate", "up", "down"))
            in_turns = np.stack([gate, up], 1).reshape(-1, gate.shape[1])
            for which, matrix in (("gate_up_proj", in_turns), ("down_proj", down)):
                codes, scales, exact = coded(matrix)
                parts[f"{which}_blocks"].append(codes)
                parts[f"{which}_scales"].append(scales)
                named = {"gate": exact[0::2], "up": exact[1::2]}
                for each, rows in named.items() if which != "down_proj" else [("down", exact)]:
                    weight = torch.from_numpy(np.ascontiguousarray(rows)).bfloat16()
                    plain[f"{prefix}{expert}.{each}_proj.weight"] = weight
        for name, arrays in parts.items():
            published[prefix + name] = torch.from_numpy(np.stack(arrays))
    if alone.keys() != tensors.keys():
        plain = fused(plain, tensors)
    for folder, tensors in ((path, published), (words, plain)):
        folder.mkdir(parents=True)
        for file in source.iterdir():
            if file.suffix == ".json":
                (folder / file.name).write_bytes(file.read_bytes())
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (path / "config.json").write_text(json.dumps(config))
    return path
