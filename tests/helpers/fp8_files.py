"""Checkpoints in FP8 as they are published, and their words from the format's definition."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.reference.scaled import FP8_BLOCK as BLOCK
from tests.reference.scaled import e4m3_values, fp8_words

SETTINGS = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
}
# Families that tests run in FP8, and their options.
# Sizes that are several blocks, the last of which are shorter.
LARGER = {"hidden_size": 160, "moe_intermediate_size": 144}
FP8_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": LARGER,
    "deepseek_v3": {},
    "minimax_m2": {"hidden_size": 160, "intermediate_size": 144},
    "laguna": {},
    "hy_v3": {},
    "step3p7": {},
    "glm5_next": {},
}
# What publishers leave in 16 bits.
LEFT = re.compile(
    r"embed_tokens|embeddings|lm_head|norm|\.gate\.weight$|\.bias$|router|correction|eh_proj|"
    r"shared_head|visual|conv1d|compress|\.hc_"
)


def words_of(
    codes: np.ndarray, scales: np.ndarray, blocks: tuple[int, int] = (BLOCK, BLOCK)
) -> torch.Tensor:
    """The bfloat16 words of codes [N, K] uint8 under scales of their blocks, float32."""
    words = fp8_words(codes, scales, blocks)
    return torch.from_numpy(words.view(np.int16)).view(torch.bfloat16)


def coded(
    matrix: torch.Tensor, scale_dtype: torch.dtype, blocks: tuple[int, int] = (BLOCK, BLOCK)
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales and words of a matrix, or of many: each block's largest weight has the largest
    code.
    """
    if matrix.dim() == 3:
        made = [coded(each, scale_dtype, blocks) for each in matrix]
        all_codes, all_scales, words = (torch.stack(parts) for parts in zip(*made, strict=True))
        return all_codes, all_scales, words
    values = matrix.float().numpy()
    rows, columns = values.shape
    down, across = blocks[0] or rows, blocks[1] or columns
    positive = e4m3_values()[:127]
    scales = np.ones((-(-rows // down), -(-columns // across)), np.float32)
    codes = np.zeros((rows, columns), np.uint8)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = np.s_[i * down : (i + 1) * down, j * across : (j + 1) * across]
            block = values[part]
            scale = torch.tensor(np.abs(block).max() / 448).to(scale_dtype).float().numpy()
            scales[i, j] = scale
            middles = (positive[1:] + positive[:-1]) / 2
            codes[part] = np.searchsorted(middles, np.abs(block) / scale) | (block < 0) << 7
    stored = torch.from_numpy(scales).to(scale_dtype)
    as_codes = torch.from_numpy(codes).view(torch.float8_e4m3fn)
    return as_codes, stored, words_of(codes, stored.float().numpy(), blocks)


@dataclass(frozen=True)
class Publisher:
    """How a publisher writes FP8.

    blocks   of rows and columns that share a scale; 0: all
    scales   ends of their names
    shape    of stored scales; None: [blocks down, blocks across]
    settings quantization_config
    inputs   whether scales of inputs are there too
    """

    settings: dict[str, Any]
    blocks: tuple[int, int] = (BLOCK, BLOCK)
    scales: str = "_scale"
    dtype: torch.dtype = torch.float32
    shape: tuple[int, ...] | None = None
    inputs: bool = False


# How inputs are quantised.
DYNAMIC, STATIC = (
    {"strategy": "token", "dynamic": True},
    {"strategy": "tensor", "dynamic": False},
)


def of_compressed(
    strategy: str, inputs: dict[str, Any] | None = None, **others: Any
) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False} | others
    weights |= {"strategy": strategy}
    if strategy == "block":
        weights |= {"block_structure": [BLOCK, BLOCK]}
    activations = {"num_bits": 8, "type": "float"} | (inputs or DYNAMIC)
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


PUBLISHERS = {
    "blocks": Publisher(SETTINGS, scales="_scale_inv"),
    "bfloat16 blocks": Publisher(SETTINGS, scales="_scale_inv", dtype=torch.bfloat16),
    "squares of 32": Publisher(
        SETTINGS | {"weight_block_size": [32, 32]}, (32, 32), "_scale_inv", torch.float8_e8m0fnu
    ),
    "squares of 64": Publisher(SETTINGS | {"weight_block_size": [64, 64]}, (64, 64), "_scale_inv"),
    "groups": Publisher(of_compressed("group", group_size=32), (1, 32), dtype=torch.bfloat16),
    "powers of 2": Publisher(
        *(SETTINGS | {"scale_fmt": "ue8m0"}, (BLOCK, BLOCK), "_scale_inv", torch.float8_e8m0fnu)
    ),
    "channel": Publisher(of_compressed("channel"), (1, 0), dtype=torch.bfloat16),
    "tensor": Publisher(of_compressed("tensor", STATIC), (0, 0), shape=(1,), inputs=True),
    "compressed blocks": Publisher(of_compressed("block"), dtype=torch.bfloat16),
    "autofp8": Publisher(
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        *((0, 0), "_scale", torch.float32, (), True),
    ),
    "modelopt": Publisher(
        {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": None},
        *((0, 0), "_scale", torch.float32, (), True),
    ),
}


def write_fp8(
    path: Path,
    words: Path,
    source: Path,
    scale_dtype: torch.dtype = torch.float32,
    publisher: Publisher | None = None,
) -> Path:
    """A model of 16 or 32 bits as FP8 in `path`, and the words that this stands for in `words`."""
    by = publisher or Publisher(SETTINGS, scales="_scale_inv", dtype=scale_dtype)
    published: dict[str, torch.Tensor] = {}
    plain: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if tensor.dim() not in (2, 3) or LEFT.search(name):
            published[name] = plain[name] = tensor
            continue
        published[name], scales, plain[name] = coded(tensor, by.dtype, by.blocks)
        shape = scales.shape if by.shape is None else by.shape
        published[f"{name}{by.scales}"] = scales.reshape(shape)
        if by.inputs:
            published[f"{name.removesuffix('.weight')}.input_scale"] = torch.tensor(0.5)
    for folder, tensors in ((path, published), (words, plain)):
        folder.mkdir(parents=True, exist_ok=True)
        for file in source.iterdir():
            if file.suffix == ".json":
                (folder / file.name).write_bytes(file.read_bytes())
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = by.settings
    config["dtype"] = "bfloat16"
    (path / "config.json").write_text(json.dumps(config))
    return path
