"""Stores of exact experts on disk, which are read one at a time."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from speq.errors import CheckpointError, UnsupportedError, present
from speq.experts.codec import ExpertCodec, ExpertShape, Matrices, own_codec
from speq.experts.decoded import decode, decoding_bytes, stored_bytes
from speq.experts.expert_names import (
    FUSED,
    GATE_UP,
    PROJECTIONS,
    UNGATED_PROJECTIONS,
    USUAL_NAMES,
    ExpertMatrix,
    ExpertNames,
    Stacked,
)
from speq.experts.packed_draft import TiedDraft
from speq.files.alignment import ALIGNMENT, align, allocate_aligned
from speq.files.checkpoint import Checkpoint
from speq.files.coded_tensors import CodedTensors
from speq.files.packing import MXFP4_BLOCK, NVFP4_BLOCK, CodePacking, InTurns, Turned
from speq.files.published_format import (
    FP8,
    MXFP4,
    MXFP4_BLOCK_BYTES,
    NVFP4,
    WORDS,
)
from speq.files.range_file import ENDS_BYTES
from speq.files.safetensors_file import OTHER_VERSION, SafetensorsFile, TensorInfo
from speq.kernels.scaled_layout import (
    Fp8Layout,
    Int4GroupsLayout,
    Mxfp4Layout,
    Nvfp4Layout,
    ScaledLayout,
)

# A file, an offset in it and a number of bytes.
Range = tuple[SafetensorsFile, int, int]
NO_SCALES = "codes that were checked have no scales"
# Dtype of scales that take so many times as much in float32.
WIDENED = {2: torch.bfloat16, 4: torch.float8_e8m0fnu}


@dataclass(frozen=True, slots=True)
class Matrix:
    """Location of an expert's matrix and, if it is codes, of its scales and of its zero points or
    its one scale. name: of the tensor
    """

    name: str
    range: Range
    scales: Range | None = None
    third: Range | None = None


@dataclass(frozen=True, slots=True)
class TensorPart:
    """A range of a shard, and its place in a packed expert.

    widened  dtype of scales that the packed expert has in float32; None: they are as on disk
    turned   how to transpose it, if it is transposed on disk, or where its rows belong, if they are
             every other row
    codes    name of codes that no kernel multiplies, which are decoded as they are read; None: the
             range is read as it is
    """

    range: Range
    at: int
    codes: str | None = None
    widened: torch.dtype | None = None
    turned: Turned | InTurns | None = None


class ExpertStore(Protocol):
    """Store of exact experts. Layers count MoE layers only.

    published  whether experts are plain weights as published, which a run may encode as it reads
    """

    published: bool
    num_layers: int
    num_experts: int

    @property
    def codec(self) -> ExpertCodec: ...

    @property
    def source(self) -> "ExpertStore":
        """The store that reads the disk: this one, or the one whose experts are encoded."""

    @property
    def files(self) -> tuple[Path, ...]:
        """Files of the experts, possibly with other weights."""

    @property
    def tied_draft(self) -> TiedDraft | None:
        """The draft that experts must be decoded with, if they need a certain one."""

    @property
    def reading_bytes(self) -> int:
        """Bytes that each reading thread takes besides the slot it fills."""

    def record_bytes(self, layer: int, expert: int) -> int:
        """Bytes of a packed expert in its slot."""

    def moved_bytes(self, layer: int, expert: int) -> int:
        """Bytes moved to fill a slot with the expert."""

    def read(self, layer: int, expert: int, slot: Tensor) -> int:
        """Read one expert into `slot` [slot_bytes] uint8, aligned CPU memory.

        Bytes after the expert are undefined. Returns the bytes read, which may exceed the expert's.
        Threads may read into different slots at the same time.
        """

    def close(self) -> None:
        """Close the store's own files."""


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """Number, shape and names of a model's experts, from its config and family.

    layers  model layers that have experts
    names   names of experts and routers on disk
    stacked  how weights of all experts of a layer are published
    biased      whether they have biases, which are not part of packed experts
    normed      whether their output is normed before it is added
    gated       whether they have a gate
    """

    layers: tuple[int, ...]
    num_experts: int
    hidden_size: int
    expert_width: int
    names: ExpertNames = USUAL_NAMES
    stacked: Stacked = Stacked.ROWS
    biased: bool = False
    normed: bool = False
    gated: bool = True

    @property
    def weights(self) -> int:
        """Weights of an expert."""
        return len(self.projections) * self.hidden_size * self.expert_width

    @property
    def projections(self) -> tuple[str, ...]:
        """Names of an expert's matrices, in order."""
        return PROJECTIONS if self.gated else UNGATED_PROJECTIONS

    def shape(self, matrix: ExpertMatrix) -> tuple[int, ...]:
        """Shape of a tensor of experts' matrices on disk."""
        hidden, width = self.hidden_size, self.expert_width
        rows = 2 * width if matrix.projection == GATE_UP else width
        shape = (hidden, width) if matrix.projection == "down_proj" else (rows, hidden)
        return shape if matrix.expert is not None else (self.num_experts, *shape)


