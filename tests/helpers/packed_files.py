"""Checkpoints in INT4 and NVFP4 as publishers pack them, and their words, in numpy."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.mxfp4_files import coded as mxfp4_codes
from tests.helpers.tiny_models import experts_alone
from tests.reference.packed_int4 import OFFSET, packed, packed_awq, packed_gptq
from tests.reference.scaled import (
    E2M1,
    MXFP4_BLOCK,
    NVFP4_BLOCK,
    bfloat16_bits,
    e4m3_values,
    nvfp4_words,
)

EXPERT = re.compile(r"\.experts\.\d+\.\w+\.weight$")
# What quantisers leave as it is, routers among them.
LEFT = re.compile(r"embed_tokens|embeddings|lm_head|norm|\.gate\.|shared_expert_gate|bias$")


@dataclass(frozen=True)
class Packed:
    """A matrix as it is published, by the ends of its names, and its words [N, K]."""

    tensors: dict[str, torch.Tensor]
    plain: torch.Tensor


@dataclass(frozen=True)
class Int4Kind:
    """How a checkpoint is packed.

    symmetric  whether all zero points are 8
    dense      whether dense layers are in INT4 as well, beside the experts
    packing    compressed-tensors, gptq, gptq_v2 or awq
    halves     whether scales are float16; those of GPTQ and AWQ always are
    order      "static": groups are of neighbours before the inputs are put in another order, as
               act-order with static groups; "uneven": any, of groups that differ in size; else none
    """

    group: int
    symmetric: bool
    dense: bool
    packing: str = "compressed-tensors"
    halves: bool = False
    order: str = ""

    @property
    def codec(self) -> str:
        """Codec of the experts: words where no kernel multiplies the codes."""
        return "raw" if self.order or self.group % 32 or self.group < 0 else "int4"

    def takes(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether a matrix is put into codes."""
        rows, columns = tensor.shape
        group = columns if self.group < 0 else self.group
        return coded(name, self.dense) and rows % 8 == 0 and columns % group == 0

    def groups(self, columns: int) -> np.ndarray:
        """The group of each input, [K]."""
        size = columns if self.group < 0 else self.group
        found = np.arange(columns) // size
        if self.order == "uneven":
            return np.random.default_rng(columns).integers(0, columns // size, columns)
        return np.random.default_rng(columns).permutation(found) if self.order else found

    def pack(self, name: str, matrix: np.ndarray) -> Packed:
        return packed_matrix(matrix, self)

    @property
    def settings(self) -> dict[str, Any]:
        return quantization_config(self)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of scales."""
        halves = self.halves or self.packing != "compressed-tensors"
        return torch.float16 if halves else torch.bfloat16


def coded(name: str, dense: bool) -> bool:
    """Whether quantisers put a matrix into codes. dense: dense layers as well"""
    return EXPERT.search(name) is not None or (dense and not LEFT.search(name))


@dataclass(frozen=True)
class Nvfp4Kind:
    """How a checkpoint in NVFP4 is packed.

    packing  modelopt or compressed-tensors
    dense    format of dense layers: nvfp4, fp8 with one scale for a matrix, or words
    beside   whether config.json says nothing, as ModelOpt's earlier versions left it
    """

    packing: str
    dense: str = "words"
    beside: bool = False
    codec: ClassVar[str] = "nvfp4"
    group: ClassVar[int] = 2 * NVFP4_BLOCK

    def takes(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether a matrix is put into codes."""
        return coded(name, self.dense != "words") and tensor.shape[1] % self.group == 0

    def pack(self, name: str, matrix: np.ndarray) -> Packed:
        if not EXPERT.search(name) and self.dense == "fp8":
            return fp8_matrix(matrix)
        return nvfp4_matrix(matrix, self.packing == "compressed-tensors")

    @property
    def settings(self) -> dict[str, Any]:
        """As llm-compressor and ModelOpt write it."""
        weights = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": NVFP4_BLOCK}
        group = {"input_activations": weights, "weights": weights, "targets": ["Linear"]}
        if self.packing == "compressed-tensors":
            of_weights = {"symmetric": True, "strategy": "tensor_group", "observer": "minmax"}
            modules = {"weights": weights | of_weights, "targets": ["Linear"]}
            return {
                **{"config_groups": {"group_0": modules}, "format": "nvfp4-pack-quantized"},
                **{"quant_method": "compressed-tensors", "ignore": ["lm_head"]},
            }
        producer = {
            "producer": {"name": "modelopt", "version": "0.37.0"},
            "quant_method": "modelopt",
        }
        if self.dense == "fp8":
            layers = {"model.layers.1.mlp.experts": {"quant_algo": "W4A16_NVFP4", "group_size": 16}}
            attention = {"model.layers.1.self_attn.q_proj": {"quant_algo": "FP8"}}
            return {
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": layers | attention,
            } | producer
        kv_cache = {"dynamic": False, "num_bits": 8, "type": "float"}
        algorithm = {"quant_algo": "NVFP4", "kv_cache_scheme": kv_cache}
        return {"config_groups": {"group_0": group}} | algorithm | producer


@dataclass(frozen=True)
class Mxfp4Kind:
    """How a checkpoint in MXFP4 by compressed-tensors is packed.

    dense  whether dense layers are in MXFP4 as well
    """

    dense: bool
    codec: ClassVar[str] = "mxfp4"
    group: ClassVar[int] = MXFP4_BLOCK

    def takes(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether a matrix is put into codes."""
        return coded(name, self.dense) and tensor.shape[1] % self.group == 0

    def pack(self, name: str, matrix: np.ndarray) -> Packed:
        codes, scales, words = mxfp4_codes(matrix)
        tensors = {
            "weight_packed": torch.from_numpy(codes.reshape(len(codes), -1)),
            "weight_scale": torch.from_numpy(scales),
        }
        return Packed(tensors, torch.from_numpy(words).bfloat16())

    @property
    def settings(self) -> dict[str, Any]:
        """As Kimi-K3 is published."""
        weights = {
            **{"actorder": None, "block_structure": None, "dynamic": False, "group_size": 32},
            **{"num_bits": 4, "scale_dtype": "torch.uint8", "strategy": "group"},
            **{"symmetric": True, "type": "float", "zp_dtype": None},
        }
        modules = {"weights": weights, "input_activations": None, "targets": ["Linear"]}
        return {
            **{"config_groups": {"group_0": modules}, "format": "mxfp4-pack-quantized"},
            **{"quant_method": "compressed-tensors", "ignore": ["lm_head"]},
        }


Kind = Int4Kind | Nvfp4Kind | Mxfp4Kind
# By family and what is its own: the checkpoints that tests run.
KINDS: dict[str, Kind] = {
    "qwen3_moe": Int4Kind(32, True, False),
    "deepseek_v3": Int4Kind(32, True, True),
    "qwen2_moe": Int4Kind(64, False, True, halves=True),
    "mixtral": Int4Kind(128, False, False),
    "qwen3_moe by gptq": Int4Kind(128, True, True, "gptq"),
    "deepseek_v3 by gptq": Int4Kind(64, False, True, "gptq"),
    "mixtral by gptq_v2": Int4Kind(32, False, False, "gptq_v2"),
    "qwen3_moe by act-order": Int4Kind(32, True, True, "gptq", order="static"),
    "deepseek_v3 by act-order": Int4Kind(64, False, True, "gptq_v2", order="uneven"),
    "qwen2_moe by act-order": Int4Kind(32, False, True, order="static"),
    "mixtral of whole rows": Int4Kind(-1, False, True, "gptq"),
    "qwen3_moe by channel": Int4Kind(-1, True, False),
    "qwen2_moe in small groups": Int4Kind(16, False, True, "awq"),
    "qwen3_moe by awq": Int4Kind(128, False, True, "awq"),
    "qwen2_moe by awq": Int4Kind(32, False, True, "awq"),
    "qwen3_moe by modelopt": Nvfp4Kind("modelopt", "nvfp4"),
    "deepseek_v3 by modelopt, once": Nvfp4Kind("modelopt", beside=True),
    "qwen2_moe by modelopt": Nvfp4Kind("modelopt", "fp8"),
    "qwen3_moe in mxfp4": Mxfp4Kind(True),
    "mixtral in nvfp4": Nvfp4Kind("compressed-tensors", "nvfp4"),
}
# Kinds that tests of a family's own run; None: FP8.
FAMILY_KINDS: dict[str, list[Int4Kind | Nvfp4Kind | None]] = {
    "qwen3_5_moe": [None],
    "qwen3_vl_moe": [
        None,
        Int4Kind(32, True, False),
        Int4Kind(64, False, False, "awq"),
        Nvfp4Kind("modelopt", "nvfp4"),
    ],
    "nemotron_h": [None, Int4Kind(32, True, False), Nvfp4Kind("modelopt", "nvfp4")],
}
# Names of INT4 by who packed it.
INT4_LABELS = {"compressed-tensors": "INT4", "awq": "AWQ", "gptq": "GPTQ", "gptq_v2": "GPTQ"}


def label(kind: Kind | None) -> str:
    """Name of a format in documents."""
    if kind is None:
        return "FP8"
    return INT4_LABELS[kind.packing] if isinstance(kind, Int4Kind) else kind.codec.upper()


def nvfp4_matrix(matrix: np.ndarray, divides: bool) -> Packed:
    """The nearest codes of a matrix [N, K], with scales as both publishers choose them."""
    blocks = matrix.reshape(len(matrix), -1, NVFP4_BLOCK)
    # The largest of all becomes 6 under the largest scale of a block, 448.
    of_matrix = np.float32(max(np.abs(matrix).max(), 1e-6) / (6 * 448))
    of_matrix = np.float32(1 / of_matrix) if divides else of_matrix
    wanted = np.abs(blocks).max(2) / 6
    wanted = wanted * of_matrix if divides else wanted / of_matrix
    scales = torch.from_numpy(wanted.astype(np.float32)).to(torch.float8_e4m3fn)
    bytes_ = scales.view(torch.uint8).numpy()
    by = e4m3_values()[bytes_] / of_matrix if divides else e4m3_values()[bytes_] * of_matrix
    values = blocks / np.maximum(by, 1e-30)[..., None]
    nearest = np.abs(np.abs(values)[..., None] - E2M1).argmin(-1) + 8 * np.signbit(values)
    nearest = nearest.reshape(matrix.shape).astype(np.uint8)
    codes = nearest[:, 0::2] | nearest[:, 1::2] << 4
    plain = nvfp4_words(codes, bytes_, of_matrix, divides)
    one = torch.tensor([of_matrix])
    tensors = {"weight_scale": scales}
    if divides:
        tensors |= {"weight_packed": torch.from_numpy(codes), "weight_global_scale": one}
        tensors["input_global_scale"] = torch.tensor([3.5])
    else:
        tensors |= {"weight": torch.from_numpy(codes), "weight_scale_2": one.reshape(())}
        tensors["input_scale"] = torch.tensor(0.5)
    return Packed(tensors, torch.from_numpy(plain.view(np.int16)).view(torch.bfloat16))


def fp8_matrix(matrix: np.ndarray) -> Packed:
    """The nearest codes of a matrix with one scale."""
    scale = np.float32(max(np.abs(matrix).max(), 1e-6) / 448)
    codes = torch.from_numpy((matrix / scale).astype(np.float32)).to(torch.float8_e4m3fn)
    plain = bfloat16_bits(e4m3_values()[codes.view(torch.uint8).numpy()] * scale)
    parts = {"weight": codes, "weight_scale": torch.tensor(scale), "input_scale": torch.tensor(2.0)}
    return Packed(parts, torch.from_numpy(plain.view(np.int16)).view(torch.bfloat16))


def packed_matrix(matrix: np.ndarray, kind: Int4Kind) -> Packed:
    """The nearest codes of a matrix [N, K] in groups of inputs."""
    columns = matrix.shape[1]
    of_input = kind.groups(columns)
    count = columns // (columns if kind.group < 0 else kind.group)
    inside = of_input == np.arange(count)[:, None]
    least, most = (
        np.stack([pick(np.where(each, matrix, 0), axis=1) for each in inside], axis=1)
        for pick in (np.min, np.max)
    )
    size = np.maximum(-least, most) / 7.5 if kind.symmetric else (most - least) / 15
    scales = torch.from_numpy(np.maximum(size, 1e-6)).to(kind.dtype)
    factors = scales.float().numpy()
    zeros = np.full(scales.shape, OFFSET)
    if not kind.symmetric:
        zeros = np.rint(-least / factors).clip(0, 15).astype(np.int64)
    by, less = factors[:, of_input], zeros[:, of_input]
    codes = np.rint(matrix / by + less).clip(0, 15).astype(np.int64)
    bits = bfloat16_bits((codes - less).astype(np.float32) * by)
    plain = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
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
        if kind.order:
            tensors["weight_g_idx"] = torch.from_numpy(kind.groups(codes.shape[1]).astype(np.int32))
        return tensors
    if kind.packing == "awq":
        qweight, qzeros = packed_awq(codes, zeros)
        others = {}
    else:
        qweight, qzeros = packed_gptq(codes, zeros, int(kind.packing == "gptq"))
        others = {"g_idx": torch.from_numpy(kind.groups(codes.shape[1]).astype(np.int32))}
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
            **{"bits": 4, "checkpoint_format": kind.packing, "desc_act": bool(kind.order)},
            **{"dynamic": {"-:.*mlp.gate$": {}}, "group_size": kind.group, "lm_head": False},
            **{"pack_dtype": "int32", "quant_method": "gptq", "sym": kind.symmetric},
            "meta": {"damp_percent": 0.05, "quantizer": ["gptqmodel:7.7.0"]},
        }
    weights = {
        **{"actorder": "group" if kind.order else None, "block_structure": None, "dynamic": False},
        **{"group_size": kind.group if kind.group > 0 else None, "num_bits": 4},
        **{"observer": "minmax", "observer_kwargs": {}},
        "strategy": "group" if kind.group > 0 else "channel",
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


def write_packed(path: Path, words_path: Path, source: Path, kind: Kind) -> Path:
    """A model of that kind in `path`, and what it stands for in `words_path`."""
    published: dict[str, torch.Tensor] = {}
    plain: dict[str, torch.Tensor] = {}
    for name, tensor in experts_alone(load_file(source / "model.safetensors")).items():
        if tensor.dim() != 2 or not kind.takes(name, tensor):
            published[name] = plain[name] = tensor
            continue
        made = kind.pack(name, tensor.float().numpy())
        published |= {name.removesuffix("weight") + end: each for end, each in made.tensors.items()}
        plain[name] = made.plain
    for folder, tensors in ((path, published), (words_path, plain)):
        folder.mkdir(parents=True)
        for file in source.iterdir():
            if file.suffix == ".json":
                (folder / file.name).write_bytes(file.read_bytes())
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if isinstance(kind, Nvfp4Kind) and kind.beside:
        settings = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": NVFP4_BLOCK}
        content = {"producer": {"name": "modelopt"}, "quantization": settings}
        (path / "hf_quant_config.json").write_text(json.dumps(content))
        return path
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = kind.settings
    (path / "config.json").write_text(json.dumps(config))
    return path
