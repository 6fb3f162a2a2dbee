"""The draft's INT4 experts: their layout, and the arena that holds them."""

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from speq.errors import Broken, UnsupportedError
from speq.files.alignment import prefer_huge_pages
from speq.kernels.ops import Int4Slots, quantize_int4, quantize_int4_planes

GROUP_SIZE = 128
# Rows quantised at a time, to limit the memory of float32 copies.
ROW_BLOCK = 512


def group_size_of(columns: int) -> int:
    """Group size of a dimension: 128, or the largest power of two that divides it."""
    size = min(GROUP_SIZE, columns & -columns)
    if size < 2:
        raise UnsupportedError(
            f"experts with a dimension of {columns}, an odd number, cannot be packed two codes to "
            "the byte; run with draft none"
        )
    return size


def group_columns(group_size: int, columns: int) -> int:
    """Columns per scale in rows of `columns`: all, if group_size is -1 or larger."""
    return columns if group_size == -1 else min(group_size, columns)


@dataclass(frozen=True, slots=True)
class Int4Layout:
    """Layout of one INT4 expert of gate_up_proj [2F, H], or [F, H] without a gate, and down_proj
    [H, F].

    group_size  columns per scale; at most a whole row; -1: a whole row; None: `group_size_of` each
                dimension
    permuted    whether each gate_up_proj has an order of inputs (desc_act)
    gated       whether experts have a gate
    """

    hidden_size: int
    expert_width: int
    group_size: int | None = None
    permuted: bool = False
    gated: bool = True

    def group_size_for(self, columns: int) -> int:
        """Columns per scale in rows of `columns`."""
        if self.group_size is None:
            return group_size_of(columns)
        return group_columns(self.group_size, columns)

    def in_each(self, rows: Tensor) -> list[Tensor]:
        """Numbers in gate_up of rows [R] of gate, if there is one, and of up."""
        return [rows, rows + self.expert_width] if self.gated else [rows]

    @property
    def shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each part of an expert, by name."""
        hidden, width = self.hidden_size, self.expert_width
        outputs = 2 * width if self.gated else width
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "gate_up_qweight": ((outputs, hidden // 2), torch.uint8),
            "gate_up_scales": ((outputs, hidden // self.group_size_for(hidden)), torch.float16),
            "down_qweight": ((hidden, width // 2), torch.uint8),
            "down_scales": ((hidden, width // self.group_size_for(width)), torch.float16),
        }
        if self.permuted:
            shapes["input_perm"] = ((hidden,), torch.int32)
        return shapes

    @property
    def nbytes(self) -> int:
        """Bytes of one expert's codes, scales and order of inputs."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.shapes.values())


@dataclass(frozen=True, slots=True)
class Int4Expert:
    """One expert's codes, on the CPU.

    parts       by name, see `Int4Layout.shapes`
    inner_perm  [F] int64 or None: down's column c is for neuron inner_perm[c], and so are rows c
                and, with a gate, F + c of gate_up (desc_act)
    """

    parts: dict[str, Tensor]
    inner_perm: Tensor | None = None

    @property
    def gate_up(self) -> tuple[Tensor, Tensor]:
        return self.parts["gate_up_qweight"], self.parts["gate_up_scales"]

    @property
    def down(self) -> tuple[Tensor, Tensor]:
        return self.parts["down_qweight"], self.parts["down_scales"]

    @property
    def reorders(self) -> bool:
        """True if rows or columns of an exact expert are in another order than the codes."""
        return "input_perm" in self.parts or self.inner_perm is not None

    def in_order(self, gate_up_proj: Tensor, down_proj: Tensor) -> tuple[Tensor, Tensor]:
        """Reorder an exact expert's rows and columns as the codes are."""
        if "input_perm" in self.parts:
            gate_up_proj = gate_up_proj.index_select(1, self.parts["input_perm"].long())
        if self.inner_perm is not None:
            order = self.inner_perm
            parts = gate_up_proj.split(len(order))
            gate_up_proj = torch.cat([part.index_select(0, order) for part in parts])
            down_proj = down_proj.index_select(1, order)
        return gate_up_proj, down_proj

    @classmethod
    def round(cls, layout: Int4Layout, gate_up_proj: Tensor, down_proj: Tensor) -> "Int4Expert":
        """Round an exact expert (any float dtype, on the CPU) to nearest."""
        parts = {
            name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in layout.shapes.items()
        }
        for name, matrix in (("gate_up", gate_up_proj), ("down", down_proj)):
            qweight, scales = parts[f"{name}_qweight"], parts[f"{name}_scales"]
            group_size = layout.group_size_for(matrix.shape[1])
            for block in _blocks(matrix.shape[0]):
                codes, steps = quantize_int4(matrix[block], group_size)
                qweight[block].copy_(codes)
                scales[block].copy_(steps)
        return cls(parts)


