"""Exact experts on disk, as records that can be read one at a time."""

from dataclasses import dataclass
from itertools import accumulate
from math import prod
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from speq.errors import SpeqError
from speq.experts.codec import ExpertCodec, ExpertShape, Matrices, own_codec
from speq.experts.expert_names import (
    FUSED,
    GATE_UP,
    PROJECTIONS,
    USUAL_NAMES,
    ExpertMatrix,
    ExpertNames,
)
from speq.experts.packed_draft import TiedDraft
from speq.files.alignment import ALIGNMENT, aligned, aligned_bytes
from speq.files.checkpoint import OTHER_VERSION, Checkpoint
from speq.files.published_format import (
    FP8,
    MXFP4,
    MXFP4_BLOCK,
    MXFP4_BLOCK_BYTES,
    WORDS,
)
from speq.files.range_file import ENDS_BYTES
from speq.files.safetensors_file import SafetensorsFile, TensorInfo
from speq.kernels.scaled_layout import Fp8Layout, Mxfp4Layout, ScaledLayout

# A file, an offset in it and a number of bytes.
Range = tuple[SafetensorsFile, int, int]


@dataclass(frozen=True, slots=True)
class Matrix:
    """Where a matrix of an expert lies; of codes, their scales too."""

    range: Range
    scales: Range | None = None


@dataclass(frozen=True, slots=True)
class TensorPart:
    """A range of a shard, and where in a record it belongs.

    widened  whether it holds bfloat16 that the record has as float32
    turned   of a matrix that lies there transposed: how the words of the range become those of the
             record
    """

    range: Range
    at: int
    widened: bool = False
    turned: "Turned | None" = None


@dataclass(frozen=True, slots=True)
class Turned:
    """A matrix [N, K] that lies on disk as [K, N].

    in_turns  whether rows of gate and of up take turns there
    """

    rows: int
    columns: int
    dtype: torch.dtype
    in_turns: bool

    def put(self, stored: Tensor, room: Tensor) -> None:
        """Write the bytes of the matrix into `room`; both [rows * columns * itemsize] uint8.

        What is in `stored` may be lost.
        """
        given, made = stored.view(self.dtype), room.view(self.dtype).view(self.rows, self.columns)
        # torch is fast at whole matrices that are transposed, and at rows.
        made.copy_(given.view(self.columns, self.rows).t())
        if self.in_turns:
            ordered = given.view(self.rows, self.columns)
            for first, half in enumerate(ordered.chunk(2)):
                half.copy_(made[first::2])
            made.copy_(ordered)


class ExpertStore(Protocol):
    """Records of exact experts. Layers count MoE layers only.

    published  whether records are words as published, which a run may encode as it reads them
    """

    published: bool
    num_layers: int
    num_experts: int

    @property
    def codec(self) -> ExpertCodec: ...

    @property
    def source(self) -> "ExpertStore":
        """The store that reads come from: this one, or that whose words are encoded."""

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that hold the records, perhaps with other weights."""

    @property
    def tied_draft(self) -> TiedDraft | None:
        """The only draft that the records can be read over, where they need a certain one."""

    @property
    def reading_bytes(self) -> int:
        """What each thread that reads takes beside the slot it fills."""

    def record_bytes(self, layer: int, expert: int) -> int:
        """What an expert's record takes of its slot."""

    def moved_bytes(self, layer: int, expert: int) -> int:
        """What has to be moved to fill a slot with it."""

    def read(self, layer: int, expert: int, slot: Tensor) -> int:
        """Fill `slot` [slot_bytes] uint8, aligned CPU memory, with one expert's record.

        What lies behind the record is undefined. Returns bytes read, which may be more than the
        record's. Threads may read at the same time, into different slots.
        """

    def close(self) -> None:
        """Give back files that are the store's own."""


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """What a model's config and its family say of its experts.

    layers  model layers that have experts
    names   what experts and routers are called on disk
    transposed  whether words of all experts of a layer lie there as [E, H, 2F], gate and up in
                turns, and [E, F, H]
    biased      whether they have biases, which lie outside the records
    normed      whether what they give goes through norms, and is not added as it is
    """

    layers: tuple[int, ...]
    num_experts: int
    hidden_size: int
    expert_width: int
    names: ExpertNames = USUAL_NAMES
    transposed: bool = False
    biased: bool = False
    normed: bool = False

    def shape(self, matrix: ExpertMatrix) -> tuple[int, ...]:
        """What a tensor of experts' matrices is on disk."""
        hidden, width = self.hidden_size, self.expert_width
        rows = 2 * width if matrix.projection == GATE_UP else width
        shape = (hidden, width) if matrix.projection == "down_proj" else (rows, hidden)
        return shape if matrix.expert is not None else (self.num_experts, *shape)


