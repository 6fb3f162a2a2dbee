"""Packed linear layers of a GPTQ folder: found by name, checked by shape and dtype.

Names are those of GPTQModel, optimum and AutoGPTQ, for a family with the usual names and mixtral's:

    model.layers.L.mlp.experts.N.{gate,up,down}_proj.{qweight,qzeros,scales,g_idx}
    model.layers.L.block_sparse_moe.experts.N.{w1,w3,w2}...      mixtral and phimoe, older
    model.layers.L.mlp.experts.N.{gate_up,down}_proj...          gate and up fused, gate first
    model.layers.L.mlp.experts.{gate_up,gate,up,down}_proj...    all experts stacked, [E, ...]

Dense layers have the names of the model's modules.
"""

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from speq.drafts.dense_draft import DenseLayer
from speq.drafts.gptq_config import OF_THIS_MODEL, GptqConfig
from speq.drafts.gptq_format import CODES_PER_WORD
from speq.errors import CheckpointError
from speq.experts.expert_names import ExpertNames
from speq.experts.expert_store import ExpertLayout
from speq.files.safetensors_file import SafetensorsFile, TensorInfo
from speq.files.shards import INDEX, SINGLE, Shards

REQUIRED = ("qweight", "qzeros", "scales")
FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
DTYPES = {
    "qweight": (torch.int32,),
    "qzeros": (torch.int32,),
    "g_idx": (torch.int32,),
    "scales": FLOAT_DTYPES,
    "bias": FLOAT_DTYPES,
}
# Model layer, expert (None: all of them, stacked) and projection.
ModuleKey = tuple[int, int | None, str]


@dataclass(frozen=True, slots=True)
class ModulePart:
    """A tensor of a file, or the slice of it that belongs to one expert."""

    file: SafetensorsFile
    info: TensorInfo

    def of_expert(self, expert: int) -> "ModulePart":
        """Select slice `expert` of a tensor stacked along the first dimension."""
        count, *shape = self.info.shape
        nbytes = self.info.nbytes // count
        offset = self.info.offset + expert * nbytes
        return ModulePart(
            self.file, replace(self.info, shape=tuple(shape), offset=offset, nbytes=nbytes)
        )

    def read(self) -> Tensor:
        data = torch.empty(self.info.nbytes, dtype=torch.uint8)
        self.file.read_into(self.info.offset, data)
        return data.view(self.info.dtype).view(self.info.shape)


@dataclass(frozen=True, slots=True)
class PackedModule:
    """A packed linear layer on disk, with its parts by name; empty ones (g_idx, bias) are left
    out.
    """

    name: str
    parts: dict[str, ModulePart]

    @property
    def path(self) -> Path:
        return self.parts["qweight"].file.path

    @property
    def columns(self) -> int:
        return self.parts["qweight"].info.shape[0] * CODES_PER_WORD

    def of_expert(self, expert: int) -> "PackedModule":
        parts = {name: part.of_expert(expert) for name, part in self.parts.items()}
        return PackedModule(f"{self.name} (expert {expert})", parts)


@dataclass(frozen=True, slots=True)
class PackedExpert:
    """A packed expert. gate_up is one module, or gate and up, or up alone without a gate; all
    matrices are [out, in] as in the model.
    """

    gate_up: tuple[PackedModule, ...]
    down: PackedModule

    @property
    def modules(self) -> tuple[PackedModule, ...]:
        return (*self.gate_up, self.down)


def tensor_pattern(names: ExpertNames) -> re.Pattern[str]:
    """Pattern of full tensor names of packed experts."""
    projections = "|".join(map(re.escape, (*names.projection_of, "gate_up_proj")))
    return re.compile(
        rf"(?P<module>(?:^|.*\.){names.within_layer}(?:(?P<expert>\d{{1,9}})\.)?"
        rf"(?P<projection>{projections}))\.(?P<part>qweight|qzeros|scales|g_idx|bias|weight)"
    )