class SafetensorsExpertStore:
    """Store of experts in the shards of a published model.

    codes_bytes  of an expert in codes that no kernel multiplies, which is decoded to bfloat16 words
                 as it is read; 0: experts are read as they are

    Raises SpeqError if an expert is missing or differs in shape or dtype.
    """

    published = True

    def __init__(self, checkpoint: Checkpoint, layout: ExpertLayout) -> None:
        sizes = layout.names, layout.hidden_size
        layout = replace(layout, stacked=stacked_in(checkpoint.tensors, layout.stacked, *sizes))
        self.num_layers = len(layout.layers)
        self.num_experts = layout.num_experts
        self.names, self._coded = layout.names, checkpoint.coded
        coded = checkpoint.coded
        order = {layer: at for at, layer in enumerate(layout.layers)}
        stored, form, shape = self._common_shape(checkpoint, layout)
        self._codec = own_codec(shape)
        found: dict[tuple[int, int], dict[str, Matrix]] = {}
        for name, (file, info) in checkpoint.tensors.items():
            matrix = layout.names.matrix(name)
            if matrix is None or matrix.layer not in order:
                continue
            wanted = stored_shape(layout, matrix, shape.published, coded.packing)
            if info.shape != wanted or info.dtype != stored:
                raise CheckpointError(
                    f"{file.path}: tensor {name} is {info.dtype} {list(info.shape)}; config.json "
                    f"and the other experts make it {stored} {list(wanted)}; {OTHER_VERSION}"
                )
            held = range(layout.num_experts) if matrix.expert is None else (matrix.expert,)
            nbytes = info.nbytes // len(held)
            scales, third = coded.scales_of(name), coded.third_of(name)
            if (scales is None) != (form == WORDS):
                raise CheckpointError(
                    f"{file.path}: tensor {name} is {info.dtype}, and other experts are published "
                    f"in {form}; {OTHER_VERSION}"
                )
            for at, expert in enumerate(held):
                parts = found.setdefault((order[matrix.layer], expert), {})
                place = file, info.offset + at * nbytes, nbytes
                part = None if scales is None else part_of(*scales, at, len(held))
                of_third = None if third is None else part_of(*third, at, len(held))
                parts[matrix.projection] = Matrix(name, place, part, of_third)
        complete = self._complete(found, checkpoint, layout)
        order_on_disk = layout.stacked, coded.packing
        decodes, self.codes_bytes = form != shape.published, 0
        if decodes:
            self._parts = [decoded_parts(coded, record) for record in complete]
            self.codes_bytes = sum(stored_bytes(coded, each.name) for each in complete[0])
        else:
            self._parts = [parts_of(shape, record, *order_on_disk) for record in complete]
        self.reading_bytes = reading_bytes(shape, *order_on_disk, decodes)
        self._buffers: SimpleQueue[Buffers] = SimpleQueue()
        self._turned_bytes = turned_bytes(shape, *order_on_disk)

    @staticmethod
    def _common_shape(
        checkpoint: Checkpoint, layout: ExpertLayout
    ) -> tuple[torch.dtype, str, ExpertShape]:
        """Find the dtype and the format on disk of the first matrix of these layers' experts, and
        the experts' shape in slots. Other layers may have another dtype.
        """
        sizes = layout.hidden_size, layout.expert_width
        for name, (_, info) in checkpoint.tensors.items():
            matrix = layout.names.matrix(name)
            if matrix is not None and matrix.layer in layout.layers:
                coded = checkpoint.coded
                if coded.is_coded(name) and coded.held == WORDS:
                    decoded = ExpertShape(*sizes, torch.bfloat16, gated=layout.gated)
                    return info.dtype, coded.format, decoded
                if coded.is_coded(name):
                    divides = coded.packing is not None and coded.packing.divides
                    hidden_size, width = sizes
                    scaled = ExpertShape(
                        *(hidden_size, width, torch.bfloat16, checkpoint.format),
                        groups=coded.groups,
                        divides=divides,
                        blocks=coded.fp8.blocks,
                        gated=layout.gated,
                    )
                    check_groups(scaled, checkpoint.path)
                    return info.dtype, scaled.published, scaled
                return info.dtype, WORDS, ExpertShape(*sizes, info.dtype, gated=layout.gated)
        first = layout.names.module(layout.layers[0], 0, layout.projections[0])
        raise CheckpointError(
            f"{checkpoint.path} holds no expert tensors such as {first}.weight; download the model "
            "as its authors published it"
        )

    def _complete(
        self,
        found: dict[tuple[int, int], dict[str, Matrix]],
        checkpoint: Checkpoint,
        layout: ExpertLayout,
    ) -> list[list[Matrix]]:
        records = []
        for layer in range(self.num_layers):
            for expert in range(self.num_experts):
                parts = found.get((layer, expert), {})
                projections = FUSED if GATE_UP in parts else layout.projections
                for projection in projections:
                    if projection not in parts:
                        raise CheckpointError(
                            f"{checkpoint.path} lacks {projection} of expert {expert} in layer "
                            f"{layout.layers[layer]}; config.json has {self.num_experts} "
                            f"experts in each such layer; {OTHER_VERSION}"
                        )
                if len(parts) > len(projections):
                    raise CheckpointError(
                        f"{checkpoint.path} has experts of layer {layout.layers[layer]} twice, "
                        f"alone and in one tensor of all; {OTHER_VERSION}"
                    )
                records.append([parts[projection] for projection in projections])
        return records

    @property
    def codec(self) -> ExpertCodec:
        return self._codec

    @property
    def source(self) -> ExpertStore:
        return self

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(sorted({part.range[0].path for record in self._parts for part in record}))

    @property
    def tied_draft(self) -> TiedDraft | None:
        return None

    def record_bytes(self, layer: int, expert: int) -> int:
        return self._codec.record_range[0]

    def moved_bytes(self, layer: int, expert: int) -> int:
        return self._codec.record_range[0]

    def read(
        self,
        layer: int,
        expert: int,
        slot: Tensor,
        arrived: Callable[[int], None] = lambda nbytes: None,
    ) -> int:
        """Read one expert into `slot`, as `ExpertStore.read` does.

        arrived  called after each matrix of plain weights: so many bytes of the slot are filled
        """
        try:
            buffers = self._buffers.get_nowait()
        except Empty:  # as many as threads ever read at a time
            buffers = Buffers.allocate(self._turned_bytes)
        read_bytes = 0
        try:
            for part in self._parts[layer * self.num_experts + expert]:
                if part.codes is not None:
                    words = decode(self._coded, part.codes).flatten().view(torch.uint8)
                    slot[part.at : part.at + words.nbytes].copy_(words)
                    read_bytes += stored_bytes(self._coded, part.codes)
                    arrived(part.at + words.nbytes)
                    continue
                file, offset, nbytes = part.range
                in_turns = isinstance(part.turned, InTurns)
                room = slot[part.at : part.at + (2 * nbytes if in_turns else nbytes)]
                into = room if part.turned is None else buffers.turned[:nbytes]
                read_bytes += file.read_scattered(offset, into, buffers.ends)
                if part.turned is not None:
                    part.turned.put(into, room)
                if part.widened is not None:
                    values = room.view(part.widened).float().view(torch.uint8)
                    slot[part.at : part.at + values.nbytes].copy_(values)
                arrived(part.at + nbytes)
        finally:
            self._buffers.put(buffers)
        return read_bytes

    def drop_buffers(self) -> None:
        """Free the buffers of reads that have ended. None may be going on."""
        self._buffers = SimpleQueue()

    def close(self) -> None:
        pass  # the shards are the checkpoint's


