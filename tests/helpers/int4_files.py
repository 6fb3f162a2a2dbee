"""Checkpoints in INT4 as compressed-tensors publishes them, and their words by the format's
definition, in numpy.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.tiny_models import experts_alone
from tests.reference.packed_int4 import OFFSET, packed, words

EXPERT = re.compile(r"\.experts\.\d+\.\w+\.weight$")
# What quantisers leave as it is, routers among them.
LEFT = re.compile(r"embed_tokens|lm_head|norm|\.gate\.|shared_expert_gate|bias$")


@dataclass(frozen=True)
class Packed:
    """A matrix as it is published, by the ends of its names, and its words [N, K]."""

    tensors: dict[str, torch.Tensor]
    plain: torch.Tensor


def packed_matrix(matrix: np.ndarray, group: int, symmetric: bool) -> Packed:
    """The nearest codes of a matrix [N, K] in groups of neighbours."""
    rows, columns = matrix.shape
    groups = matrix.reshape(rows, -1, group)
    if symmetric:
        scales, zeros = np.abs(groups).max(2) / 7.5, None
    else:
        least, most = groups.min(2).clip(max=0), groups.max(2).clip(min=0)
        scales = (most - least) / 15
    scales = torch.from_numpy(np.maximum(scales, 1e-8)).bfloat16()
    factors = scales.float().numpy()
    if not symmetric:
        zeros = np.rint(-least / factors).clip(0, 15).astype(np.int64)
    by = OFFSET if zeros is None else zeros[..., None]
    codes = np.rint(groups / factors[..., None] + by).clip(0, 15).astype(np.int64)
    codes = codes.reshape(rows, columns)
    tensors = {
        "weight_packed": torch.from_numpy(packed(codes)),
        "weight_scale": scales,
        "weight_shape": torch.tensor([rows, columns]),
    }
    if zeros is not None:
        tensors["weight_zero_point"] = torch.from_numpy(packed(zeros.T).T.copy())
    plain = torch.from_numpy(words(codes, factors, zeros).view(np.int16)).view(torch.bfloat16)
    return Packed(tensors, plain)


def quantization_config(group: int, symmetric: bool, ignore: list[str]) -> dict[str, Any]:
    """As compressed-tensors writes it."""
    weights = {
        **{"actorder": None, "block_structure": None, "dynamic": False, "group_size": group},
        **{"num_bits": 4, "observer": "minmax", "observer_kwargs": {}, "strategy": "group"},
        **{"symmetric": symmetric, "type": "int"},
    }
    modules = {"input_activations": None, "output_activations": None, "targets": ["Linear"]}
    return {
        "config_groups": {"group_0": modules | {"weights": weights}},
        **{"format": "pack-quantized", "global_compression_ratio": None, "ignore": ignore},
        **{"kv_cache_scheme": None, "quant_method": "compressed-tensors"},
        "quantization_status": "compressed",
    }


def write_int4(
    path: Path, words_path: Path, source: Path, group: int, symmetric: bool, dense: bool
) -> Path:
    """A model in INT4 in `path`, and what it stands for in `words_path`.

    dense  whether dense layers are in INT4 as well, beside the experts
    """
    published: dict[str, torch.Tensor] = {}
    plain: dict[str, torch.Tensor] = {}
    for name, tensor in experts_alone(load_file(source / "model.safetensors")).items():
        codes = EXPERT.search(name) or (dense and tensor.dim() == 2 and not LEFT.search(name))
        if not codes or tensor.shape[1] % group:
            published[name] = plain[name] = tensor
            continue
        made = packed_matrix(tensor.float().numpy(), group, symmetric)
        published |= {name.removesuffix("weight") + end: each for end, each in made.tensors.items()}
        plain[name] = made.plain
    for folder, tensors in ((path, published), (words_path, plain)):
        folder.mkdir(parents=True)
        for file in source.iterdir():
            if file.suffix == ".json":
                (folder / file.name).write_bytes(file.read_bytes())
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    ignore = ["lm_head"] if dense else ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$"]
    config["quantization_config"] = quantization_config(group, symmetric, ignore)
    (path / "config.json").write_text(json.dumps(config))
    return path
