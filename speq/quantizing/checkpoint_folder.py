"""The folder that quantising writes: an ordinary GPTQ checkpoint, once it is complete.

A folder becomes a model with its last file, config.json. Until then it has a journal of finished
layers, and the activations that enter the next one.
"""

import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from speq.drafts.gptq_format import SYMMETRIC_ZERO, pack_codes, pack_zeros
from speq.errors import FileError, SpeqError
from speq.experts.expert_names import PROJECTIONS
from speq.experts.expert_store import ExpertLayout
from speq.experts.int4 import group_columns
from speq.experts.pack import COPY_BYTES, copy_whole, replace_synced
from speq.files.atomic_file import remove_abandoned, replacing
from speq.files.checkpoint import INDEX, QUANTIZE_JOURNAL, Checkpoint
from speq.files.checksums import Sink, SummedFile, check_crc32
from speq.files.contents import check_unchanged, content_digest, stamp
from speq.files.copied_files import QUANTIZE_CONFIG, QUANTIZE_REPORT, copied_files, is_copied
from speq.files.journal import Journal
from speq.files.range_file import bytes_of
from speq.files.safetensors_file import header_of
from speq.models.dense_parts import DenseShape
from speq.quantizing.expert import QuantisedExpert
from speq.quantizing.gptq import QuantisedMatrix
from speq.quantizing.report import LayerReport, TextReport
from speq.quantizing.settings import QuantizeSettings
from speq.units import Progress, format_bytes

logger = logging.getLogger("speq")

