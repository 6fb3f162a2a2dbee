"""A checkpoint of random weights in a published model's exact shapes, names, shards and index.

Embeddings share one direction, and routers read it: so some experts are chosen more often than
others, as a trained model's are. Routes of neighbouring tokens are otherwise independent, which
is harder on a cache than text is.
"""

import json
import shutil
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from speq.bench.shapes.published import COMMON, PublishedShape
from speq.errors import FileError, NoRoom, UnsupportedError
from speq.experts.expert_names import PROJECTIONS
from speq.files.atomic_file import writing
from speq.files.json_file import read_json
from speq.models.families import FAMILIES, Family
from speq.units import Progress, format_bytes, track

# Families whose other tensors have transformers' names when they are published, and one expert a
# tensor.
WRITTEN = ("qwen3_moe", "deepseek_v2", "deepseek_v3", "glm4_moe", "glm4_moe_lite")
# What a folder was made of; a later run takes it as it is.
STAMP = "shapes.json"
VERSION = 1
SHARD_BYTES = 4 << 30
# Beside the shared direction, which is as large as the rest of an embedding, experts' logits differ
# by so much: `bench.shapes.routes` has the hits that come of it.
SKEW = 1.1


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """A tensor to write. fan_in: what its products are summed over; 0: a vector of ones"""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    fan_in: int

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def config_of(shape: PublishedShape) -> Any:
    """transformers' config. Raises SpeqError for a family that is not written."""
    fields = COMMON | shape.config
    kind = fields.get("model_type")
    if kind not in WRITTEN:
        raise UnsupportedError(
            f"{shape.name} is of family {kind!r}, which is not written here; families are "
            f"{', '.join(WRITTEN)}"
        )
    return AutoConfig.for_model(**fields)


def plan_tensors(config: Any, family: Family) -> list[TensorPlan]:
    """Every tensor by its published name, layer by layer."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    found = []
    for name, tensor in model.state_dict().items():
        fused = name.rpartition(".")[2]
        if fused in ("gate_up_proj", "down_proj") and tensor.dim() == 3:
            layer = int(name.partition("layers.")[2].partition(".")[0])
            found += list(expert_tensors(family, layer, fused, tensor))
        else:
            fan_in = tensor.shape[-1] if tensor.dim() > 1 else 0
            found.append(TensorPlan(name, tuple(tensor.shape), tensor.dtype, fan_in))
    return found


def expert_tensors(family: Family, layer: int, fused: str, tensor: Tensor) -> Iterator[TensorPlan]:
    """Matrices of a layer's experts, of which transformers has one tensor [E, rows, columns]."""
    experts, rows, columns = tensor.shape
    names = PROJECTIONS[:2] if fused == "gate_up_proj" else PROJECTIONS[2:]
    for expert in range(experts):
        for projection in names:
            name = f"{family.names.module(layer, expert, projection)}.weight"
            yield TensorPlan(name, (rows // len(names), columns), tensor.dtype, columns)


def draw(plan: TensorPlan, layers: int, seed: int) -> Tensor:
    """Draw a tensor: rows keep the size of what they are given, and layers add little of it."""
    if plan.fan_in == 0:
        value = 0.0 if plan.name.endswith("bias") else 1.0
        return torch.full(plan.shape, value, dtype=plan.dtype)
    draws = torch.Generator().manual_seed((seed << 32) + zlib.crc32(plan.name.encode()))
    values = torch.randn(plan.shape, generator=draws)
    if "embed_tokens" in plan.name:
        values += direction(plan.fan_in)
    elif plan.name.endswith(("mlp.gate.weight", "router.weight")):
        preference = torch.randn(plan.shape[0], 1, generator=draws) * SKEW
        values = values / sqrt(plan.fan_in) + preference * direction(plan.fan_in) / plan.fan_in
    else:
        values /= sqrt(plan.fan_in)
        if plan.name.endswith(("o_proj.weight", "down_proj.weight")):
            values /= 2 * sqrt(layers)
    return values.to(plan.dtype)


def direction(width: int) -> Tensor:
    """What all embeddings share: +1 or -1 in each column."""
    draws = torch.Generator().manual_seed(width)
    return torch.randint(0, 2, (width,), generator=draws) * 2.0 - 1.0


def checkpoint(
    shape: PublishedShape, folder: Path, seed: int, progress: Progress | None = None
) -> int:
    """Write the model unless the folder has it. Return the bytes of its tensors.

    Raises SpeqError if the folder holds something else, or the disk has no room.
    """
    config = config_of(shape)
    plans = plan_tensors(config, FAMILIES[config.model_type])
    total = sum(plan.nbytes for plan in plans)
    made_of = {"version": VERSION, "name": shape.name, "seed": seed, "config": config_fields(shape)}
    if folder.exists() and any(folder.iterdir()):
        stamp = folder / STAMP
        if not stamp.exists() or read_json(stamp) != made_of:
            raise FileError(f"{folder} holds something else; give another --folder, or remove it")
        return total
    free = shutil.disk_usage(next(each for each in folder.absolute().parents if each.exists())).free
    if total > free:
        raise NoRoom(
            f"{shape.name} takes {format_bytes(total)} and {format_bytes(free)} of disk are left "
            f"at {folder}; give fewer --layers, or another --folder"
        )
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_shards(plans, shape.config["num_hidden_layers"], folder, seed, progress)
        write_tokenizer(folder, config.vocab_size)
        (folder / "generation_config.json").write_text(json.dumps({"do_sample": True}))
        (folder / "config.json").write_text(json.dumps(config_fields(shape), indent=1) + "\n")
        # Last: a folder without it is begun, and not whole.
        (folder / STAMP).write_text(json.dumps(made_of))
    return total


def config_fields(shape: PublishedShape) -> dict[str, Any]:
    """Fields of config.json, as a file would have them."""
    fields: dict[str, Any] = json.loads(json.dumps(COMMON | shape.config))
    return fields


def write_shards(
    plans: list[TensorPlan], layers: int, folder: Path, seed: int, progress: Progress | None
) -> None:
    """Write one shard after another, and the index: no more than a shard is in memory."""
    shards: list[list[TensorPlan]] = [[]]
    size = 0
    for plan in plans:
        if shards[-1] and size + plan.nbytes > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(plan)
        size += plan.nbytes
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(track("writing shards", shards, len(shards), progress), 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {plan.name: draw(plan, layers, seed) for plan in shard}
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
    index = {
        "metadata": {"total_size": sum(plan.nbytes for plan in plans)},
        "weight_map": weight_map,
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """A tokenizer whose tokens are numbers, as words."""
    tokenizer = Tokenizer(WordLevel({str(at): at for at in range(vocab_size)}, unk_token="0"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "0"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
