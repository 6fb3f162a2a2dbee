"""The INT4 copy of the experts that drafts: its layout, and the arena that holds it."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from speq.errors import SpeqError
from speq.ops import Int4Bank, quantize_int4

GROUP_SIZE = 128
# Rows quantised at a time, so that float32 copies of a large expert never exist whole.
ROW_BLOCK = 512


def group_size_of(columns: int) -> int:
    """128, or the largest power of two that divides a dimension that 128 does not."""
    size = min(GROUP_SIZE, columns & -columns)
    if size < 2:
        raise SpeqError(
            f"experts with a dimension of {columns}, an odd number, cannot be packed two codes to "
            "the byte; run with draft none"
        )
    return size


def whole_groups(group_size: int, columns: int) -> int:
    """Columns to a scale, of rows of `columns`: all, where group_size is -1 or they are fewer."""
    return columns if group_size == -1 else min(group_size, columns)


@dataclass(frozen=True, slots=True)
class Int4Layout:
    """Shapes of one INT4 expert of gate_up_proj [2F, H] and down_proj [H, F].

    group_size  columns to a scale; a whole row where it has fewer, or where this is -1; None: what
                `group_size_of` says of each dimension
    permuted    whether an order of inputs (desc_act) belongs to each gate_up_proj
    """

    hidden_size: int
    expert_width: int
    group_size: int | None = None
    permuted: bool = False

    def group_size_for(self, columns: int) -> int:
        """Columns to a scale, of rows of `columns`."""
        if self.group_size is None:
            return group_size_of(columns)
        return whole_groups(self.group_size, columns)

    @property
    def shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each part of an expert, by name."""
        hidden, width = self.hidden_size, self.expert_width
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "gate_up_qweight": ((2 * width, hidden // 2), torch.uint8),
            "gate_up_scales": ((2 * width, hidden // self.group_size_for(hidden)), torch.float16),
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


class Int4Arena:
    """INT4 experts on the device, addressed through an expert-to-base-slot table.

    parts       by name, [N, ...] as `Int4Layout.shapes` says, N base slots
    base_slots  [L, E] int64: the base slot of each expert; here every expert has one
    """

    def __init__(
        self, layout: Int4Layout, num_layers: int, num_experts: int, device: torch.device
    ) -> None:
        self.layout = layout
        count = num_layers * num_experts
        self.parts = {
            name: torch.empty(count, *shape, dtype=dtype, device=device)
            for name, (shape, dtype) in layout.shapes.items()
        }
        self.base_slots = torch.arange(count, device=device).view(num_layers, num_experts)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())

    @property
    def bank(self) -> Int4Bank:
        """The experts as the kernels take them."""
        return Int4Bank(
            (self.parts["gate_up_qweight"], self.parts["gate_up_scales"]),
            (self.parts["down_qweight"], self.parts["down_scales"]),
            self.parts.get("input_perm"),
        )

    def quantize_into(self, base_slot: int, gate_up_proj: Tensor, down_proj: Tensor) -> None:
        """Round an exact expert (any float dtype, on the CPU) to nearest into a base slot."""
        for name, matrix in (("gate_up", gate_up_proj), ("down", down_proj)):
            qweight = self.parts[f"{name}_qweight"][base_slot]
            scales = self.parts[f"{name}_scales"][base_slot]
            group_size = self.layout.group_size_for(matrix.shape[1])
            for block in _blocks(matrix.shape[0]):
                codes, steps = quantize_int4(matrix[block], group_size)
                qweight[block].copy_(codes)
                scales[block].copy_(steps)


def _blocks(rows: int) -> Iterator[slice]:
    for start in range(0, rows, ROW_BLOCK):
        yield slice(start, min(start + ROW_BLOCK, rows))
