"""Checkpoints in FP8 as they are published, and their words from the format's definition."""

import json
import re
from pathlib import Path

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
# What publishers leave in 16 bits.
LEFT = re.compile(
    r"embed_tokens|lm_head|norm|\.gate\.weight$|\.bias$|router|correction|eh_proj|shared_head"
)


def words_of(codes: np.ndarray, scales: np.ndarray) -> torch.Tensor:
    """The bfloat16 words of codes [N, K] uint8 under scales of their blocks, float32."""
    words = fp8_words(codes, scales)
    return torch.from_numpy(words.view(np.int16)).view(torch.bfloat16)


def coded(
    matrix: torch.Tensor, scale_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales and words of a matrix: each block's largest weight has the largest code."""
    values = matrix.float().numpy()
    rows, columns = values.shape
    positive = e4m3_values()[:127]
    scales = np.ones((-(-rows // BLOCK), -(-columns // BLOCK)), np.float32)
    codes = np.zeros((rows, columns), np.uint8)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = np.s_[i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK]
            block = values[part]
            scale = torch.tensor(np.abs(block).max() / 448).to(scale_dtype).float().numpy()
            scales[i, j] = scale
            middles = (positive[1:] + positive[:-1]) / 2
            codes[part] = np.searchsorted(middles, np.abs(block) / scale) | (block < 0) << 7
    stored = torch.from_numpy(scales).to(scale_dtype)
    as_codes = torch.from_numpy(codes).view(torch.float8_e4m3fn)
    return as_codes, stored, words_of(codes, stored.float().numpy())


def write_fp8(
    path: Path, words: Path, source: Path, scale_dtype: torch.dtype = torch.float32
) -> Path:
    """A model of 16 or 32 bits as FP8 in `path`, and the words that this stands for in `words`."""
    published: dict[str, torch.Tensor] = {}
    plain: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if tensor.dim() != 2 or LEFT.search(name):
            published[name] = plain[name] = tensor
            continue
        published[name], published[f"{name}_scale_inv"], plain[name] = coded(tensor, scale_dtype)
    for folder, tensors in ((path, published), (words, plain)):
        folder.mkdir(parents=True, exist_ok=True)
        for file in source.iterdir():
            if file.suffix == ".json":
                (folder / file.name).write_bytes(file.read_bytes())
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = SETTINGS
    config["dtype"] = "bfloat16"
    (path / "config.json").write_text(json.dumps(config))
    return path
