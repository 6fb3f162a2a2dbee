"""Sizes of packed experts published as codes with scales: FP8, MXFP4, INT4 and NVFP4.

csrc/scaled.h has their layout. Experts without a gate have up and down alone.
"""

from dataclasses import dataclass
from typing import ClassVar, Protocol

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
    """A tensor of a record: its offset in bytes and its shape."""

    at: int
    shape: tuple[int, ...]
    itemsize: int = 1

    @property
    def nbytes(self) -> int:
        nbytes = self.itemsize
        for size in self.shape:
            nbytes *= size
        return nbytes


class ScaledLayout(Protocol):
    """Sections of a record: codes of each matrix, then scales of each, then what else each has."""

    @property
    def code_bits(self) -> int: ...

    @property
    def matrices(self) -> tuple[tuple[int, int], ...]:
        """Rows and columns of the matrices."""

    @property
    def codes(self) -> tuple[Section, ...]: ...

    @property
    def scales(self) -> tuple[Section, ...]: ...

    @property
    def parts(self) -> tuple[tuple[Section, ...], ...]:
        """Sections of each matrix."""

    @property
    def nbytes(self) -> int:
        """Bytes of a record, all of one size."""


@dataclass(frozen=True, slots=True)
class Fp8Layout:
    """FP8 layout of gate, up [F, H] and down [H, F]: a byte per code, and a float32 scale per
    block.

    block_rows, block_columns  that share a scale; 0: all of a matrix
    """

    code_bits: ClassVar[int] = 8
    hidden_size: int
    expert_width: int
    block_rows: int = FP8_BLOCK
    block_columns: int = FP8_BLOCK
    gated: bool = True

    @property
    def matrices(self) -> tuple[tuple[int, int], ...]:
        return expert_matrices(self.hidden_size, self.expert_width, self.gated)

    @property
    def codes(self) -> tuple[Section, ...]:
        return _sections(0, self.matrices, 1)

    @property
    def scales(self) -> tuple[Section, ...]:
        shapes = tuple(
            (blocks_of(rows, self.block_rows), blocks_of(columns, self.block_columns))
            for rows, columns in self.matrices
        )
        return _sections(_end(self.codes), shapes, 4)

    @property
    def parts(self) -> tuple[tuple[Section, ...], ...]:
        return tuple(zip(self.codes, self.scales, strict=True))

    @property
    def nbytes(self) -> int:
        return _end(self.scales)


@dataclass(frozen=True, slots=True)
class Mxfp4Layout:
    """MXFP4 layout of gate_up [2F, H], with rows of gate and up interleaved, and down [H, F]: two
    codes per byte, the first in its low half, and a scale byte per block of a row. Both widths are
    multiples of a block.
    """

    block: ClassVar[int] = MXFP4_BLOCK
    code_bits: ClassVar[int] = 4
    hidden_size: int
    expert_width: int

    @property
    def matrices(self) -> tuple[tuple[int, int], ...]:
        return (2 * self.expert_width, self.hidden_size), (self.hidden_size, self.expert_width)

    @property
    def codes(self) -> tuple[Section, ...]:
        return _sections(0, tuple((rows, columns // 2) for rows, columns in self.matrices), 1)

    @property
    def scales(self) -> tuple[Section, ...]:
        shapes = tuple((rows, columns // self.block) for rows, columns in self.matrices)
        return _sections(_end(self.codes), shapes, 1)

    @property
    def parts(self) -> tuple[tuple[Section, ...], ...]:
        return tuple(zip(self.codes, self.scales, strict=True))

    @property
    def nbytes(self) -> int:
        return _end(self.scales)


@dataclass(frozen=True, slots=True)
class Int4GroupsLayout:
    """INT4 layout of gate, up [F, H] and down [H, F]: two codes per byte, the first in its low
    half; a scale per group of a row, bfloat16 or float16; and, in some checkpoints, zero points of
    four bits, those of eight rows in an int32. Both widths are multiples of a group.
    """

    code_bits: ClassVar[int] = 4
    hidden_size: int
    expert_width: int
    group_size: int
    has_zeros: bool = False
    has_halves: bool = False
    gated: bool = True

    @property
    def matrices(self) -> tuple[tuple[int, int], ...]:
        return expert_matrices(self.hidden_size, self.expert_width, self.gated)

    @property
    def codes(self) -> tuple[Section, ...]:
        return _sections(0, tuple((rows, columns // 2) for rows, columns in self.matrices), 1)

    @property
    def scales(self) -> tuple[Section, ...]:
        shapes = tuple((rows, columns // self.group_size) for rows, columns in self.matrices)
        return _sections(_end(self.codes), shapes, 2)

    @property
    def zeros(self) -> tuple[Section, ...]:
        if not self.has_zeros:
            return ()
        shapes = tuple(
            (blocks_of(rows, ZERO_ROWS), columns // self.group_size)
            for rows, columns in self.matrices
        )
        return _sections(_end(self.scales), shapes, 4)

    @property
    def parts(self) -> tuple[tuple[Section, ...], ...]:
        if not self.has_zeros:
            return tuple(zip(self.codes, self.scales, strict=True))
        return tuple(zip(self.codes, self.scales, self.zeros, strict=True))

    @property
    def nbytes(self) -> int:
        return _end(self.zeros or self.scales)


@dataclass(frozen=True, slots=True)
class Nvfp4Layout:
    """NVFP4 layout of gate, up [F, H] and down [H, F]: two codes per byte, the first in its low
    half; a scale byte per block of a row; and a float32 per matrix. Both widths are multiples of
    two blocks.
    """

    code_bits: ClassVar[int] = 4
    hidden_size: int
    expert_width: int
    gated: bool = True

    @property
    def matrices(self) -> tuple[tuple[int, int], ...]:
        return expert_matrices(self.hidden_size, self.expert_width, self.gated)

    @property
    def codes(self) -> tuple[Section, ...]:
        return _sections(0, tuple((rows, columns // 2) for rows, columns in self.matrices), 1)

    @property
    def scales(self) -> tuple[Section, ...]:
        shapes = tuple((rows, columns // NVFP4_BLOCK) for rows, columns in self.matrices)
        return _sections(_end(self.codes), shapes, 1)

    @property
    def matrix_scales(self) -> tuple[Section, ...]:
        return _sections(_end(self.scales), ((1, 1),) * len(self.matrices), 4)

    @property
    def parts(self) -> tuple[tuple[Section, ...], ...]:
        return tuple(zip(self.codes, self.scales, self.matrix_scales, strict=True))

    @property
    def nbytes(self) -> int:
        return _end(self.matrix_scales)


def blocks_of(size: int, block: int) -> int:
    """Number of blocks of rows or columns; the last one may be shorter. block 0: all in one"""
    return -(-size // block) if block else 1


def _sections(at: int, shapes: tuple[tuple[int, int], ...], itemsize: int) -> tuple[Section, ...]:
    """Lay out sections one after another, each at a whole line."""
    sections = []
    for shape in shapes:
        sections.append(Section(at, shape, itemsize))
        at = _end(sections[-1:])
    return tuple(sections)


def _end(sections: tuple[Section, ...] | list[Section]) -> int:
    last = sections[-1]
    return -(-(last.at + last.nbytes) // LINE_BYTES) * LINE_BYTES