class Buffers(NamedTuple):
    """Buffers of a reading thread, besides the slot.

    ends    blocks at the ends of ranges
    turned  a matrix that is transposed on disk
    """

    ends: Tensor
    turned: Tensor

    @classmethod
    def allocate(cls, nbytes: int) -> "Buffers":
        """Allocate buffers. nbytes: of the largest matrix that is transposed on disk; 0: none
        is.
        """
        turned = allocate_aligned(1, align(nbytes))[0] if nbytes else torch.empty(0)
        return cls(allocate_aligned(1, ENDS_BYTES)[0], turned)


def turned_bytes(shape: ExpertShape, stacked: Stacked, packing: CodePacking | None) -> int:
    """Bytes of a reading thread's buffer for a matrix that is transposed on disk."""
    weights = max(prod(shape.gate_up_shape), prod(shape.down_shape))
    if packing is not None and shape.published != WORDS:
        turned_codes = packing.turned or shape.published == MXFP4
        return prod(shape.down_shape) // 2 if turned_codes else 0
    turned = stacked is not Stacked.ROWS and shape.published == WORDS
    return weights * shape.dtype.itemsize if turned else 0


def reading_bytes(
    shape: ExpertShape, stacked: Stacked, packing: CodePacking | None, decodes: bool = False
) -> int:
    """Bytes of a reading thread's buffers for published experts, besides the slot it fills.

    decodes  whether they are decoded as they are read
    """
    if decodes:
        rows, columns = shape.down_shape
        decoding = max(decoding_bytes(rows, columns), decoding_bytes(columns, rows))
        return ENDS_BYTES + ALIGNMENT + decoding
    turned = turned_bytes(shape, stacked, packing)
    while_turning = 0 if packing is None else turned * (packing.room - 1)
    return ENDS_BYTES + ALIGNMENT + (align(turned) + ALIGNMENT + while_turning if turned else 0)


