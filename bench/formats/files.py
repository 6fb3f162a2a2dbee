"""A model in three published formats, whose words are the same: BF16, FP8 and MXFP4.

Weights of experts are rounded to MXFP4, and what that leaves to FP8 with powers of 2 for scales.
Words that are left are codes of both formats, and bfloat16 holds them: the three checkpoints are
one model. It chooses the same experts and writes the same tokens, whatever it is published in.
All outside the experts are the same words in each.
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

from speq.bench.formats.source import Source
from speq.errors import SpeqError
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
from speq.kernels.scaled_words import fp8_codes, fp8_words, mxfp4_codes, mxfp4_words
from speq.units import Progress, format_bytes, tracked

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

    def finish(self, source: Source) -> None:
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
    source: Source, work: Path, formats: tuple[str, ...], progress: Progress | None = None
) -> dict[str, Folder]:
    """Write the model in each format, in a folder of its name. Raises SpeqError where that cannot
    be.
    """
    check_widths(source)
    check_disk(source, work, formats)
    folders = {name: Folder(work / name, name) for name in formats}
    for folder in folders.values():
        if folder.path.exists():
            raise SpeqError(f"{folder.path} exists already; give a folder without it")
        folder.path.mkdir(parents=True)
    layers: list[int | None] = [None, *range(source.num_layers)]
    with in_one_thread():
        for layer in tracked("writing formats", layers, len(layers), progress):
            label = "rest" if layer is None else f"{layer:05d}"
            rest = source.rest(layer)
            prefix = "" if layer is None else prefix_of(source, layer)
            words = [] if layer is None else [rounded(each) for each in source.experts(layer)]
            for folder in folders.values():
                folder.shard(label, rest, published(folder.format, prefix, words))
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


def check_widths(source: Source) -> None:
    """Raise SpeqError for experts that are no whole blocks of MXFP4."""
    for name, size in zip(("hidden size", "expert width"), source.expert_sizes, strict=True):
        if size % MXFP4_BLOCK:
            raise SpeqError(
                f"the {name} is {size}, and blocks of MXFP4 are {MXFP4_BLOCK} weights; give a "
                "multiple of that"
            )


def check_disk(source: Source, work: Path, formats: tuple[str, ...]) -> None:
    """Raise SpeqError where the disk has no room."""
    needed = sum(source.experts_weights * BITS[name] / 8 + source.rest_bytes for name in formats)
    free = shutil.disk_usage(existing(work)).free
    if needed > free:
        raise SpeqError(
            f"the checkpoints take {format_bytes(needed)} and {format_bytes(free)} of disk are "
            f"left at {work}; free some, or give another --work or smaller shapes"
        )


def existing(path: Path) -> Path:
    return next(each for each in (path, *path.absolute().parents) if each.exists())


def prefix_of(source: Source, layer: int) -> str:
    """What stands before an expert's number in the names of a layer's experts."""
    return source.names.module(layer, 0, PROJECTIONS[0]).rpartition("0.")[0]


def rounded(expert: Matrices) -> Matrices:
    """Words that are codes of MXFP4, and of FP8."""
    gate_up, down = expert
    gate, up = (both_of(part) for part in gate_up.chunk(2))
    return torch.cat([gate, up]), both_of(down)


def both_of(words: Tensor) -> Tensor:
    return fp8_words(*fp8_codes(mxfp4_words(*mxfp4_codes(words))))


def published(name: str, prefix: str, words: list[Matrices]) -> dict[str, Tensor]:
    """The tensors of a layer's experts as a format has them."""
    if not words:
        return {}
    if name == MXFP4:
        return mxfp4_tensors(prefix, words)
    found = {}
    for expert, (gate_up, down) in enumerate(words):
        parts = zip(PROJECTIONS, (*gate_up.chunk(2), down), strict=True)
        for projection, matrix in parts:
            weight = f"{prefix}{expert}.{projection}.weight"
            if name == BF16:
                found[weight] = matrix.contiguous()
                continue
            codes, found[weight + SCALES] = fp8_codes(matrix)
            found[weight] = codes.view(FP8_DTYPE)
    return found


def mxfp4_tensors(prefix: str, words: list[Matrices]) -> dict[str, Tensor]:
    """All experts of a layer in one tensor, rows of gate and up in turns, as gpt_oss has them."""
    found = {}
    in_turns = [torch.stack(gate_up.chunk(2), dim=1).flatten(0, 1) for gate_up, _ in words]
    matrices = {"gate_up_proj": in_turns, "down_proj": [down for _, down in words]}
    for projection, each in matrices.items():
        coded = [mxfp4_codes(matrix) for matrix in each]
        codes = torch.stack([codes for codes, _ in coded])
        found[f"{prefix}{projection}{BLOCKS}"] = codes.unflatten(2, (-1, MXFP4_BLOCK_BYTES))
        found[f"{prefix}{projection}{BLOCK_SCALES}"] = torch.stack([scales for _, scales in coded])
    return found
