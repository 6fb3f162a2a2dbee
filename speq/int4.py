"""The INT4 copy of the experts that drafts: its layout, and the arena that holds it."""

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


@dataclass(frozen=True, slots=True)
class Int4Layout:
    """Shapes of one INT4 expert of gate_up_proj [2F, H] and down_proj [H, F]."""

    hidden_size: int
    expert_width: int

    @property
    def shapes(self) -> dict[str, tuple[tuple[int, int], torch.dtype]]:
        """Shape and dtype of each part of an expert, by name."""
        hidden, width = self.hidden_size, self.expert_width
        return {
            "gate_up_qweight": ((2 * width, hidden // 2), torch.uint8),
            "gate_up_scales": ((2 * width, hidden // group_size_of(hidden)), torch.float16),
            "down_qweight": ((hidden, width // 2), torch.uint8),
            "down_scales": ((hidden, width // group_size_of(width)), torch.float16),
        }

    @property
    def nbytes(self) -> int:
        """Bytes of one expert's codes and scales."""
        return sum(rows * columns * d.itemsize for (rows, columns), d in self.shapes.values())


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
        )

    def quantize_into(self, base_slot: int, gate_up_proj: Tensor, down_proj: Tensor) -> None:
        """Round an exact expert (any float dtype, on the CPU) to nearest into a base slot."""
        for name, matrix in (("gate_up", gate_up_proj), ("down", down_proj)):
            qweight = self.parts[f"{name}_qweight"][base_slot]
            scales = self.parts[f"{name}_scales"][base_slot]
            group_size = group_size_of(matrix.shape[1])
            for block in _blocks(matrix.shape[0]):
                codes, steps = quantize_int4(matrix[block], group_size)
                qweight[block].copy_(codes)
                scales[block].copy_(steps)


def _blocks(rows: int) -> Iterator[slice]:
    for start in range(0, rows, ROW_BLOCK):
        yield slice(start, min(start + ROW_BLOCK, rows))