def stacked_in(
    tensors: Mapping[str, tuple[SafetensorsFile, TensorInfo]],
    published: Stacked,
    names: ExpertNames,
    hidden_size: int,
) -> Stacked:
    """How experts lie in a checkpoint, published so or saved by transformers.

    A square matrix does not tell, but the other one then does.
    """
    for name, (_, info) in tensors.items() if published is Stacked.COLUMNS else ():
        matrix = names.matrix(name)
        if matrix is None or matrix.expert is not None or len(set(info.shape[1:])) < 2:
            continue
        inputs = info.shape[2 if matrix.projection == GATE_UP else 1]
        return Stacked.ROWS if inputs == hidden_size else published
    return published


def stored_shape(
    layout: ExpertLayout, matrix: ExpertMatrix, published: str, packing: CodePacking | None
) -> tuple[int, ...]:
    """Shape on disk of a tensor of experts' matrices, plain weights or codes."""
    shape = layout.shape(matrix)
    if packing is not None and len(shape) == 2:
        return packing.codes_shape(*shape)
    if published == MXFP4:
        return *shape[:-1], shape[-1] // MXFP4_BLOCK, MXFP4_BLOCK_BYTES
    turned = layout.stacked is not Stacked.ROWS and matrix.expert is None
    return (*shape[:-2], shape[-1], shape[-2]) if turned else shape


def part_of(file: SafetensorsFile, info: TensorInfo, at: int, count: int) -> Range:
    """Select one of `count` equal parts of a tensor."""
    nbytes = info.nbytes // count
    return file, info.offset + at * nbytes, nbytes


