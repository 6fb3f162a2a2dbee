"""Checkpoints in INT4 as publishers pack it, and their words by definition, in numpy."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.tiny_models import experts_alone
from tests.reference.packed_int4 import OFFSET, packed, packed_awq, packed_gptq, words

EXPERT = re.compile(r"\.experts\.\d+\.\w+\.weight$")
# What quantisers leave as it is, routers among them.
LEFT = re.compile(r"embed_tokens|lm_head|norm|\.gate\.|shared_expert_gate|bias$")


@dataclass(frozen=True)
class Int4Kind:
    """How a checkpoint is packed.

    symmetric  whether all zero points are 8
    dense      whether dense layers are in INT4 as well, beside the experts
    packing    compressed-tensors, gptq, gptq_v2 or awq
    halves     whether scales are float16; those of GPTQ and AWQ always are
    """

    group: int
    symmetric: bool
    dense: bool
    packing: str = "compressed-tensors"
    halves: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of scales."""
        halves = self.halves or self.packing != "compressed-tensors"
        return torch.float16 if halves else torch.bfloat16


@dataclass(frozen=True)
class Packed:
    """A matrix as it is published, by the ends of its names, and its words [N, K]."""

    tensors: dict[str, torch.Tensor]
    plain: torch.Tensor


def packed_matrix(matrix: np.ndarray, kind: Int4Kind) -> Packed:
    """The nearest codes of a matrix [N, K] in groups of neighbours."""
    rows, columns = matrix.shape
    groups = matrix.reshape(rows, -1, kind.group)
    if kind.symmetric:
        scales = np.abs(groups).max(2) / 7.5
    else:
        least, most = groups.min(2).clip(max=0), groups.max(2).clip(min=0)
        scales = (most - least) / 15
    scales = torch.from_numpy(np.maximum(scales, 1e-6)).to(kind.dtype)
    factors = scales.float().numpy()
    zeros = np.full(scales.shape, OFFSET)
    if not kind.symmetric:
        zeros = np.rint(-least / factors).clip(0, 15).astype(np.int64)
    codes = np.rint(groups / factors[..., None] + zeros[..., None]).clip(0, 15).astype(np.int64)
    codes = codes.reshape(rows, columns)
    plain = torch.from_numpy(words(codes, factors, zeros).view(np.int16)).view(torch.bfloat16)
    return Packed(published_tensors(codes, scales, zeros, kind), plain)


def published_tensors(
    codes: np.ndarray, scales: torch.Tensor, zeros: np.ndarray, kind: Int4Kind
) -> dict[str, torch.Tensor]:
    """A module's tensors of codes [N, K], scales and zero points [N, G]."""
    if kind.packing == "compressed-tensors":
        tensors = {
            "weight_packed": torch.from_numpy(packed(codes)),
            "weight_scale": scales,
            "weight_shape": torch.tensor(codes.shape),
        }
        if not kind.symmetric:
            tensors["weight_zero_point"] = torch.from_numpy(packed(zeros.T).T.copy())
        return tensors
    if kind.packing == "awq":
        qweight, qzeros = packed_awq(codes, zeros)
        others = {}
    else:
        qweight, qzeros = packed_gptq(codes, zeros, int(kind.packing == "gptq"))
        others = {"g_idx": torch.arange(codes.shape[1], dtype=torch.int32) // kind.group}
    return {
        "qweight": torch.from_numpy(qweight),
        "qzeros": torch.from_numpy(qzeros),
        "scales": scales.t().contiguous(),
    } | others


def quantization_config(kind: Int4Kind) -> dict[str, Any]:
    """As compressed-tensors, GPTQModel and AutoAWQ write it."""
    if kind.packing == "awq":
        return {
            **{"bits": 4, "group_size": kind.group, "modules_to_not_convert": ["gate"]},
            **{"quant_method": "awq", "version": "gemm", "zero_point": True},
        }
    if kind.packing != "compressed-tensors":
        return {
            **{"bits": 4, "checkpoint_format": kind.packing, "desc_act": False},
            **{"dynamic": {"-:.*mlp.gate$": {}}, "group_size": kind.group, "lm_head": False},
            **{"pack_dtype": "int32", "quant_method": "gptq", "sym": kind.symmetric},
            "meta": {"damp_percent": 0.05, "quantizer": ["gptqmodel:7.7.0"]},
        }
    weights = {
        **{"actorder": None, "block_structure": None, "dynamic": False, "group_size": kind.group},
        **{"num_bits": 4, "observer": "minmax", "observer_kwargs": {}, "strategy": "group"},
        **{"symmetric": kind.symmetric, "type": "int"},
    }
    modules = {"input_activations": None, "output_activations": None, "targets": ["Linear"]}
    ignore = ["lm_head"] if kind.dense else ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$"]
    return {
        "config_groups": {"group_0": modules | {"weights": weights}},
        **{"format": "pack-quantized", "global_compression_ratio": None, "ignore": ignore},
        **{"kv_cache_scheme": None, "quant_method": "compressed-tensors"},
        "quantization_status": "compressed",
    }


def write_int4(path: Path, words_path: Path, source: Path, kind: Int4Kind) -> Path:
    """A model in INT4 in `path`, and what it stands for in `words_path`."""
    published: dict[str, torch.Tensor] = {}
    plain: dict[str, torch.Tensor] = {}
    for name, tensor in experts_alone(load_file(source / "model.safetensors")).items():
        codes = EXPERT.search(name) or (kind.dense and tensor.dim() == 2 and not LEFT.search(name))
        if not codes or tensor.shape[1] % kind.group or tensor.shape[0] % 8:
            published[name] = plain[name] = tensor
            continue
        made = packed_matrix(tensor.float().numpy(), kind)
        published |= {name.removesuffix("weight") + end: each for end, each in made.tensors.items()}
        plain[name] = made.plain
    for folder, tensors in ((path, published), (words_path, plain)):
        folder.mkdir(parents=True)
        for file in source.iterdir():
            if file.suffix == ".json":
                (folder / file.name).write_bytes(file.read_bytes())
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = quantization_config(kind)
    (path / "config.json").write_text(json.dumps(config))
    return path
