"""A model published three times, in BF16, in FP8 and in MXFP4, with the same shapes.

FP8 are the nearest codes of the source's weights, under scales as publishers choose them. BF16 has
the words that these codes stand for: both are one model, and compute the same tokens. MXFP4 are the
nearest codes of the same weights: another model, as the format is too narrow to hold the words of
FP8. All outside the experts are the same words in each.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from bench.lab.format_source import WeightSource
from speq.errors import FileError, NoRoom, OptionError
from speq.experts.codec import Matrices
from speq.experts.expert_names import PROJECTIONS
from speq.files.published_format import (
    BLOCK_SCALES,
    BLOCKS,
    FP8,
    FP8_BLOCK,
    FP8_DTYPE,
    MXFP4,
    MXFP4_BLOCK,
    MXFP4_BLOCK_BYTES,
    SCALES,
)
from speq.kernels.scaled_words import E4M3_MOST, fp8_words, mxfp4_codes
from speq.units import Progress, format_bytes, track

BF16 = "bf16"
FORMATS = (BF16, FP8, MXFP4)
# Bits of an expert's weight, scales included: BF16's are exact, and of others about.
BITS = {BF16: 16.0, FP8: 8.01, MXFP4: 4.25}
QUANTISATION: dict[str, dict[str, Any]] = {
    FP8: {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": FP8_BLOCK,
    },
    MXFP4: {"quant_method": "mxfp4"},
}


@dataclass(slots=True)
class Folder:
    """A checkpoint in the making.

    experts_bytes  of experts: codes, scales and words
    """

    path: Path
    format: str
    experts_bytes: int = 0
    weight_map: dict[str, str] = field(default_factory=dict)

    def shard(self, label: str, rest: dict[str, Tensor], experts: dict[str, Tensor]) -> None:
        """Write one file of tensors."""
        name = f"model-{label}.safetensors"
        save_file(rest | experts, self.path / name, metadata={"format": "pt"})
        self.weight_map |= dict.fromkeys(rest | experts, name)
        self.experts_bytes += sum(each.nbytes for each in experts.values())

    def finish(self, source: WeightSource) -> None:
        """The index, what lies beside, and config.json last: a folder without it is no model."""
        index = {"metadata": {}, "weight_map": self.weight_map}
        (self.path / "model.safetensors.index.json").write_text(json.dumps(index))
        source.put_beside(self.path)
        config = source.config | {"dtype": "bfloat16"}
        config.pop("torch_dtype", None)
        if self.format in QUANTISATION:
            config["quantization_config"] = QUANTISATION[self.format]
        (self.path / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def write(
    source: WeightSource, work: Path, formats: tuple[str, ...], progress: Progress | None = None
) -> dict[str, Folder]:
    """Write the model in each format, in a folder of its name. Raises SpeqError where that cannot
    be.
    """
    check_widths(source)
    check_disk(source, work, formats)
    folders = {name: Folder(work / name, name) for name in formats}
    for folder in folders.values():
        if folder.path.exists():
            raise FileError(f"{folder.path} exists already; give a folder without it")
        folder.path.mkdir(parents=True)
    layers: list[int | None] = [None, *range(source.num_layers)]
    with in_one_thread():
        for layer in track("writing formats", layers, len(layers), progress):
            label = "rest" if layer is None else f"{layer:05d}"
            rest = source.rest(layer)
            prefix = "" if layer is None else prefix_of(source, layer)
            experts = [] if layer is None else source.experts(layer)
            written = published(formats, prefix, experts)
            for name, folder in folders.items():
                folder.shard(label, rest, written[name])
    for folder in folders.values():
        folder.finish(source)
    return folders


@contextmanager
def in_one_thread() -> Iterator[None]:
    """torch's ops take one thread in the block. They are many and small: beside other programs,
    threads would wait for each other most of the time.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def check_widths(source: WeightSource) -> None:
    """Raise SpeqError for experts that are no whole blocks of MXFP4."""
    for name, size in zip(("hidden size", "expert width"), source.expert_sizes, strict=True):
        if size % MXFP4_BLOCK:
            raise OptionError(
                f"the {name} is {size}, and blocks of MXFP4 are {MXFP4_BLOCK} weights; give a "
                "multiple of that"
            )


def check_disk(source: WeightSource, work: Path, formats: tuple[str, ...]) -> None:
    """Raise SpeqError where the disk has no room."""
    needed = sum(source.experts_weights * BITS[name] / 8 + source.rest_bytes for name in formats)
    free = shutil.disk_usage(existing(work)).free
    if needed > free:
        raise NoRoom(
            f"the checkpoints take {format_bytes(needed)} and {format_bytes(free)} of disk are "
            f"left at {work}; free some, or give another --work or smaller shapes"
        )


def existing(path: Path) -> Path:
    return next(each for each in (path, *path.absolute().parents) if each.exists())


def prefix_of(source: WeightSource, layer: int) -> str:
    """What stands before an expert's number in the names of a layer's experts."""
    return source.names.module(layer, 0, PROJECTIONS[0]).rpartition("0.")[0]


def published(
    formats: tuple[str, ...], prefix: str, experts: list[Matrices]
) -> dict[str, dict[str, Tensor]]:
    """The tensors of a layer's experts in each format."""
    found: dict[str, dict[str, Tensor]] = {name: {} for name in formats}
    if not experts:
        return found
    if MXFP4 in found:
        found[MXFP4] = mxfp4_tensors(prefix, experts)
    if not found.keys() & {BF16, FP8}:
        return found
    for expert, (gate_up, down) in enumerate(experts):
        parts = zip(PROJECTIONS, (*gate_up.chunk(2), down), strict=True)
        for projection, matrix in parts:
            weight = f"{prefix}{expert}.{projection}.weight"
            codes, scales = nearest_fp8(matrix)
            if FP8 in found:
                found[FP8] |= {weight: codes, weight + SCALES: scales}
            if BF16 in found:
                found[BF16][weight] = fp8_words(codes, scales)
    return found


def nearest_fp8(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [N, K] and float32 scales of their blocks, under which the largest weight of each block
    has the largest code.
    """
    rows, columns = matrix.shape
    block = FP8_BLOCK[0]
    padded = torch.zeros(-rows // block * -block, -columns // block * -block)
    padded[:rows, :columns] = matrix
    blocks = padded.unflatten(1, (-1, block)).unflatten(0, (-1, block))
    largest = blocks.abs().amax((1, 3))
    scales = torch.where(largest > 0, largest / E4M3_MOST, 1.0)
    codes = (blocks / scales[:, None, :, None]).to(FP8_DTYPE)
    return codes.flatten(2).flatten(0, 1)[:rows, :columns].contiguous(), scales


def mxfp4_tensors(prefix: str, experts: list[Matrices]) -> dict[str, Tensor]:
    """All experts of a layer in one tensor, rows of gate and up in turns, as gpt_oss has them."""
    found = {}
    in_turns = [torch.stack(gate_up.chunk(2), dim=1).flatten(0, 1) for gate_up, _ in experts]
    matrices = {"gate_up_proj": in_turns, "down_proj": [down for _, down in experts]}
    for projection, each in matrices.items():
        coded = [mxfp4_codes(matrix) for matrix in each]
        codes = torch.stack([codes for codes, _ in coded])
        found[f"{prefix}{projection}{BLOCKS}"] = codes.unflatten(2, (-1, MXFP4_BLOCK_BYTES))
        found[f"{prefix}{projection}{BLOCK_SCALES}"] = torch.stack([scales for _, scales in coded])
    return found