class ExpertFinder:
    """Finder of a model's experts in the shards of a folder. Errors call the folder a draft."""

    def __init__(self, shards: Shards, experts: ExpertLayout, config: GptqConfig) -> None:
        self._path = shards.path
        self._experts = experts
        self._config = config
        self._found = self._modules(shards)
        self._used: set[ModuleKey] = set()

    def find(self) -> list[PackedExpert]:
        """Find every expert, layer after layer. Raises SpeqError if the folder has fewer or
        more.
        """
        found = [
            self._expert(layer, expert)
            for layer in self._experts.layers
            for expert in range(self._experts.num_experts)
        ]
        for key, extra in self._found.items():
            if key not in self._used:
                raise CheckpointError(
                    f"draft {self._path} does not fit the model: it has {extra.name} "
                    f"besides {self._experts.num_experts} experts in each of "
                    f"{len(self._experts.layers)} layers: {OF_THIS_MODEL}"
                )
        return found

    def _expert(self, layer: int, expert: int) -> PackedExpert:
        hidden, width = self._experts.hidden_size, self._experts.expert_width
        whole = {(layer, expert, "gate_up_proj"), (layer, None, "gate_up_proj")}
        parts = dict.fromkeys(self._experts.projections[:-1], width)
        if self._found.keys() & whole:
            parts = {"gate_up_proj": 2 * width}
        return PackedExpert(
            tuple(self._module(layer, expert, name, parts[name], hidden) for name in parts),
            self._module(layer, expert, "down_proj", hidden, width),
        )

    def _module(
        self, layer: int, expert: int, projection: str, rows: int, columns: int
    ) -> PackedModule:
        count = self._experts.num_experts
        for key in ((layer, expert, projection), (layer, None, projection)):
            module = self._found.get(key)
            if module is not None:
                self._used.add(key)
                stacked = () if key[1] is not None else (count,)
                check_module(self._path, self._config, module, rows, columns, stacked)
                return module.of_expert(expert) if stacked else module
        raise CheckpointError(
            f"draft {self._path} does not fit the model: it lacks {projection} of expert {expert} "
            f"in layer {layer}; the model has {count} experts in each such layer: {OF_THIS_MODEL}"
        )

    def _modules(self, shards: Shards) -> dict[ModuleKey, PackedModule]:
        """Every packed module of experts in the folder."""
        names, found = self._experts.names, dict[ModuleKey, PackedModule]()
        pattern = tensor_pattern(names)
        for name, (file, info) in shards.tensors.items():
            match = pattern.fullmatch(name)
            if match is None:
                continue
            if match["part"] == "weight":
                raise CheckpointError(
                    f"draft {self._path} has experts that are not quantised, {name} among them; "
                    "quantise all routed experts"
                )
            expert = None if match["expert"] is None else int(match["expert"])
            projection = names.projection_of.get(match["projection"], match["projection"])
            key = (int(match["layer"]), expert, projection)
            module = found.setdefault(key, PackedModule(match["module"], {}))
            if module.name != match["module"]:
                raise CheckpointError(
                    f"draft {self._path} holds both {module.name} and {match['module']}; leave one"
                )
            if info.nbytes or match["part"] in REQUIRED:
                module.parts[match["part"]] = ModulePart(file, info)
        return found


def dense_modules(
    shards: Shards, config: GptqConfig, shapes: Iterable[DenseLayer]
) -> dict[str, PackedModule]:
    """Find the dense layers of the model that the folder has packed, by the model's names.

    Raises SpeqError for incomplete ones and for other sizes.
    """
    by_name = {shape.name: shape for shape in shapes}
    found: dict[str, PackedModule] = {}
    for name, (file, info) in shards.tensors.items():
        module, _, part = name.rpartition(".")
        own = next((ending for ending in suffixes(module) if ending in by_name), None)
        if own is not None and part in DTYPES and (info.nbytes or part in REQUIRED):
            found.setdefault(own, PackedModule(module, {})).parts[part] = ModulePart(file, info)
    found = {name: packed for name, packed in found.items() if "qweight" in packed.parts}
    for name, packed in found.items():
        shape = by_name[name]
        check_module(shards.path, config, packed, shape.outputs, shape.columns, ())
    return found


def suffixes(name: str) -> Iterator[str]:
    """Yield a dotted name, and its suffixes without the first components."""
    while name:
        yield name
        _, _, name = name.partition(".")


def check_module(
    path: Path,
    config: GptqConfig,
    module: PackedModule,
    rows: int,
    columns: int,
    stacked: tuple[int, ...],
) -> None:
    """Raise SpeqError unless a module of the draft `path` is complete and packs [*stacked, rows,
    columns].
    """
    groups = columns // config.group_size_for(columns)
    needed = (*REQUIRED, "g_idx") if config.desc_act and groups > 1 else REQUIRED
    for part in needed:
        if part not in module.parts:
            why = ", which desc_act true calls for" if part == "g_idx" else ""
            raise CheckpointError(
                f"draft {path} lacks {module.name}.{part}{why}; download it again"
                ", or give another draft"
            )
    wanted: dict[str, tuple[int, ...]] = {
        "qweight": (columns // CODES_PER_WORD, rows),
        "qzeros": (groups, rows // CODES_PER_WORD),
        "scales": (groups, rows),
        "g_idx": (columns,),
        "bias": (rows,),
    }
    for part, held in module.parts.items():
        shape = (*stacked, *wanted[part])
        if held.info.shape != shape or held.info.dtype not in DTYPES[part]:
            dtypes = " or ".join(str(dtype) for dtype in DTYPES[part])
            raise CheckpointError(
                f"draft {path} does not fit the model: {module.name}.{part} is "
                f"{held.info.dtype} {list(held.info.shape)}; the model's sizes, bits 4 and "
                f"group_size {config.group_size} make it {dtypes} {list(shape)}: {OF_THIS_MODEL}"
            )


def file_names(path: Path) -> tuple[str, str]:
    """File names of a folder's index and of its single file.

    AutoGPTQ names them after the settings: gptq_model-4bit-128g.safetensors.
    """
    try:
        names = sorted(os.listdir(path))
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror}; {OF_THIS_MODEL}"
        ) from error
    if INDEX in names or SINGLE in names:
        return INDEX, SINGLE
    indexes = [name for name in names if name.endswith(".safetensors.index.json")]
    singles = [name for name in names if name.endswith(".safetensors")]
    if len(indexes) > 1 or (not indexes and len(singles) > 1):
        raise CheckpointError(
            f"{path} holds several checkpoints, {', '.join((indexes or singles)[:2])} among them; "
            "leave the one to read"
        )
    return indexes[0] if indexes else INDEX, singles[0] if singles and not indexes else SINGLE