class Int4Arena:
    """INT4 experts on the device, addressed through an expert-to-base-slot table.

    parts        by name, [N, ...], see `Int4Layout.shapes`; N base slots
    base_slots   [L, E] int64: the base slot of each expert; -1: it is not held
    held         number of the expert in each base slot, counted layer after layer
    keep_orders  whether to keep each expert's inner_perm, which only encoding exact experts over
                 the codes needs
    """

    def __init__(
        self,
        layout: Int4Layout,
        num_layers: int,
        num_experts: int,
        device: torch.device,
        keep_orders: bool = False,
        kept: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """kept: experts to hold, by layer; None: all of them."""
        self.layout = layout
        self._keep_orders = keep_orders
        self._inner_perms: dict[int, Tensor] = {}
        by_layer = [range(num_experts)] * num_layers if kept is None else [*map(sorted, kept)]
        if len(by_layer) != num_layers:
            raise Broken(f"experts of {len(by_layer)} layers are kept of {num_layers}")
        self.held = [
            layer * num_experts + expert
            for layer, experts in enumerate(by_layer)
            for expert in experts
        ]
        self.parts = {
            name: torch.empty(len(self.held), *shape, dtype=dtype, device=device)
            for name, (shape, dtype) in layout.shapes.items()
        }
        if device.type == "cpu":
            for part in self.parts.values():
                prefer_huge_pages(part)
        base_slots = torch.full((num_layers * num_experts,), -1)
        base_slots[self.held] = torch.arange(len(self.held))
        self.base_slots = base_slots.view(num_layers, num_experts).to(device)

    @property
    def whole(self) -> bool:
        """True if all experts are held, each in the base slot of its number."""
        return len(self.held) == self.base_slots.numel()

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())

    @property
    def experts(self) -> Int4Slots:
        """Experts in the form that the kernels take."""
        return Int4Slots(
            (self.parts["gate_up_qweight"], self.parts["gate_up_scales"]),
            (self.parts["down_qweight"], self.parts["down_scales"]),
            self.parts.get("input_perm"),
        )

    def put(self, base_slot: int, expert: Int4Expert) -> None:
        """Copy an expert of this layout into a base slot."""
        for name, part in expert.parts.items():
            self.parts[name][base_slot].copy_(part)
        if self._keep_orders and expert.inner_perm is not None:
            self._inner_perms[base_slot] = expert.inner_perm.to(torch.int32)

    def quantize_into(self, base_slot: int, gate_up_proj: Tensor, down_proj: Tensor) -> None:
        """Round an exact expert (any float dtype, on the CPU) to nearest into a base slot."""
        self.put(base_slot, Int4Expert.round(self.layout, gate_up_proj, down_proj))

    def expert(self, base_slot: int) -> Int4Expert:
        """Copy an expert from a base slot to the CPU, with its order if orders are kept."""
        parts = {name: part[base_slot].cpu() for name, part in self.parts.items()}
        order = self._inner_perms.get(base_slot)
        return Int4Expert(parts, None if order is None else order.long())

    def digest(self) -> str:
        """SHA-256 of all held experts' parts, expert after expert."""
        digest = hashlib.sha256()
        for base_slot in range(len(self.held)):
            digest.update(record_of(self.expert(base_slot)).numpy().data)
        return digest.hexdigest()


def record_of(expert: Int4Expert) -> Tensor:
    """Concatenate all parts in the order of `Int4Layout.shapes`: [layout.nbytes] uint8."""
    return torch.cat(
        [part.contiguous().view(-1).view(torch.uint8) for part in expert.parts.values()]
    )


def expert_of(record: Tensor, layout: Int4Layout) -> Int4Expert:
    """Split the output of `record_of` into parts, as copies."""
    parts: dict[str, Tensor] = {}
    at = 0
    for name, (shape, dtype) in layout.shapes.items():
        nbytes = math.prod(shape) * dtype.itemsize
        parts[name] = record[at : at + nbytes].clone().view(dtype).view(shape)
        at += nbytes
    return Int4Expert(parts)


def _blocks(rows: int) -> Iterator[slice]:
    for start in range(0, rows, ROW_BLOCK):
        yield slice(start, min(start + ROW_BLOCK, rows))


def round_into(
    words: Tensor, planes: int, group_size: int, qweight: Tensor, scales: Tensor
) -> None:
    """Round a matrix [N, K] to nearest, some rows at a time.

    planes   of codes: 1, or 2 for eight bits
    qweight  [planes * N, K / 2] uint8; scales: [planes * N, K / group_size] float16; filled
    """
    quantize = quantize_int4 if planes == 1 else quantize_int4_planes
    outputs = len(words)
    for rows in _blocks(outputs):
        made = quantize(words[rows].cpu(), group_size)
        for whole, part in zip((qweight, scales), made, strict=True):
            for plane, codes in zip(whole.split(outputs), part.chunk(planes), strict=True):
                plane[rows].copy_(codes)