def parts_of(
    shape: ExpertShape,
    matrices: list[Matrix],
    stacked: Stacked = Stacked.ROWS,
    packing: CodePacking | None = None,
) -> list[TensorPart]:
    """Places of an expert's matrices, and of their scales, in the packed expert.

    stacked  see `ExpertLayout`; packing: of INT4 and NVFP4
    """
    if shape.published == WORDS:
        ends = accumulate((each.range[2] for each in matrices), initial=0)
        turned: list[Turned | None] = [None] * len(matrices)
        if stacked is not Stacked.ROWS and len(matrices) == len(FUSED):
            dtype, in_turns = shape.dtype, stacked is Stacked.INTERLEAVED
            turned = [
                Turned(*shape.gate_up_shape, dtype, interleaved=in_turns),
                Turned(*shape.down_shape, dtype),
            ]
        places = zip(matrices, ends, turned, strict=False)
        return [TensorPart(each.range, at, turned=turn) for each, at, turn in places]
    parts, layout = [], layout_of(shape)
    if shape.published == MXFP4 and packing is not None:
        return parts_in_turns(layout, matrices)
    kinds = zip(matrices, layout.parts, layout.matrices, strict=True)
    for matrix, sections, (rows, columns) in kinds:
        turns: tuple[Turned | None, ...] = (None, None, None)
        if packing is not None and shape.groups is not None:
            turns = packing.turns(rows, columns, columns // shape.groups.size, shape.groups.dtype)
        ranges = matrix.range, matrix.scales, matrix.third
        for range_, section, turn in zip(ranges, sections, turns, strict=False):
            if range_ is not None:
                widened = WIDENED.get(section.nbytes // range_[2])
                parts.append(TensorPart(range_, section.at, widened=widened, turned=turn))
    return parts


def parts_in_turns(layout: ScaledLayout, matrices: list[Matrix]) -> list[TensorPart]:
    """Places of gate, up and down, and of their scales, where rows of gate and up are in turns."""
    (gate_up, _), parts = layout.matrices, []
    for at, matrix in enumerate(matrices):
        sections = layout.parts[at == len(matrices) - 1]
        turned = InTurns(gate_up[0] // 2, at) if at < len(matrices) - 1 else None
        for range_, section in zip((matrix.range, matrix.scales), sections, strict=True):
            parts.append(TensorPart(present(range_, NO_SCALES), section.at, turned=turned))
    return parts


def decoded_parts(coded: CodedTensors, matrices: list[Matrix]) -> list[TensorPart]:
    """Places of an expert's matrices, which are decoded, in the packed expert."""
    nbytes = (torch.bfloat16.itemsize * prod(coded.matrix_shape(each.name)) for each in matrices)
    ends = accumulate(nbytes, initial=0)
    places = zip(matrices, ends, strict=False)
    return [TensorPart(each.range, at, codes=each.name) for each, at in places]


def layout_of(shape: ExpertShape) -> ScaledLayout:
    """Layout of experts published as codes."""
    sizes = shape.hidden_size, shape.expert_width
    if shape.groups is not None:
        size, zeros, halves = shape.groups
        return Int4GroupsLayout(*sizes, size, zeros, halves, gated=shape.gated)
    if shape.published == FP8:
        return Fp8Layout(*sizes, *shape.blocks, gated=shape.gated)
    return (Mxfp4Layout if shape.published == MXFP4 else Nvfp4Layout)(*sizes, gated=shape.gated)


def check_groups(shape: ExpertShape, where: Path) -> None:
    """Raise SpeqError if experts' widths are not whole groups of INT4, or pairs of NVFP4's, or if
    experts without a gate are in MXFP4.
    """
    if shape.published == MXFP4 and not shape.gated:
        raise UnsupportedError(
            f"{where} has experts without a gate in MXFP4, which is not read; give the original "
            "16-bit checkpoint"
        )
    sizes = shape.hidden_size, shape.expert_width
    group = {NVFP4: 2 * NVFP4_BLOCK, MXFP4: MXFP4_BLOCK}.get(shape.published, 1)
    group = group if shape.groups is None else shape.groups.size
    if any(size % group for size in sizes):
        raise UnsupportedError(
            f"{where} has experts of {sizes[0]} by {sizes[1]} in groups of {group}, "
            "and groups that are not whole are not read; give the original 16-bit checkpoint"
        )


def expert_slot(store: ExpertStore) -> Tensor:
    """Allocate a slot on the CPU."""
    return allocate_aligned(1, store.codec.slot_bytes)[0]


def read_matrices(store: ExpertStore, layer: int, expert: int, slot: Tensor) -> Matrices:
    """Read an expert's exact matrices through `slot`; possibly views of it.

    Raises SpeqError if they need a draft.
    """
    store.read(layer, expert, slot)
    return store.codec.decode(slot)


def mean_moved_bytes(store: ExpertStore) -> float:
    count = store.num_layers * store.num_experts
    sizes = (store.moved_bytes(*divmod(at, store.num_experts)) for at in range(count))
    return sum(sizes) / count