FORMAT = "speq-quantize-4"
REPORT = QUANTIZE_REPORT
CHECKPOINT_FORMAT = "gptq"
# Loaders that support `dynamic` then quantise only modules inside `experts`.
NOT_EXPERTS = r"-:^(?!.*\.experts(\.|$)).*"
Entries = dict[str, tuple[torch.dtype, tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class LayerShards:
    """Names of the folder's files: one per quantised layer, then one for everything else.

    dense    quantised dense layers
    on_disk  maps a tensor's name in the model to its name on disk
    """

    layout: ExpertLayout
    settings: QuantizeSettings
    dense: tuple[DenseShape, ...] = ()
    on_disk: Callable[[str], str] = str

    @property
    def layers(self) -> list[int]:
        """Decoder layers that have a file."""
        found = {*self.layout.layers, *(shape.layer for shape in self.dense)}
        return sorted(layer for layer in found if layer is not None)

    def name(self, layer: int) -> str:
        return self._name(self.layers.index(layer))

    def _name(self, at: int) -> str:
        return f"model-{at + 1:05}-of-{len(self.layers) + 1:05}.safetensors"

    @property
    def rest(self) -> str:
        return self._name(len(self.layers))

    @property
    def names(self) -> list[str]:
        return [*map(self.name, self.layers), self.rest]

    def dense_of(self, layer: int) -> list[DenseShape]:
        return [shape for shape in self.dense if shape.layer == layer]

    def entries(self, layer: int) -> Entries:
        """Tensors of a layer's shard by their names there, in order: dense layers, then experts."""
        found: Entries = {}
        for shape in self.dense_of(layer):
            found |= self._module(shape.name, shape.columns, shape.outputs)
        if layer in self.layout.layers:
            found |= self._experts(layer)
        return found

    def _experts(self, layer: int) -> Entries:
        hidden, width = self.layout.hidden_size, self.layout.expert_width
        found: Entries = {}
        for expert in range(self.layout.num_experts):
            for projection in self.layout.projections:
                inputs, outputs = hidden, width
                if projection == PROJECTIONS[-1]:
                    inputs, outputs = width, hidden
                module = self.layout.names.module(layer, expert, projection)
                found |= self._module(module, inputs, outputs)
        return found

    def _module(self, module: str, inputs: int, outputs: int) -> Entries:
        groups = inputs // group_columns(self.settings.group_size, inputs)
        module = self.on_disk(module)
        return {
            f"{module}.qweight": (torch.int32, (inputs // 8, outputs)),
            f"{module}.qzeros": (torch.int32, (groups, outputs // 8)),
            f"{module}.scales": (torch.float16, (groups, outputs)),
            f"{module}.g_idx": (torch.int32, (inputs,)),
        }

    @property
    def left(self) -> str:
        """Pattern of the modules that loaders with `dynamic` do not quantise."""
        if not self.dense:
            return NOT_EXPERTS
        known = "|".join(re.escape(self.on_disk(shape.name)) for shape in self.dense)
        return rf"-:^(?!(.*\.experts(\.|$)|({known})$)).*"


def nbytes_of(entries: Entries) -> int:
    return sum(dtype.itemsize * torch.Size(shape).numel() for dtype, shape in entries.values())


def tensors_of(expert: QuantisedExpert) -> Iterator[Tensor]:
    """Yield an expert's tensors in the order of `LayerShards.entries`."""
    outputs, width = expert.gate_up.codes.shape[1], expert.down.codes.shape[0]
    for first in range(0, outputs, width):
        yield from pack_matrix(expert.gate_up, slice(first, first + width))
    yield from pack_matrix(expert.down, slice(None))


def pack_matrix(matrix: QuantisedMatrix, columns: slice) -> Iterator[Tensor]:
    """Pack some outputs: qweight [K / 8, N], qzeros [G, N / 8], scales [G, N] and g_idx [K]."""
    codes = matrix.codes[:, columns]
    yield pack_codes(codes)
    scales = matrix.scales[:, columns].contiguous()
    zeros = torch.full(scales.shape, SYMMETRIC_ZERO, dtype=torch.uint8)
    yield pack_zeros(zeros, CHECKPOINT_FORMAT)
    yield scales
    yield matrix.groups


class QuantizeFolder:
    """A folder being written. Raises SpeqError if it is in use, or was begun with other settings.

    calibration  digest of the tokens
    done         layers that an earlier run finished, with their shards and the last one's output
                 verified; otherwise everything begins anew
    text         evaluation of the finished draft on the held-out text; None until it is done
    """

    def __init__(
        self,
        out: Path,
        checkpoint: Checkpoint,
        calibration: str,
        shards: LayerShards,
        progress: Progress | None = None,
    ) -> None:
        self.out = out
        self.shards = shards
        self._checkpoint, self._stamp = checkpoint, stamp(checkpoint)  # before anything is read
        self._shard_crc32: int | None = None
        begun = (out / QUANTIZE_JOURNAL).exists()
        if (out / "config.json").exists() and not begun:
            raise FileError(f"{out} is a model already; give a folder that is not there yet")
        remove_abandoned(out)
        if out.exists() and not begun and (not out.is_dir() or any(out.iterdir())):
            raise FileError(f"{out} exists and holds other files; give a folder that is not there")
        header = {
            "format": FORMAT,
            "source": content_digest(
                checkpoint, None if progress is None else partial(progress, "reading the model")
            ),
            "calibration": calibration,
            "settings": shards.settings.as_json(),
        }
        ours = {name for name in os.listdir(checkpoint.path) if is_copied(name)}
        self._journal = Journal(out / QUANTIZE_JOURNAL, header, partial(self._is_ours, ours))
        self._check_header(header)
        self.done: list[LayerReport] = []
        self.text: dict[str, TextReport] | None = None
        try:
            self._go_on()
        except (SpeqError, ValueError, KeyError, TypeError, AttributeError) as error:
            logger.warning(
                "%s: the files on disk do not match the journal, and quantising starts again (%s)",
                out,
                error,
            )
            self._journal.forget(0)
            self.done, self.text = [], None

    def _is_ours(self, copied: set[str], name: str) -> bool:
        """True if quantising writes a file of that name before config.json."""
        names = {QUANTIZE_JOURNAL, REPORT, INDEX, QUANTIZE_CONFIG, *self.shards.names}
        return name in names or name in copied or name.endswith(".activations")

    def _check_header(self, wanted: dict[str, Any]) -> None:
        for key, what in (
            ("format", "another version"),
            ("source", "another model"),
            ("calibration", "another calibration text"),
            ("settings", "other settings"),
        ):
            if self._journal.header.get(key) != wanted[key]:
                raise FileError(
                    f"{self.out} was begun with {what}; give the same ones to go on, or remove it"
                )

    def _go_on(self) -> None:
        """Load the finished layers, after comparing them with the files on disk.

        Raises one of several errors if anything differs.
        """
        leaving: int | None = None
        for entry in self._journal.entries:
            if "text" in entry:
                found = entry["text"].items()
                self.text = {lane: TextReport(**figures) for lane, figures in found}
                return
            report = LayerReport.from_json(entry["layer"])
            if report.layer != len(self.done):
                raise ValueError(f"layer {report.layer} after {len(self.done)} others")
            if report.layer in self.shards.layers:
                check_crc32(self.out / self.shards.name(report.layer), entry["shard"])
            leaving = entry["leaving"]
            self.done.append(report)
        if self.done:
            check_crc32(self.activations(len(self.done)), leaving)

    def activations(self, layer: int) -> Path:
        """Path of the activations that enter a layer."""
        return self.out / f"entering-{layer:05}.activations"

    def work(self, name: str) -> Path:
        """Path of a file of activations that no later run needs."""
        return self.out / f"{name}.activations"

    @contextmanager
    def shard(self, layer: int) -> Iterator[Sink]:
        """Open a layer's shard, to write its tensors in the order of `LayerShards.entries`."""
        with replacing(self.out / self.shards.name(layer)) as file:
            summed = SummedFile(file)
            summed.write(header_of(self.shards.entries(layer), {"format": "pt"}))
            yield summed
        self._shard_crc32 = summed.crc32

    def finish_layer(self, report: LayerReport, leaving: int) -> None:
        """Journal a layer whose shard and activations are on disk; remove the activations that
        entered it.

        leaving  CRC-32 of its output activations
        """
        check_unchanged(self._checkpoint, self._stamp)
        shard = self._shard_crc32 if report.layer in self.shards.layers else None
        self._journal.add({"layer": asdict(report), "shard": shard, "leaving": leaving})
        self.done.append(report)
        self.activations(report.layer).unlink(missing_ok=True)

    def finish_text(self, text: dict[str, TextReport]) -> None:
        """Journal the evaluation on the held-out text; the activations are no longer needed."""
        self._journal.add({"text": {lane: asdict(figures) for lane, figures in text.items()}})
        self.text = text

    def check_room(self, checkpoint: Checkpoint, activation_bytes: int) -> None:
        """Raise SpeqError unless the disk has room for the rest of the folder."""
        layers = self.shards.layers
        absent = [at for at in layers if not (self.out / self.shards.name(at)).exists()]
        needed = activation_bytes + sum(nbytes_of(self.shards.entries(at)) for at in absent)
        if not (self.out / self.shards.rest).exists():
            needed += nbytes_of(rest_of(checkpoint, self.shards))
        needed += sum(path.stat().st_size for path in copied_files(checkpoint.path))
        free = shutil.disk_usage(self.out).free
        if needed > free:
            raise FileError(
                f"quantising takes up to {format_bytes(needed)} of disk and {format_bytes(free)} "
                f"are left at {self.out}; free some, write to another disk, or use fewer samples"
            )

    def finish(self, checkpoint: Checkpoint, report: dict[str, Any], version: str) -> None:
        """Write everything else, config.json last; then remove the journal and other work files."""
        entries = rest_of(checkpoint, self.shards)
        with replacing(self.out / self.shards.rest) as file:
            write_rest(checkpoint, entries, file)
        weight_map = dict.fromkeys(map(checkpoint.on_disk, entries), self.shards.rest)
        total = nbytes_of(entries)
        for layer in self.shards.layers:
            quantised = self.shards.entries(layer)
            weight_map |= dict.fromkeys(quantised, self.shards.name(layer))
            total += nbytes_of(quantised)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        for path in copied_files(checkpoint.path):
            copy_whole(path, self.out / path.name)
        check_unchanged(checkpoint, self._stamp)
        quantization = quantization_config(self.shards.settings, version, self.shards.left)
        config = checkpoint.config | {"quantization_config": quantization}
        self._write_json(INDEX, index)
        self._write_json(REPORT, report)
        self._write_json(QUANTIZE_CONFIG, quantization)
        self._write_json("config.json", config)
        for path in self.out.glob("*.activations"):
            path.unlink()
        self._journal.path.unlink(missing_ok=True)

    def _write_json(self, name: str, content: dict[str, Any]) -> None:
        with replace_synced(self.out / name) as file:
            file.write(json.dumps(content, indent=1).encode() + b"\n")


def rest_of(checkpoint: Checkpoint, shards: LayerShards) -> Entries:
    """Unquantised tensors by the model's names, in the order of reading."""
    names, dense = shards.layout.names, {f"{shape.name}.weight" for shape in shards.dense}
    tensors = {
        name: at
        for name, at in checkpoint.tensors.items()
        if not names.is_expert(name) and name not in dense
    }
    in_order = sorted(tensors.items(), key=lambda item: (item[1][0].path, item[1][1].offset))
    return {name: (info.dtype, info.shape) for name, (_, info) in in_order}


def write_rest(checkpoint: Checkpoint, entries: Entries, out: BinaryIO) -> None:
    """Write a safetensors file of some of a checkpoint's tensors, unchanged."""
    stored = {checkpoint.on_disk(name): entry for name, entry in entries.items()}
    out.write(header_of(stored, {"format": "pt"}))
    buffer = torch.empty(COPY_BYTES, dtype=torch.uint8)
    for name in entries:
        file, info = checkpoint.tensors[name]
        for at in range(0, info.nbytes, COPY_BYTES):
            part = buffer[: min(COPY_BYTES, info.nbytes - at)]
            file.read_into(info.offset + at, part)
            out.write(bytes_of(part))


def write_tensor(tensor: Tensor, out: Sink) -> None:
    out.write(bytes_of(tensor.contiguous().view(-1).view(torch.uint8)))


def quantization_config(
    settings: QuantizeSettings, version: str, left: str = NOT_EXPERTS
) -> dict[str, Any]:
    """Build the quantization config of AutoGPTQ and GPTQModel, with the names of both.

    left  pattern of modules that are not quantised, see `LayerShards.left`
    """
    return {
        "bits": settings.bits,
        "group_size": settings.group_size,
        "sym": True,
        "desc_act": settings.desc_act,
        "static_groups": settings.column_order == "static",
        "damp_percent": settings.damp,
        "lm_head": False,
        "quant_method": "gptq",
        "method": "gptq",
        "checkpoint_format": CHECKPOINT_FORMAT,
        "format": CHECKPOINT_FORMAT,
        "pack_dtype": "int32",
        "dynamic": {left: {}},
        "meta": {
            "quantizer": [f"speq:{version}"],
            "calibrated": settings.method == "gptq",
            "codes": settings.codes,
        },
    }
