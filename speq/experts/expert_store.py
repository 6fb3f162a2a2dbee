"""Exact experts on disk, as records that can be read one at a time."""

import re
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Protocol

from torch import Tensor

from speq.errors import SpeqError
from speq.experts.codec import ExpertCodec, ExpertShape, Matrices, RawCodec
from speq.experts.packed_draft import TiedDraft
from speq.files.alignment import ALIGNMENT, aligned_bytes
from speq.files.checkpoint import OTHER_VERSION, Checkpoint
from speq.files.range_file import ENDS_BYTES
from speq.files.safetensors_file import SafetensorsFile

# Checkpoints keep experts one by one, under the names of `transformers` or of their authors.
EXPERT_NAME = re.compile(
    r"(?:^|\.)layers\.(\d+)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\."
    r"(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight$"
)
PROJECTIONS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
# A file, an offset in it and a number of bytes.
Range = tuple[SafetensorsFile, int, int]
RECORD_ORDER = ("gate_proj", "up_proj", "down_proj")


def is_expert_tensor(name: str) -> bool:
    """Whether a checkpoint's tensor belongs to a routed expert."""
    return EXPERT_NAME.search(name) is not None


class ExpertStore(Protocol):
    """Records of exact experts. Layers count MoE layers only."""

    num_layers: int
    num_experts: int

    @property
    def codec(self) -> ExpertCodec: ...

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
    """What a model's config says of its experts. layers: model layers that have experts."""

    layers: tuple[int, ...]
    num_experts: int
    hidden_size: int
    expert_width: int


class SafetensorsExpertStore:
    """Experts read straight from the shards a model was published in.

    Raises SpeqError where an expert is absent or not of the shape and dtype the others have.
    """

    def __init__(self, checkpoint: Checkpoint, layout: ExpertLayout) -> None:
        self.num_layers = len(layout.layers)
        self.num_experts = layout.num_experts
        order = {layer: at for at, layer in enumerate(layout.layers)}
        shape = self._common_shape(checkpoint, layout)
        self._codec = RawCodec(shape)
        width, hidden = layout.expert_width, layout.hidden_size
        wanted = {"gate_proj": (width, hidden), "up_proj": (width, hidden)}
        wanted["down_proj"] = (hidden, width)
        found: dict[tuple[int, int], dict[str, Range]] = {}
        for name, (file, info) in checkpoint.tensors.items():
            match = EXPERT_NAME.search(name)
            if match is None or int(match[1]) not in order:
                continue
            projection = PROJECTIONS.get(match[3], match[3])
            if info.shape != wanted[projection] or info.dtype != shape.dtype:
                raise SpeqError(
                    f"{file.path}: tensor {name} is {info.dtype} {list(info.shape)}; config.json "
                    f"and the other experts make it {shape.dtype} {list(wanted[projection])}; "
                    f"{OTHER_VERSION}"
                )
            key = (order[int(match[1])], int(match[2]))
            found.setdefault(key, {})[projection] = (file, info.offset, info.nbytes)
        self._parts = self._complete(found, checkpoint, layout)
        self.reading_bytes = ENDS_BYTES + ALIGNMENT
        self._ends: SimpleQueue[Tensor] = SimpleQueue()

    @staticmethod
    def _common_shape(checkpoint: Checkpoint, layout: ExpertLayout) -> ExpertShape:
        for name, (_, info) in checkpoint.tensors.items():
            if is_expert_tensor(name):
                return ExpertShape(layout.hidden_size, layout.expert_width, info.dtype)
        raise SpeqError(
            f"{checkpoint.path} holds no expert tensors such as "
            "model.layers.0.mlp.experts.0.gate_proj.weight; download the model as its authors "
            "published it"
        )

    def _complete(
        self,
        found: dict[tuple[int, int], dict[str, Range]],
        checkpoint: Checkpoint,
        layout: ExpertLayout,
    ) -> list[list[Range]]:
        records = []
        for layer in range(self.num_layers):
            for expert in range(self.num_experts):
                parts = found.get((layer, expert), {})
                for projection in RECORD_ORDER:
                    if projection not in parts:
                        raise SpeqError(
                            f"{checkpoint.path} lacks {projection} of expert {expert} in layer "
                            f"{layout.layers[layer]}; config.json promises {self.num_experts} "
                            f"experts in each such layer; {OTHER_VERSION}"
                        )
                records.append([parts[projection] for projection in RECORD_ORDER])
        return records

    @property
    def codec(self) -> RawCodec:
        return self._codec

    @property
    def tied_draft(self) -> TiedDraft | None:
        return None

    def record_bytes(self, layer: int, expert: int) -> int:
        return self._codec.record_bytes

    def moved_bytes(self, layer: int, expert: int) -> int:
        return self._codec.record_bytes

    def read(self, layer: int, expert: int, slot: Tensor) -> int:
        try:
            ends = self._ends.get_nowait()
        except Empty:  # as many as threads ever read at a time
            ends = aligned_bytes(1, ENDS_BYTES)[0]
        at = read_bytes = 0
        try:
            for file, offset, nbytes in self._parts[layer * self.num_experts + expert]:
                read_bytes += file.read_scattered(offset, slot[at : at + nbytes], ends)
                at += nbytes
        finally:
            self._ends.put(ends)
        return read_bytes

    def close(self) -> None:
        pass  # the shards are the checkpoint's


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
