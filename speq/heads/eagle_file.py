"""A published EAGLE-3 head on disk: a folder with config.json and safetensors.

Names are those of SGLang and SafeAILab (`midlayer.`), or of vLLM's speculators (`layers.0.`), with
or without `model.` in front.
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from speq.errors import FileError
from speq.files.json_file import read_json
from speq.files.safetensors_file import SafetensorsFile, TensorInfo
from speq.files.shards import INDEX, SINGLE, Shards
from speq.heads.eagle_head import EagleHead
from speq.heads.eagle_shape import OTHER_HEAD, EagleShape, eagle_shape
from speq.models.shape import ModelShape

CONFIG = "config.json"
# Tensors on disk that are concatenated into each loaded tensor.
PARTS = {
    "fc": ("fc.weight",),
    "embedding_norm": ("layers.0.input_layernorm.weight",),
    "feature_norm": ("layers.0.hidden_norm.weight",),
    "qkv": tuple(f"layers.0.self_attn.{each}_proj.weight" for each in "qkv"),
    "output": ("layers.0.self_attn.o_proj.weight",),
    "mlp_norm": ("layers.0.post_attention_layernorm.weight",),
    "gate_up": ("layers.0.mlp.gate_proj.weight", "layers.0.mlp.up_proj.weight"),
    "down": ("layers.0.mlp.down_proj.weight",),
    "norm": ("norm.weight",),
    "embedding": ("embed_tokens.weight",),
    "head": ("lm_head.weight",),
}
# Offset from each of the head's token ids to the exact model's; and which of the exact model's
# tokens the head predicts.
TARGETS, SAID = "d2t", "t2d"
# Tensor of some checkpoints that is computed here.
COMPUTED = "rotary_emb.inv_freq"


@dataclass(frozen=True, slots=True)
class HeadTensors:
    """Tensors by the names of `PARTS`, and their names on disk."""

    path: Path
    tensors: dict[str, tuple[SafetensorsFile, TensorInfo]]
    called: dict[str, str]

    @classmethod
    def of(cls, shards: Shards) -> "HeadTensors":
        tensors: dict[str, tuple[SafetensorsFile, TensorInfo]] = {}
        called: dict[str, str] = {}
        for name, entry in shards.tensors.items():
            usual = name.removeprefix("model.").replace("midlayer.", "layers.0.")
            if not usual.endswith(COMPUTED):
                tensors[usual], called[usual] = entry, name
        return cls(shards.path, tensors, called)

    def read(self, name: str) -> Tensor:
        return self.tensors[name][0].tensor(self.called[name])


def read_eagle(path: Path, model: ModelShape) -> EagleHead:
    """Read the head in a folder to host memory, in its stored dtype.

    Raises SpeqError if it is damaged, not an EAGLE-3 head, or one of another model.
    """
    content = read_json(path / CONFIG, instead="give the folder of a complete head")
    check_safetensors(path)
    with contextlib.closing(Shards(path)) as shards:
        found = HeadTensors.of(shards)
        own = "embed_tokens.weight" in found.tensors, "lm_head.weight" in found.tensors
        shape = eagle_shape(content, path / CONFIG, model, own)
        check_tensors(found, shape)
        weights = {
            name: torch.cat([found.read(part) for part in PARTS[name]])
            for name, _ in shape.tensors()
        }
        said = None
        if shape.maps or TARGETS in found.tensors:
            said = said_tokens(found, shape)
        return EagleHead(shape, weights, said if shape.maps else None)


def check_safetensors(path: Path) -> None:
    """Raise SpeqError for a folder whose weights are only pickles, which can run code."""
    if any(os.path.exists(path / name) for name in (SINGLE, INDEX)):
        return
    pickles = sorted(each.name for each in path.iterdir() if each.suffix in (".bin", ".pt", ".pth"))
    if pickles:
        raise FileError(
            f"head {path} has its weights in {pickles[0]}, a pickle, which may run code and is not "
            f"read; give a {SINGLE} in its place: others have published one, or make it with "
            "torch.load(weights_only=True) and safetensors.torch.save_file"
        )


def wanted_parts(shape: EagleShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the tensors on disk."""
    kv = shape.num_kv_heads * shape.head_width
    rows = {
        "qkv": (shape.num_heads * shape.head_width, kv, kv),
        "gate_up": (shape.width, shape.width),
    }
    for name, (first, *others) in shape.tensors():
        for part, count in zip(PARTS[name], rows.get(name, (first,)), strict=True):
            yield part, (count, *others)


def check_tensors(found: HeadTensors, shape: EagleShape) -> None:
    """Raise SpeqError unless a folder has exactly a head's tensors."""
    wanted = dict(wanted_parts(shape))
    for name, size in wanted.items():
        if name not in found.tensors:
            raise FileError(
                f"head {found.path} lacks tensor {name}; an EAGLE-3 head of one layer has it: "
                "download the head again, or give another one"
            )
        info = found.tensors[name][1]
        if info.shape != size or not info.dtype.is_floating_point or info.dtype.itemsize < 2:
            raise FileError(
                f"head {found.path}: tensor {found.called[name]} is {info.dtype} "
                f"{list(info.shape)}; by its config.json it must be {list(size)}, of dtypes of 16 "
                "bits or more: download the head again, or give another one"
            )
    other = sorted(found.tensors.keys() - wanted.keys() - {TARGETS, SAID})
    if other:
        raise FileError(
            f"head {found.path} has a tensor {found.called[other[0]]}, which an EAGLE-3 head of "
            "one layer does not have; give another head"
        )


def said_tokens(found: HeadTensors, shape: EagleShape) -> Tensor:
    """Read the exact model's ids [draft_vocab_size] of the head's tokens. Raises SpeqError for an
    invalid map.
    """
    if TARGETS not in found.tensors:
        raise FileError(
            f"head {found.path} predicts {shape.draft_vocab_size} of {shape.vocab_size} tokens and "
            f"lacks tensor {TARGETS}, which maps them; download the head again"
            ", or give another one"
        )
    own = torch.arange(shape.draft_vocab_size)
    offsets = found.read(TARGETS)
    whole = not offsets.dtype.is_floating_point and offsets.shape == own.shape
    said = own + offsets.long() if whole else own[:0]
    inside = bool(len(said)) and 0 <= int(said.min()) <= int(said.max()) < shape.vocab_size
    if not shape.maps:  # it predicts all tokens, by the same ids
        inside = torch.equal(said, own)
    if not inside or len(said.unique()) != len(said):
        raise FileError(
            f"head {found.path}: tensor {TARGETS} does not map its {shape.draft_vocab_size} tokens "
            f"to different ones of the model's {shape.vocab_size}; {OTHER_HEAD}"
        )
    if SAID in found.tensors:
        flags = torch.zeros(shape.vocab_size, dtype=torch.bool)
        flags[said] = True
        given = found.read(SAID)
        if given.shape != flags.shape or not torch.equal(given.bool(), flags):
            raise FileError(
                f"head {found.path}: tensors {TARGETS} and {SAID} do not have the same tokens; "
                "download the head again, or give another one"
            )
    return said