class SafetensorsExpertStore:
    """Experts read straight from the shards a model was published in, as they were published.

    Raises SpeqError where an expert is absent or not of the shape and dtype the others have.
    """

    published = True

    def __init__(self, checkpoint: Checkpoint, layout: ExpertLayout) -> None:
        self.num_layers = len(layout.layers)
        self.num_experts = layout.num_experts
        self.names = layout.names
        order = {layer: at for at, layer in enumerate(layout.layers)}
        stored, shape = self._common_shape(checkpoint, layout)
        self._codec = own_codec(shape)
        found: dict[tuple[int, int], dict[str, Matrix]] = {}
        for name, (file, info) in checkpoint.tensors.items():
            matrix = layout.names.matrix(name)
            if matrix is None or matrix.layer not in order:
                continue
            turned = layout.transposed and matrix.expert is None
            wanted = stored_shape(layout.shape(matrix), shape.published, turned)
            if info.shape != wanted or info.dtype != stored:
                raise SpeqError(
                    f"{file.path}: tensor {name} is {info.dtype} {list(info.shape)}; config.json "
                    f"and the other experts make it {stored} {list(wanted)}; {OTHER_VERSION}"
                )
            held = range(layout.num_experts) if matrix.expert is None else (matrix.expert,)
            nbytes = info.nbytes // len(held)
            scales = checkpoint.scales_of(name)
            if (scales is None) != (shape.published == WORDS):
                raise SpeqError(
                    f"{file.path}: tensor {name} is {info.dtype}, and other experts are published "
                    f"in {shape.published}; {OTHER_VERSION}"
                )
            for at, expert in enumerate(held):
                parts = found.setdefault((order[matrix.layer], expert), {})
                place = file, info.offset + at * nbytes, nbytes
                part = None if scales is None else part_of(*scales, at, len(held))
                parts[matrix.projection] = Matrix(place, part)
        complete = self._complete(found, checkpoint, layout)
        self._parts = [parts_of(shape, record, layout.transposed) for record in complete]
        self.reading_bytes = reading_bytes(shape, layout.transposed)
        self._buffers: SimpleQueue[Buffers] = SimpleQueue()
        self._turned_bytes = turned_bytes(shape, layout.transposed)

    @staticmethod
    def _common_shape(
        checkpoint: Checkpoint, layout: ExpertLayout
    ) -> tuple[torch.dtype, ExpertShape]:
        """The dtype on disk of the first matrix of an expert of these layers, and what experts are
        then: those of other layers may be of another.
        """
        sizes = layout.hidden_size, layout.expert_width
        for name, (_, info) in checkpoint.tensors.items():
            matrix = layout.names.matrix(name)
            if matrix is not None and matrix.layer in layout.layers:
                if checkpoint.scales_of(name) is not None:
                    scaled = ExpertShape(*sizes, torch.bfloat16, checkpoint.format)
                    return info.dtype, scaled
                return info.dtype, ExpertShape(*sizes, info.dtype)
        raise SpeqError(
            f"{checkpoint.path} holds no expert tensors such as "
            f"{layout.names.module(layout.layers[0], 0, PROJECTIONS[0])}.weight; download the "
            "model as its authors published it"
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
                projections = FUSED if GATE_UP in parts else PROJECTIONS
                for projection in projections:
                    if projection not in parts:
                        raise SpeqError(
                            f"{checkpoint.path} lacks {projection} of expert {expert} in layer "
                            f"{layout.layers[layer]}; config.json promises {self.num_experts} "
                            f"experts in each such layer; {OTHER_VERSION}"
                        )
                if len(parts) > len(projections):
                    raise SpeqError(
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

    def read(self, layer: int, expert: int, slot: Tensor) -> int:
        try:
            buffers = self._buffers.get_nowait()
        except Empty:  # as many as threads ever read at a time
            buffers = Buffers.made(self._turned_bytes)
        read_bytes = 0
        try:
            for part in self._parts[layer * self.num_experts + expert]:
                file, offset, nbytes = part.range
                room = slot[part.at : part.at + nbytes]
                into = room if part.turned is None else buffers.turned[:nbytes]
                read_bytes += file.read_scattered(offset, into, buffers.ends)
                if part.turned is not None:
                    part.turned.put(into, room)
                if part.widened:
                    values = room.view(torch.bfloat16).float().view(torch.uint8)
                    slot[part.at : part.at + values.nbytes].copy_(values)
        finally:
            self._buffers.put(buffers)
        return read_bytes

    def close(self) -> None:
        pass  # the shards are the checkpoint's


class Buffers(NamedTuple):
    """What a thread that reads takes beside the slot.

    ends    for blocks at the ends of ranges
    turned  for a matrix that lies on disk transposed
    """

    ends: Tensor
    turned: Tensor

    @classmethod
    def made(cls, nbytes: int) -> "Buffers":
        """nbytes: of the largest matrix that lies on disk transposed; 0: none does."""
        turned = aligned_bytes(1, aligned(nbytes))[0] if nbytes else torch.empty(0)
        return cls(aligned_bytes(1, ENDS_BYTES)[0], turned)


def turned_bytes(shape: ExpertShape, transposed: bool) -> int:
    """What a thread that reads takes for a matrix that lies on disk transposed."""
    if not transposed or shape.published != WORDS:
        return 0
    return max(prod(shape.gate_up_shape), prod(shape.down_shape)) * shape.dtype.itemsize


def reading_bytes(shape: ExpertShape, transposed: bool) -> int:
    """What a thread that reads published experts takes beside the slot it fills."""
    turned = turned_bytes(shape, transposed)
    return ENDS_BYTES + ALIGNMENT + (aligned(turned) + ALIGNMENT if turned else 0)


def stored_shape(shape: tuple[int, ...], published: str, turned: bool) -> tuple[int, ...]:
    """What a tensor of experts' matrices is on disk; shape: as words.

    turned  whether words lie there transposed
    """
    if published != MXFP4:
        return (*shape[:-2], shape[-1], shape[-2]) if turned else shape
    return *shape[:-1], shape[-1] // MXFP4_BLOCK, MXFP4_BLOCK_BYTES


def part_of(file: SafetensorsFile, info: TensorInfo, at: int, count: int) -> Range:
    """One of `count` equal parts of a tensor."""
    nbytes = info.nbytes // count
    return file, info.offset + at * nbytes, nbytes


def parts_of(
    shape: ExpertShape, matrices: list[Matrix], transposed: bool = False
) -> list[TensorPart]:
    """Where the matrices of an expert belong in its record, and their scales where it has those.

    transposed  as `ExpertLayout` has it
    """
    if shape.published == WORDS:
        ends = accumulate((each.range[2] for each in matrices), initial=0)
        turned: list[Turned | None] = [None] * len(matrices)
        if transposed and len(matrices) == len(FUSED):
            dtype = shape.dtype
            turned = [
                Turned(*shape.gate_up_shape, dtype, in_turns=True),
                Turned(*shape.down_shape, dtype, in_turns=False),
            ]
        places = zip(matrices, ends, turned, strict=False)
        return [TensorPart(each.range, at, turned=turn) for each, at, turn in places]
    layout: ScaledLayout = Mxfp4Layout(shape.hidden_size, shape.expert_width)
    if shape.published == FP8:
        layout = Fp8Layout(shape.hidden_size, shape.expert_width)
    codes = [
        TensorPart(e.range, section.at) for e, section in zip(matrices, layout.codes, strict=True)
    ]
    scales = [
        TensorPart(each.scales, section.at, widened=each.scales[2] < section.nbytes)
        for each, section in zip(matrices, layout.scales, strict=True)
        if each.scales is not None
    ]
    return codes + scales


def expert_slot(store: ExpertStore) -> Tensor:
    """A slot on the CPU, empty."""
    return aligned_bytes(1, store.codec.slot_bytes)[0]


def read_matrices(store: ExpertStore, layer: int, expert: int, slot: Tensor) -> Matrices:
    """An expert's exact matrices, read by way of `slot` and perhaps views of it.

    Raises SpeqError where they cannot be had without a draft.
    """
    store.read(layer, expert, slot)
    return store.codec.decode(slot)


def mean_moved_bytes(store: ExpertStore) -> float:
    """What has to be moved for an expert, in the mean over all."""
    count = store.num_layers * store.num_experts
    sizes = (store.moved_bytes(*divmod(at, store.num_experts)) for at in range(count))
    return sum(sizes) / count
