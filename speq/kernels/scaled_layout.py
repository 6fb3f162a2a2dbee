"""Sizes of packed experts published as codes with scales: FP8, MXFP4, INT4 and NVFP4.

csrc/scaled.h has their layout. Experts without a gate have up and down alone.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from speq.kernels.compact_layout import expert_matrices

LINE_BYTES = 64
# Rows and columns of FP8 codes that share a scale.
FP8_BLOCK = 128
# FP8 has blocks of one row or of multiples of so many, and of multiples of so many columns.
FP8_ROWS, FP8_COLUMNS = 4, 64
# Neighbours of a row of MXFP4 codes that share a scale.
MXFP4_BLOCK = 32
# INT4 has groups of multiples of so many neighbours, and zero points of so many rows in a word.
INT4_COLUMNS, ZERO_ROWS = 32, 8
# Neighbours of NVFP4 codes that share a scale, and what widths are multiples of.
NVFP4_BLOCK, NVFP4_COLUMNS = 16, 32


@dataclass(frozen=True, slots=True)
class Section:
    """A tensor of a record: its offset in bytes, its shape and dtype."""

    at: int
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.uint8

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class ScaledLayout:
    """Sections of a record: codes of each matrix, then scales of each, then what else each has."""

    code_bits: ClassVar[int] = 4
    scale_dtype: ClassVar[torch.dtype] = torch.uint8
    hidden_size: int
    expert_width: int
    gated: bool = field(default=True, kw_only=True)

    def scales_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Shape of a matrix's scales."""
        raise NotImplementedError

    @property
    def matrices(self) -> tuple[tuple[int, int], ...]:
        """Rows and columns of the matrices."""
        return expert_matrices(self.hidden_size, self.expert_width, self.gated)

    @property
    def codes(self) -> tuple[Section, ...]:
        shapes = ((rows, columns * self.code_bits // 8) for rows, columns in self.matrices)
        return _sections(0, shapes)

    @property
    def scales(self) -> tuple[Section, ...]:
        shapes = (self.scales_shape(*each) for each in self.matrices)
        return _sections(_end(self.codes), shapes, self.scale_dtype)

    @property
    def others(self) -> tuple[Section, ...]:
        """What else each matrix has, if anything."""
        return ()

    @property
    def parts(self) -> tuple[tuple[Section, ...], ...]:
        """Sections of each matrix."""
        kinds = self.codes, self.scales, self.others
        return tuple(zip(*(kind for kind in kinds if kind), strict=True))

    @property
    def nbytes(self) -> int:
        """Bytes of a record, all of one size."""
        return _end(self.others or self.scales)


@dataclass(frozen=True, slots=True)
class Fp8Layout(ScaledLayout):
    """FP8 layout of gate, up [F, H] and down [H, F]: a byte per code, and a float32 scale per
    block.

    block_rows, block_columns  that share a scale; 0: all of a matrix
    """

    code_bits: ClassVar[int] = 8
    scale_dtype: ClassVar[torch.dtype] = torch.float32
    block_rows: int = FP8_BLOCK
    block_columns: int = FP8_BLOCK

    def __post_init__(self) -> None:
        """Raise ValueError for blocks that kernels do not know."""
        rows, columns = self.block_rows, self.block_columns
        whole = rows >= 0 and columns >= 0 and columns % FP8_COLUMNS == 0
        if not whole or (rows % FP8_ROWS and rows != 1):
            raise ValueError(
                f"blocks of FP8 are {rows} by {columns}, and must be of 1 row or multiples of "
                f"{FP8_ROWS}, and of multiples of {FP8_COLUMNS} columns"
            )

    def scales_shape(self, rows: int, columns: int) -> tuple[int, int]:
        return blocks_of(rows, self.block_rows), blocks_of(columns, self.block_columns)


@dataclass(frozen=True, slots=True)
class Mxfp4Layout(ScaledLayout):
    """MXFP4 layout of gate_up [2F, H], with rows of gate and up interleaved, and down [H, F]: two
    codes per byte, the first in its low half, and a scale byte per block of a row. Both widths are
    multiples of a block.
    """

    def __post_init__(self) -> None:
        """Raise ValueError for widths that are not whole blocks, and without a gate, whose rows are
        in turns with those of up.
        """
        if not self.gated:
            raise ValueError("experts have no gate; those of MXFP4 must have one")
        _check_widths("MXFP4", self, MXFP4_BLOCK)

    def scales_shape(self, rows: int, columns: int) -> tuple[int, int]:
        return rows, columns // MXFP4_BLOCK

    @property
    def matrices(self) -> tuple[tuple[int, int], ...]:
        return (2 * self.expert_width, self.hidden_size), (self.hidden_size, self.expert_width)


@dataclass(frozen=True, slots=True)
class Int4GroupsLayout(ScaledLayout):
    """INT4 layout of gate, up [F, H] and down [H, F]: two codes per byte, the first in its low
    half; a scale per group of a row, bfloat16 or float16; and, in some checkpoints, zero points of
    four bits, those of eight rows in an int32. Both widths are multiples of a group.
    """

    group_size: int
    has_zeros: bool = False
    has_halves: bool = False

    def __post_init__(self) -> None:
        """Raise ValueError for groups that widths are no multiples of."""
        size, sizes = self.group_size, (self.hidden_size, self.expert_width)
        if size < 1 or size % INT4_COLUMNS or any(each % size for each in sizes):
            raise ValueError(
                f"experts are {sizes[0]} by {sizes[1]} in groups of {size}; of INT4 both are "
                f"multiples of a group, and that is a multiple of {INT4_COLUMNS}"
            )

    def scales_shape(self, rows: int, columns: int) -> tuple[int, int]:
        return rows, columns // self.group_size

    @property
    def scales(self) -> tuple[Section, ...]:
        shapes = (self.scales_shape(*each) for each in self.matrices)
        dtype = torch.float16 if self.has_halves else torch.bfloat16
        return _sections(_end(self.codes), shapes, dtype)

    @property
    def others(self) -> tuple[Section, ...]:
        """Zero points."""
        if not self.has_zeros:
            return ()
        shapes = (
            (blocks_of(rows, ZERO_ROWS), columns // self.group_size)
            for rows, columns in self.matrices
        )
        return _sections(_end(self.scales), shapes, torch.int32)


@dataclass(frozen=True, slots=True)
class Nvfp4Layout(ScaledLayout):
    """NVFP4 layout of gate, up [F, H] and down [H, F]: two codes per byte, the first in its low
    half; a scale byte per block of a row; and a float32 per matrix. Both widths are multiples of
    two blocks.
    """

    def __post_init__(self) -> None:
        """Raise ValueError for widths that are not whole pairs of blocks."""
        _check_widths("NVFP4", self, NVFP4_COLUMNS)

    def scales_shape(self, rows: int, columns: int) -> tuple[int, int]:
        return rows, columns // NVFP4_BLOCK

    @property
    def others(self) -> tuple[Section, ...]:
        """Scales of matrices."""
        return _sections(_end(self.scales), ((1, 1) for _ in self.matrices), torch.float32)


def _check_widths(form: str, layout: ScaledLayout, block: int) -> None:
    sizes = layout.hidden_size, layout.expert_width
    if any(size % block for size in sizes):
        raise ValueError(
            f"experts are {sizes[0]} by {sizes[1]}; of {form} both are multiples of {block}"
        )


def blocks_of(size: int, block: int) -> int:
    """Number of blocks of rows or columns; the last one may be shorter. block 0: all in one"""
    return -(-size // block) if block else 1


def _sections(
    at: int, shapes: Iterable[tuple[int, int]], dtype: torch.dtype = torch.uint8
) -> tuple[Section, ...]:
    """Lay out sections one after another, each at a whole line."""
    sections = []
    for shape in shapes:
        sections.append(Section(at, shape, dtype))
        at = _end(sections[-1:])
    return tuple(sections)


def _end(sections: Sequence[Section]) -> int:
    last = sections[-1]
    return -(-(last.at + last.nbytes) // LINE_BYTES) * LINE_BYTES
