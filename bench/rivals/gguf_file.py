"""A model folder as one GGUF file for llama.cpp, its weights as published, to the bit.

Matrices keep their dtype, the experts of a layer are stacked [E, N, K], and what llama.cpp reads as
float32 only (norms, biases, routers) is float32, as its own converter writes them. The head is
written even where it is the embedding: llama.cpp's MoE architectures want it.
"""

import math
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from speq.bench.rivals.gguf_metadata import architecture_of, write_config, write_tokenizer
from speq.bench.rivals.packages import rival_package
from speq.errors import CheckpointError, NoRoom, UnsupportedError
from speq.files.atomic_file import replacing, writing
from speq.files.checkpoint import Checkpoint
from speq.models.bounds import check_sizes, check_weights
from speq.units import Progress, format_bytes, track

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
LAYER = re.compile(r"\.layers\.(\d{1,9})\.")
EXPERT = re.compile(r"(?<=\.experts)\.(\d{1,9})(?=\.)")
SUFFIXES = (".weight", ".bias")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of the file.

    sources  tensors of the checkpoint: the experts of a layer in their order, or a single one
    shape    as torch has it; the experts' is [E, N, K]
    """

    name: str
    sources: tuple[str, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def words(self, checkpoint: Checkpoint) -> np.ndarray[Any, Any]:
        """Its values; bfloat16 as uint16, which numpy has in its place."""
        info = checkpoint.tensors[self.sources[0]][1]
        values = torch.empty(self.shape, dtype=info.dtype)
        parts = values.view(torch.uint8).view(len(self.sources), -1)
        for name, part in zip(self.sources, parts, strict=True):
            file, info = checkpoint.tensors[name]
            file.read_into(info.offset, part)
        values = values.to(self.dtype)
        return (values.view(torch.uint16) if values.dtype == torch.bfloat16 else values).numpy()


def write(checkpoint: Checkpoint, path: Path, progress: Progress | None = None) -> None:
    """Write the file, whole or not at all, with one of its tensors in memory at a time.

    Raises SpeqError for a family that is not supported, a checkpoint that is not whole, or a disk
    without room.
    """
    gguf = rival_package("gguf")
    config, where = checkpoint.config, checkpoint.path / "config.json"
    check_sizes(config, where)
    check_weights(config, checkpoint)
    writer = gguf.GGUFWriter(None, architecture_of(config, where).name)
    writer.add_name(checkpoint.path.resolve().name)
    write_config(writer, config, where)
    tensors = tensors_of(checkpoint)
    write_tokenizer(writer, checkpoint.path, config["vocab_size"])
    types = {
        torch.bfloat16: (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
        torch.float16: (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
        torch.float32: (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    }
    writer.add_file_type(types[max(tensors, key=lambda tensor: tensor.nbytes).dtype][1])
    for tensor in tensors:
        # The type that is given goes before the numpy dtype.
        kind = types[tensor.dtype][0]
        writer.add_tensor_info(tensor.name, tensor.shape, np.uint16, tensor.nbytes, kind)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _check_room(path.parent, sum(tensor.nbytes for tensor in tensors))
        with replacing(path) as file:
            try:
                # The writer opens what it writes by a name: here that of the same, empty file.
                writer.write_header_to_file(Path(file.name))
                writer.write_kv_data_to_file()
                writer.write_ti_data_to_file()
                for tensor in track("writing GGUF", tensors, len(tensors), progress):
                    writer.write_tensor_data(tensor.words(checkpoint))
            finally:
                writer.close()


def tensors_of(checkpoint: Checkpoint) -> list[GgufTensor]:
    """What the file holds, layer by layer. Raises SpeqError where something is absent or odd."""
    gguf = rival_package("gguf")
    config = checkpoint.config
    named = architecture_of(config, checkpoint.path / "config.json").name
    architecture = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == named)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    routers = (gguf.MODEL_TENSOR.FFN_GATE_INP, gguf.MODEL_TENSOR.FFN_GATE_INP_SHEXP)
    found = []
    for name, sources in _sources(checkpoint).items():
        place = names.get_type_and_name(name, try_suffixes=SUFFIXES)
        if place is None or place[0] not in gguf.MODEL_TENSORS[architecture]:
            raise UnsupportedError(
                f"{checkpoint.path} has tensor {name}, for which llama.cpp's {named} has no place: "
                "compare without llama.cpp"
            )
        dtype, shape = _form(checkpoint, sources)
        if len(shape) == 1 or place[0] in routers:
            dtype = torch.float32
        stacked = (len(sources), *shape) if EXPERT.search(sources[0]) else shape
        found.append(GgufTensor(place[1], sources, dtype, stacked))
    have = {tensor.name for tensor in found}
    for kind in gguf.MODEL_TENSORS[architecture]:
        for layer in range(config["num_hidden_layers"]):
            wanted = f"{gguf.TENSOR_NAMES[kind].format(bid=layer)}.weight"
            if wanted not in have:
                raise CheckpointError(
                    f"{checkpoint.path} lacks the tensor that llama.cpp calls {wanted}; give the "
                    "model as published, or download it again"
                )
    return found


def _sources(checkpoint: Checkpoint) -> dict[str, tuple[str, ...]]:
    """Tensors of the checkpoint by the name that stands for them all, layer by layer."""
    experts: dict[str, dict[int, str]] = {}
    for name in checkpoint.tensors:
        number = EXPERT.search(name)
        experts.setdefault(EXPERT.sub("", name), {})[int(number[1]) if number else 0] = name
    if checkpoint.config.get("tie_word_embeddings", False) and EMBEDDING in experts:
        experts[HEAD] = experts[EMBEDDING]
    config = checkpoint.config
    wanted = config.get(architecture_of(config, checkpoint.path).num_experts)
    for name, numbered in experts.items():
        if EXPERT.search(numbered[min(numbered)]) and sorted(numbered) != [*range(wanted or 0)]:
            raise CheckpointError(
                f"{checkpoint.path} has {len(numbered)} experts of {name} and promises {wanted}; "
                "download it again"
            )
    return {
        name: tuple(experts[name][number] for number in sorted(experts[name]))
        for name in sorted(experts, key=_place)
    }


def _place(name: str) -> tuple[float, str]:
    """Sorts what stands before the layers first, and what follows them last."""
    layer = LAYER.search(name)
    before = -1 if name == EMBEDDING else math.inf
    return (int(layer[1]) if layer else before, name)


def _form(checkpoint: Checkpoint, sources: tuple[str, ...]) -> tuple[torch.dtype, tuple[int, ...]]:
    """The dtype and shape that sources have in common. Raises SpeqError where they have none."""
    infos = [checkpoint.tensors[name][1] for name in sources]
    first = infos[0]
    for name, info in zip(sources, infos, strict=True):
        if (info.dtype, info.shape) != (first.dtype, first.shape):
            raise CheckpointError(
                f"{checkpoint.path} has {name} of {info.dtype} {info.shape} and {sources[0]} of "
                f"{first.dtype} {first.shape}; experts must be alike: download it again"
            )
    if first.dtype == torch.float64:
        raise UnsupportedError(
            f"{checkpoint.path} has {sources[0]} in float64, which llama.cpp does not compute; "
            "compare without llama.cpp"
        )
    return first.dtype, first.shape


def _check_room(folder: Path, wanted: int) -> None:
    free = shutil.disk_usage(folder).free
    if wanted > free:
        raise NoRoom(
            f"the GGUF file takes {format_bytes(wanted)} and {format_bytes(free)} of disk are left "
            f"at {folder}; free some, or choose another place"
        )
